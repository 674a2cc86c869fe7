"""The engine's inbox: anyone posts from any thread, only the engine's loop takes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Many writers, one reader. `post` is thread-safe and never blocks or awaits.

    After `close` nothing can be posted any more. The check and the append are one step under the lock, so every
    accepted item is either taken by the loop or handed back by `close`.
    """

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        # Reentrant: a finalizer (a dropped stream posts its Abort) may run inside any of these on the same thread.
        self._lock = threading.RLock()
        self._waiter: asyncio.Future[None] | None = None
        self._reader: int | None = None
        self._closed = False
        self.turn = threading.Lock()
        """Held by a thread that does the waiting reader's work (`borrowed`); the reader goes on when it is free."""

    @property
    def closed(self) -> bool:
        return self._closed

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[bool]:
        """Take the reader's place: within, the reader keeps waiting whatever is posted, and this thread may change the
        reader's state. Yields False where the reader does not wait, has items to read, or is replaced already."""
        with self._lock:
            waiter = None if self.items else self._waiter
            idle = waiter is not None and not waiter.done() and waiter.get_loop().is_running()
            free = idle and self.turn.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self.turn.release()

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
                with contextlib.suppress(RuntimeError):  # that loop is closed: no reader is left
                    waiter.get_loop().call_soon_threadsafe(_wake, waiter)
        return True

    def take(self) -> list[T]:
        """Everything posted so far."""
        if not self.items:
            return []
        with self._lock:
            items, self.items = self.items, deque()  # one exchange: what a finalizer posts meanwhile stays in
        return list(items)

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until an item is posted, or `timeout` seconds have passed (None: without limit)."""
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
            with self.turn, self._lock:  # `turn`: a borrower may still be changing the reader's state
                self._waiter = None
            if timer is not None:
                timer.cancel()

    def close(self) -> list[T]:
        """Refuse all further posts. Returns the items that were posted and not taken."""
        with self._lock:
            self._closed = True
            items = list(self.items)
            self.items.clear()
        return items


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
