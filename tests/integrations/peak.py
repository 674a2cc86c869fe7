"""How many requests an engine ran at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asyncengine import EngineHandle


class Peak:
    rows = 0


@contextmanager
def peak_running(handle: EngineHandle) -> Iterator[Peak]:
    """The most rows any step had while the block ran."""
    peak = Peak()

    def hook(event: object) -> None:
        peak.rows = max(peak.rows, getattr(event, "rows", 0))

    remove = handle.get().aengine.on_event(hook)
    try:
        yield peak
    finally:
        remove()
