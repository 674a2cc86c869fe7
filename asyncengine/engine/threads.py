"""Waiting for what another thread does, where the engine may close meanwhile, and work that Ctrl-C waits for."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal makes an enum's member of each handler: 80 us
import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

from asyncengine.engine.process import PROCESS
from asyncengine.errors import EngineClosed

T = TypeVar("T")
INLINE_CHARS = 4096
"""Longer texts are tokenized on a worker thread: about 1 ms of work is the most the caller's loop should notice."""


def on_own_thread(work: Callable[[], T], name: str) -> T:
    """`work`'s result, or what it raises, from a thread that ends with it."""
    thread, done = _begin(work, name)
    wait([done])
    thread.join()
    return done.result()


def begun(work: Callable[[], T], name: str) -> Future[T]:
    """The result that `work` will have on a thread of its own. One waiter cannot cancel it for the others."""
    return _begin(work, name)[1]


def _begin(work: Callable[[], T], name: str) -> tuple[threading.Thread, Future[T]]:
    done: Future[T] = promised()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    # a daemon: leaving the program waits for it no longer than `engine.process.EXIT_PATIENCE`
    thread = threading.Thread(target=run, name=name, daemon=True)
    PROCESS.waits_at_exit_for(thread)
    thread.start()
    return thread, done


def promised() -> Future[Any]:
    """A future that its waiters cannot cancel."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()
    return done


def finished_blocking(work: Future[T]) -> T:
    """The result of `work`, on a plain thread. Raises `EngineClosed` if the engine cancelled it."""
    try:
        return work.result()
    except CancelledError:
        raise EngineClosed("the engine has closed") from None


async def finished(work: Future[T]) -> T:
    """Await the work of another thread. Raises `EngineClosed` if the engine closes meanwhile. Cancelling cancels
    unbegun work."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[T] = loop.create_future()

    def tell(done: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            loop.call_soon_threadsafe(_copy, done, waiter)

    work.add_done_callback(tell)
    try:
        return await waiter
    except asyncio.CancelledError:
        work.cancel()
        raise


def _copy(done: Future[T], waiter: asyncio.Future[T]) -> None:
    if waiter.done():
        return
    if done.cancelled():
        waiter.set_exception(EngineClosed("the engine has closed"))
    elif (error := done.exception()) is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(done.result())


@contextlib.contextmanager
def interrupts_postponed() -> Iterator[None]:
    """Postpone Ctrl-C, which only the main thread gets, to the end of the block: half-done work would fail every
    request."""
    before = _signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(before):  # the signal is ignored, ends the process or is handled outside of Python
        yield
        return
    interrupts: list[Any] = []
    _signal.signal(signal.SIGINT, lambda *arguments: interrupts.append(arguments))
    try:
        yield
    finally:
        _signal.signal(signal.SIGINT, before)
        if interrupts:
            before(*interrupts[0])
