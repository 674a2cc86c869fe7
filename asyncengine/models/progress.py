"""A progress bar on stderr while a model loads; nothing at all when stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any


class LoadProgress:
    """Context manager. `stage` begins a step of `total` units (None: unknown length), `advance` counts one; either
    raises what `check` raises, where loading may be given up on the way."""

    def __init__(self, enabled: bool, check: Callable[[], None] | None = None) -> None:
        self._check = check
        self._bar: Any = None
        self._task: Any = None
        if enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)

    def __enter__(self) -> LoadProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, text: str, total: int | None = None) -> None:
        if self._check is not None:
            self._check()
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(text, total=total)

    def advance(self) -> None:
        if self._check is not None:
            self._check()
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
