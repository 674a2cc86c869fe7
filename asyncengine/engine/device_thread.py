"""The thread that runs steps, so that no event loop of a caller's waits for a forward pass."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import anyio

from asyncengine.device.switching import INTERPRETER
from asyncengine.step import Batch, Executor, StepHandle, StepResult

_LATE = 0.005
"""Seconds of a step on the loop's thread after which timers that are due are looked at before its result is told."""


class Runner(Protocol):
    """Launches steps without blocking the event loop; results come back in launch order."""

    def launch(self, batch: Batch) -> asyncio.Future[StepResult]: ...

    def call(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Run `work` where steps run, after those that were launched before it."""
        ...

    def have_loop(self) -> None:
        """The event loop that launches is nobody else's: short steps may be computed on its thread."""
        ...

    async def aclose(self) -> None:
        """Stop after the current step and leave nothing behind. Idempotent."""
        ...

    def close_soon(self) -> None:
        """The same without waiting, from any thread: the event loop that launched is closed."""
        ...


class _Job(NamedTuple):
    batch: Batch
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[StepResult]


class _Call(NamedTuple):
    work: Callable[[], None]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[None]


class _Launched(NamedTuple):
    handle: StepHandle
    job: _Job


class DeviceThread:
    """A `Runner`: launches steps on one thread of its own, first in first out.

    Where launching does not wait for the device, a second thread does, so that the next step is launched meanwhile.
    Where the event loop has a thread of its own, steps of a millisecond or so are computed there: a step is handed over
    and its result handed back in 100 us or more, of which most is waiting for a thread to wake and for the
    interpreter's lock, and the loop has nothing to do meanwhile.

    Measured per step: a thread of our own with call_soon_threadsafe takes 31 us, an executor 44, anyio.to_thread 79.
    The threads are daemons: a forward pass that never returns must not keep the program from ending.
    """

    def __init__(
        self,
        executor: Executor,
        name: str = "asyncengine-device",
        switch_interval: float | None = None,
        is_brief: Callable[[Batch], bool] | None = None,
    ) -> None:
        """`switch_interval`: seconds, of the interpreter while the thread lives (`device.switching`). `is_brief`: says
        of a step that it is over in milliseconds and waits for nobody; only where one is in flight at a time. None:
        none is."""
        self.executor = executor
        self._is_brief = is_brief
        self._has_loop = False
        self._switch_interval = switch_interval
        self._jobs: queue.SimpleQueue[_Job | _Call | None] = queue.SimpleQueue()
        self._closing = False
        self._ended: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name=f"{name}-results", daemon=True)

    def launch(self, batch: Batch) -> asyncio.Future[StepResult]:
        self._start()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[StepResult] = loop.create_future()
        job = _Job(batch, loop, result)
        if self._has_loop and self._is_brief is not None and self._is_brief(batch):
            loop.call_soon(self._compute_here, job)  # when the engine's task awaits it, and has delivered what it has
        else:
            self._jobs.put(job)
        return result

    def have_loop(self) -> None:
        self._has_loop = True

    def _compute_here(self, job: _Job) -> None:
        """The whole step, on the loop's thread."""
        if job.result.done():
            return  # the engine has ended meanwhile, and the executor may be closed
        began = time.perf_counter()
        outcome = _outcome(lambda: self.executor.launch(job.batch).wait())
        if time.perf_counter() - began < _LATE:
            _settle(job.result, outcome)
        else:  # the limits of a step's time hold here, too: a timer that was due fires before this
            job.loop.call_soon(job.loop.call_soon, _settle, job.result, outcome)

    def call(self, work: Callable[[], None]) -> asyncio.Future[None]:
        self._start()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[None] = loop.create_future()
        self._jobs.put(_Call(work, loop, result))
        return result

    def _start(self) -> None:
        """Not before it is needed: an engine that was built and never served leaves no thread behind."""
        if self._thread.ident is None:
            self._thread.start()

    def _work(self) -> None:
        try:
            with INTERPRETER.shortened(self._switch_interval):
                self._serve()
        finally:
            self._tell_ended()

    def _tell_ended(self) -> None:
        if self._ended is not None:
            loop, ended = self._ended
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_set, ended)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            told = _tell(job, _outcome(job.work)) if isinstance(job, _Call) else self._launch(job)
            if not told:
                break  # the loop is closed: nobody waits for results any more
            del job  # hold nothing of a finished step while waiting for the next
        if self._waiter.ident is not None:
            self._launched.put(None)
            self._waiter.join()
        self.executor.close()

    def _launch(self, job: _Job) -> bool:
        """False: the loop that waits is closed."""
        try:
            handle = self.executor.launch(job.batch)
        except BaseException as error:
            return _tell(job, error)
        return self._finish(_Launched(handle, job))

    def _finish(self, launched: _Launched) -> bool:
        """See to it that the step's result is told. False: its loop is closed."""
        if launched.handle.ready and self._waiter.ident is None:
            return _tell(launched.job, _outcome(launched.handle.wait))
        if self._waiter.ident is None:
            self._waiter.start()
        self._launched.put(launched)
        return not launched.job.loop.is_closed()

    def _wait(self) -> None:
        while (launched := self._launched.get()) is not None:
            _tell(launched.job, _outcome(launched.handle.wait))
            del launched  # as above

    def close_soon(self) -> None:
        """`aclose` for whoever has no event loop left: nobody waits for the current step."""
        if not self._closing:
            self._closing = True
            self._jobs.put(None)
            self._start()

    async def aclose(self, patience: float = 5.0) -> None:
        """Stop after the current step; wait up to `patience` seconds for the thread to end."""
        if self._closing:
            return
        self._closing = True
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._ended = (loop, ended)
        self._jobs.put(None)
        self._start()  # if it never ran: the executor is closed on this thread in any case
        with anyio.CancelScope(shield=True), anyio.move_on_after(patience):
            await ended
            self._thread.join(patience)


def _outcome(work: Callable[[], Any]) -> Any:
    """What it returns, or what it raises."""
    try:
        return work()
    except BaseException as error:
        return error


def _tell(job: _Job | _Call, outcome: Any) -> bool:
    """False: the loop that waits is closed."""
    try:
        job.loop.call_soon_threadsafe(_settle, job.result, outcome)
    except RuntimeError:
        return False
    return True


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _settle(result: asyncio.Future[Any], outcome: Any) -> None:
    if result.done():
        return
    if isinstance(outcome, StopIteration):  # a future refuses it, and the step would never end
        result.set_exception(RuntimeError("the step raised StopIteration"))
    elif isinstance(outcome, BaseException):
        result.set_exception(outcome)
    else:
        result.set_result(outcome)
