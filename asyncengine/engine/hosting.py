"""Hosts of the engine's loop: a task on the caller's event loop, or a thread with a loop of its own.

*Owned* is structured and hops threads only for a forward pass of the CPU. *Hosted* outlives event loops and serves
callers on any loop or thread; adapters use it, because frameworks call synchronously from inside running loops and
start a new loop for every call, and both hang an engine that is driven by a task on the caller's loop.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import threading
import weakref
from contextvars import Context

import anyio

from asyncengine.engine.loop import CANCELLED, EngineLoop
from asyncengine.engine.process import EXIT_PATIENCE, PROCESS
from asyncengine.engine.serving_loop import ServingLoop
from asyncengine.engine.threads import finished, promised
from asyncengine.errors import EngineClosed, InvalidParameter, WrongLoop
from asyncengine.scheduler.messages import Drain

WATCH_PERIOD = 60.0


class _LoopWatch:
    """A timer that only its event loop refers to: closing the loop, or collecting it, drops the timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self()

    def __call__(self) -> None:
        # In no context: the timer would keep its starter's. Weakly: in a cycle it would outlive the loop's end.
        self.timer = weakref.ref(self._loop.call_later(WATCH_PERIOD, self, context=Context()))


class OwnedHost:
    """The engine is a task on the loop that calls `start`."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._ending = promised()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None
        self._watching: weakref.finalize[[], _LoopWatch] | None = None

    def start(self) -> None:
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        # asyncio has no hook for this: a loop that is closed while a task of it waits notifies no one
        self._watching = weakref.finalize(_LoopWatch(self._loop), self._lost)
        self._watching.atexit = False
        self._task = self._loop.create_task(self._engine.run(), name="asyncengine")
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        detached = None if self._watching is None else self._watching.detach()
        if detached is not None and (timer := detached[0].timer()) is not None:
            timer.cancel()
        self._end()

    def _lost(self) -> None:
        """May run inside a collection of garbage, on a thread that holds any lock: the work is another thread's."""
        self._engine.failure = self._engine.failure or EngineClosed(
            "its event loop was closed before it: await aclose() there first, or load it with hosted=True"
        )
        threading.Thread(target=self._end, name="asyncengine-end", daemon=True).start()

    def _end(self) -> None:
        """End an engine that has not ended by itself: its loop is lost, or cancelled the task before it began."""
        engine = self._engine
        try:
            if not engine.inbox.closed:
                engine.failure = engine.failure or EngineClosed(CANCELLED)
                engine.in_flight.clear()  # futures of a closed loop cannot be settled
                engine.end_all()
                engine.runner.close_soon()
        finally:
            self._ending.set_result(None)

    async def wait_ended(self) -> None:
        """Wait until the loop has ended and left nothing behind. Raises `WrongLoop` where that would be for ever."""
        loop = self._loop
        if loop is not None and not loop.is_closed() and not loop.is_running() and not self._engine.inbox.closed:
            raise WrongLoop("an owned engine ends on its own loop, which is not running: close it there")
        await finished(self._ending)

    def drives_this_thread(self) -> bool:
        """Whether blocking the current thread would stop the engine."""
        running = not self._engine.inbox.closed and self._engine.failure is None
        return running and threading.get_ident() == self._thread

    def check_awaitable(self) -> None:
        """Raises `WrongLoop` where awaiting on the running loop would wait for ever."""
        loop = self._loop
        if loop is not None and not loop.is_running() and self.drives_this_thread():
            raise WrongLoop(
                "the engine is a task of another event loop of this thread, which stands still while this one runs: "
                "await it there, or load it with hosted=True"
            )


class ThreadHost:
    """The engine has a thread with an event loop of its own (uvloop's, if asked for)."""

    def __init__(self, engine: ServingLoop, *, use_uvloop: bool = False) -> None:
        if use_uvloop and importlib.util.find_spec("uvloop") is None:
            raise InvalidParameter("uvloop", "needs the package uvloop: pip install 'asyncengine[uvloop]'")
        self._born = PROCESS.generation
        self._engine = engine
        self._use_uvloop = use_uvloop
        self._ending = promised()
        engine.have_loop()
        # A daemon: a program that forgets to close its engine must still be able to end.
        self._thread = threading.Thread(target=self._main, name="asyncengine-loop", daemon=True)

    def start(self) -> None:
        atexit.register(self._close_at_exit)
        self._thread.start()

    def _close_at_exit(self) -> None:
        """The interpreter must not be torn down under a thread that is inside a forward pass: that aborts the process.
        So an engine that was not closed, or is still closing, is closed now."""
        if self._born == PROCESS.generation:  # else the thread is another process's
            self._engine.inbox.post(Drain(self._engine.clock.now()))
            self.join(EXIT_PATIENCE)

    def _main(self) -> None:
        try:
            anyio.run(self._engine.run, backend_options={"use_uvloop": self._use_uvloop})
        finally:
            atexit.unregister(self._close_at_exit)
            self._ending.set_result(None)

    async def wait_ended(self) -> None:
        await finished(self._ending)
        self.join()

    def join(self, timeout: float | None = None) -> None:
        """Wait as `wait_ended` does, on a plain thread, for up to `timeout` seconds (None: without limit)."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    def drives_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def check_awaitable(self) -> None:
        return  # its loop is no caller's


Host = OwnedHost | ThreadHost
"""Runs a loop from `start` to its end."""
