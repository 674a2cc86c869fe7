"""Where the engine's loop runs: a task on the caller's event loop, or a thread with a loop of its own.

*Owned* is structured and hops threads only for the forward pass. *Hosted* outlives event loops and serves callers on
any loop or thread; adapters use it, because frameworks call synchronously from inside running loops and start a new
loop for every call, and both hang an engine that is driven by a task on the caller's loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import threading
from typing import Protocol

import anyio

from asyncengine.engine import EngineLoop
from asyncengine.errors import InvalidParameter
from asyncengine.messages import Drain
from asyncengine.process import PROCESS

EXIT_PATIENCE = 10.0
"""Seconds that a program's end waits for a step to finish."""


class Host(Protocol):
    """Runs an `EngineLoop` from `start` to its end."""

    def start(self) -> None: ...

    async def wait_ended(self) -> None:
        """Until the loop has ended and left nothing behind."""
        ...

    def drives_this_thread(self) -> bool:
        """Would blocking the current thread stop the engine?"""
        ...


class OwnedHost:
    """The engine is a task on the loop that calls `start`."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self._thread: int | None = None

    def start(self) -> None:
        self._thread = threading.get_ident()
        self._task = asyncio.get_running_loop().create_task(self._engine.run(), name="asyncengine")

    async def wait_ended(self) -> None:
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task})  # neither cancels it with the caller nor takes its cancellation for ours

    def drives_this_thread(self) -> bool:
        return self._task is not None and not self._task.done() and threading.get_ident() == self._thread


class ThreadHost:
    """The engine has a thread with an event loop of its own (uvloop's, if asked for)."""

    def __init__(self, engine: EngineLoop, *, use_uvloop: bool = False) -> None:
        if use_uvloop and importlib.util.find_spec("uvloop") is None:
            raise InvalidParameter("uvloop", "needs the package uvloop: pip install 'asyncengine[uvloop]'")
        self._born = PROCESS.generation
        self._engine = engine
        self._use_uvloop = use_uvloop
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._lock = threading.Lock()
        self._ended = False
        # A daemon: a program that forgets to close its engine must still be able to end.
        self._thread = threading.Thread(target=self._main, name="asyncengine-loop", daemon=True)

    def start(self) -> None:
        atexit.register(self._close_at_exit)
        self._thread.start()

    def _close_at_exit(self) -> None:
        """The interpreter must not take itself apart under a thread that is inside a forward pass: that aborts the
        process. So an engine nobody closed, or is still closing, is closed now."""
        if self._born == PROCESS.generation:  # else the thread is another process's
            self._engine.inbox.post(Drain(self._engine.clock.now()))
            self.join(EXIT_PATIENCE)

    def _main(self) -> None:
        try:
            anyio.run(self._engine.run, backend_options={"use_uvloop": self._use_uvloop})
        finally:
            atexit.unregister(self._close_at_exit)
            with self._lock:
                self._ended = True
            for loop, future in self._waiting:
                with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there
                    loop.call_soon_threadsafe(_settle, future)

    async def wait_ended(self) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if not self._ended and self._thread.is_alive():
                self._waiting.append((loop, future))
            else:
                future.set_result(None)
        await future
        self.join()

    def join(self, timeout: float | None = None) -> None:
        """The same for a plain thread."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    def drives_this_thread(self) -> bool:
        return threading.current_thread() is self._thread


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
