"""Tasks that an object has under way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Tasks of one event loop, kept while they run: the loop itself holds them by weak references."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], None] = {}

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._running[task] = None
        task.add_done_callback(lambda done: self._running.pop(done, None))
        return task

    def cancel(self) -> None:
        """Cancel all. Raises `RuntimeError` if their loop is closed."""
        for task in list(self._running):
            task.cancel()

    async def end(self) -> None:
        """Cancel all, and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
