"""The engine's inbox: anyone posts from any thread, only the engine's loop takes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Many writers, one reader. `post` is thread-safe and never blocks or awaits.

    After `close` nothing can be posted any more: between "is it open?" and "it is in" nobody can slip in, so every
    accepted item is either taken by the loop or handed back by `close`.
    """

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        # Reentrant: a finalizer (a dropped stream posts its Abort) may run inside any of these on the same thread.
        self._lock = threading.RLock()
        self._waiter: asyncio.Future[None] | None = None
        self._reader: int | None = None
        self._closed = False
        self.at_wake: Callable[[], object] = bool
        """Called on the reader's thread, while the reader waits, when another thread has posted something to it."""

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def awaited_here(self) -> bool:
        """Whether this is the reader's thread, and it waits for the next item."""
        return self._waiter is not None and self._reader == threading.get_ident()

    def post(self, *items: T) -> bool:
        """Append all items at once, in order. False if the inbox is closed."""
        with self._lock:
            if self._closed:
                return False
            self.items.extend(items)
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            if threading.get_ident() == self._reader:
                _wake(waiter)
            else:
                with contextlib.suppress(RuntimeError):  # that loop is closed: nobody will ever take
                    waiter.get_loop().call_soon_threadsafe(self._wake_with, waiter)
        return True

    def _wake_with(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():  # else the reader is about to run, for another reason
            self.at_wake()
        _wake(waiter)

    def take(self) -> list[T]:
        """Everything posted so far."""
        if not self.items:
            return []
        with self._lock:
            items, self.items = self.items, deque()  # one exchange: what a finalizer posts meanwhile stays in
        return list(items)

    def drop(self, count: int) -> None:
        """Take the first `count` items, which the reader has seen."""
        for _ in range(count):
            self.items.popleft()

    async def wait(self, timeout: float | None = None) -> None:
        """Until something is posted, or `timeout` seconds have passed."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.items or self._closed:
                return
            self._reader = threading.get_ident()
            self._waiter = waiter
        timer = None if timeout is None else loop.call_later(max(0.0, timeout), _wake, waiter)
        try:
            await waiter
        finally:
            with self._lock:
                self._waiter = None
            if timer is not None:
                timer.cancel()

    def close(self) -> list[T]:
        """Refuse all further posts; what was posted and not taken."""
        with self._lock:
            self._closed = True
            items = list(self.items)
            self.items.clear()
        return items


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
