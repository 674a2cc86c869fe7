"""Progress of loading a model: a bar on stderr, or lines if that is no terminal, and calls of `on_progress`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextvars import Token
from typing import Any

from asyncengine.errors import EngineClosed
from asyncengine.kernels.api import watcher
from asyncengine.progress import OnProgress, ProgressLines, is_terminal

logger = logging.getLogger("asyncengine")


class LoadProgress:
    """Context manager that shows the progress of a load, whose phases each enter it anew. `stage` begins a stage of
    `total` units (None: unknown length), `advance` counts one unit. Both call `check`, whose error cancels the load,
    and raise `EngineClosed` if `on_progress` raises. Kernels that are compiled meanwhile have a line of their own and
    are counted over the whole load.
    """

    def __init__(
        self, enabled: bool, check: Callable[[], None] = lambda: None, on_progress: OnProgress | None = None
    ) -> None:
        self._check = check
        self._on_progress = on_progress
        self._lines: ProgressLines | None = None
        self._stage: tuple[str, int | None] = ("", None)
        self._done = 0
        self._bar: Any = None
        self._task: Any = None
        self._kernels: Any = None
        self._compiled = 0
        self._began = 0.0
        self._token: Token[Any] | None = None
        if enabled and is_terminal(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        elif enabled:
            self._lines = ProgressLines()

    def __enter__(self) -> LoadProgress:
        if self._bar is not None:
            self._bar.start()
        self._token = watcher.set(self.compiling)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._token is not None:
            watcher.reset(self._token)
        if self._bar is not None:
            self._bar.stop()
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
        self._task = self._kernels = None

    def stage(self, text: str, total: int | None = None) -> None:
        self._check()
        self._stage, self._done = (text, total), 0
        self._tell(text, 0, total)
        if self._bar is not None:
            for task in (self._task, self._kernels):
                if task is not None:
                    self._bar.remove_task(task)
            self._task, self._kernels = self._bar.add_task(text, total=total), None

    def advance(self) -> None:
        self._check()
        self._done += 1
        self._tell(self._stage[0], self._done, self._stage[1])
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)

    def _tell(self, stage: str, done: int, total: int | None) -> None:
        if self._on_progress is not None:
            try:
                self._on_progress(stage, done, total)
            except Exception as error:
                raise EngineClosed(f"on_progress gave the load up: {error!r}") from error
        if self._lines is not None:
            self._lines.tell(f"loading: {stage}" + (f" ({done} of {total})" if total else ""))

    def compiling(self, kernel: str, most: int) -> None:
        """Show that a kernel is about to be compiled, one of at most `most`."""
        if self._compiled == 0:
            self._began = time.perf_counter()
            logger.info("compiling kernels for this machine, once")
        self._compiled += 1
        most = max(most, self._compiled)
        self._tell("compiling kernels, once on this machine", self._compiled - 1, most)
        if self._bar is None:
            return
        text = f"compiling kernel {self._compiled} of at most {most}, once on this machine: {kernel}"
        if self._kernels is None:
            self._kernels = self._bar.add_task(text)
        self._bar.update(self._kernels, description=text, total=most, completed=self._compiled - 1)

    def compiled(self, kernel: str, most: int) -> None:
        """Show that `kernels.compile_ahead` has compiled a kernel in another process, one of at most `most`."""
        self._check()
        self.compiling(kernel.split(":")[1].strip("_").replace("_", " "), most)

    def say_compiled(self) -> None:
        """Log the number of kernels compiled during the load, and the time that it took."""
        if self._compiled:
            logger.info("compiled %d kernels in %.0f s", self._compiled, time.perf_counter() - self._began)
