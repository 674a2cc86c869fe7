"""The most requests that an engine ran at once, and engines that wait for callers: a slow machine changes neither."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.fake_engine import PATIENCE, posted

from asyncengine import EngineHandle
from asyncengine.events import StepDone


class Peak:
    rows = 0


@contextmanager
def peak_running(handle: EngineHandle, together: int = 0) -> Iterator[Peak]:
    """The most rows any step had while the block ran. The first requests are held until `together` have come."""
    peak, engine = Peak(), handle.get().aengine

    def hook(event: object) -> None:
        if not isinstance(event, StepDone):
            return
        peak.rows = max(peak.rows, event.rows)
        if peak.rows < together:
            _wait(lambda: event.running + event.waiting + len(posted(engine)) >= together)

    remove = engine.on_event(hook)
    try:
        yield peak
    finally:
        remove()


@contextmanager
def paced(handle: EngineHandle) -> Iterator[None]:
    """The engine makes nothing more before what it made has been read: a reader that is slow gets as many pieces as
    one that is quick."""
    engine = handle.get().aengine

    def all_read() -> bool:
        mailboxes = [stream.mailbox for stream in engine.core.loop.delivery.streams.values()]
        # who waits beside something to read wants more at once
        return bool(posted(engine)) or not any(box.ready and box._waiter is None for box in mailboxes)

    def hook(event: object) -> None:
        if isinstance(event, StepDone):
            _wait(all_read)

    remove = engine.on_event(hook)
    try:
        yield
    finally:
        remove()


@contextmanager
def slowed(handle: EngineHandle, seconds: float = 0.02) -> Iterator[None]:
    """Each step takes so long at least: a long answer is never complete before a short deadline."""

    def hook(event: object) -> None:
        if isinstance(event, StepDone):
            time.sleep(seconds)

    remove = handle.get().aengine.on_event(hook)
    try:
        yield
    finally:
        remove()


def _wait(condition: Callable[[], bool]) -> None:
    """Waits on the engine's own thread, which stands still meanwhile."""
    gives_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < gives_up, "nobody came to the engine that waits"
        time.sleep(0.001)
