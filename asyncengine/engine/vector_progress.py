"""A progress bar on stderr for long lists of texts; nothing at all when stderr is no terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from asyncengine.device.process import is_terminal


class ProgressBar:
    """Counts texts, as a context manager."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar: Any = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("embedding", total=total)

    def advance(self, count: int) -> None:
        """`count` more are done."""
        self._bar.advance(self._task, count)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()


def progress_bar(total: int) -> ProgressBar | None:
    """None where nobody would see it."""
    return ProgressBar(total) if is_terminal(sys.stderr) else None
