"""Progress of long tasks, on stderr: a bar on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TextIO

OnProgress = Callable[[str, int, int | None], object]
"""Called with the stage of loading, the number of its steps that are done, and of how many (None: unknown)."""
LINE_PERIOD = 10.0
"""Seconds before the first line, and between two lines: a load that ends sooner prints none."""


class ProgressLines:
    """Lines on stderr for logs and notebooks, one in `LINE_PERIOD` seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LINE_PERIOD

    def tell(self, text: str) -> None:
        """Print `text`, if it is time for a line. A program without stderr, or with one that is closed, has none."""
        now = time.monotonic()
        if now >= self._next and sys.stderr is not None:
            self._next = now + LINE_PERIOD
            with suppress(OSError, ValueError):
                print(f"asyncengine: {text}", file=sys.stderr, flush=True)


@contextmanager
def counted(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """A context that gives a function to be called with how many more of `total` are done."""
    if not is_terminal(sys.stderr):
        lines, done = ProgressLines(), 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            lines.tell(f"{label}: {done} of {total}")

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.advance, bar.add_task(label, total=total))


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal. Services and windowed programs have none, or one that is closed, and
    a program may put there whatever can `write`."""
    with suppress(AttributeError, OSError, ValueError):
        return bool(stream.isatty())  # type: ignore[union-attr]
    return False
