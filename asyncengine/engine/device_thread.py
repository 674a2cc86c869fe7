"""The thread that launches steps, and those that the event loop's thread launches itself.

A caller's event loop never waits for a forward pass. Where the device computes it by itself, launching it is all that
the host has to do, and two Python threads only take the interpreter's lock from each other: on an H200 launching 256
rows took 5.5 ms on a thread beside the loop's, of which 1.3 were work. There the loop launches, as SGLang's scheduler
does, and a thread that waits for the device without the lock is all that is left.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import anyio

from asyncengine.engine.process import HEAP
from asyncengine.engine.threads import finished, promised
from asyncengine.seams import Executor, StepHandle
from asyncengine.step import Batch, StepResult

Watched = TypeVar("Watched")


class Watchdog(Generic[Watched]):
    """A check of how long a step takes, once after `soft` seconds and once after `hard`, by one timer for all steps,
    as two for each take as long as scheduling it.

    The timer runs on while nothing is waited for, and is armed again only where something is: for a step that began
    since, it fires early, sees so, and is armed for that.
    """

    def __init__(
        self, soft: float, hard: float, slow: Callable[[Watched], object], over: Callable[[Watched], object]
    ) -> None:
        """`slow` and `over` are told what has reached the first and the second limit, once each."""
        self._limits = (soft, slow), (hard, over)
        self._watched: Watched | None = None
        self._began = 0.0
        self._reported: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, watched: Watched) -> None:
        """From now on this is waited for, on the running loop."""
        loop = asyncio.get_running_loop()
        self._watched, self._began = watched, loop.time()
        if self._reported:  # the timer is set for what the one before has yet to reach
            self._reported = set()
            self._stop()
        if self._timer is None:
            self._arm(loop)

    def end(self) -> None:
        """Stop watching: the result has come, or is not waited for any more."""
        self._watched = None

    def close(self) -> None:
        """Stop watching, and cancel the timer. Idempotent."""
        self._watched = None
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due = [self._began + limit for index, (limit, _) in enumerate(self._limits) if index not in self._reported]
        self._timer = loop.call_at(min(due), self._look, loop) if due else None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        watched = self._watched
        if watched is None:
            return
        now = loop.time()
        try:
            for index, (limit, tell) in enumerate(self._limits):
                if index not in self._reported and now >= self._began + limit:
                    self._reported.add(index)
                    tell(watched)
        finally:
            self._arm(loop)


# The interpreter's switch interval, shortened while an engine serves.


class SwitchInterval:
    """Keeps the interpreter's switch interval at the shortest value that an open `shortened` block asks for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[float] = []
        self._before = self._set = sys.getswitchinterval()

    @contextmanager
    def shortened(self, seconds: float | None) -> Iterator[None]:
        """Within, the interval is `seconds` at most. None: it is left alone."""
        if seconds is None:
            yield
            return
        with self._lock:
            if not self._wanted:
                self._before = self._set = sys.getswitchinterval()
            self._wanted.append(seconds)
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._wanted.remove(seconds)
                self._apply()

    def forget(self) -> None:
        """Start anew in a fork: the threads that asked for an interval are in the parent."""
        self._lock, self._wanted = threading.Lock(), []
        self._apply()

    def _apply(self) -> None:
        if sys.getswitchinterval() != self._set:  # the program has changed it since: its value stands
            return
        sys.setswitchinterval(min([self._before, *self._wanted]))
        self._set = sys.getswitchinterval()


INTERPRETER = SwitchInterval()
"""There is one interval for all engines of a process."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=INTERPRETER.forget)


_LATE = 0.005
"""Seconds of a step on the loop's thread after which timers that are due are looked at before its result is told."""
_PATIENCE = 5.0
"""Seconds that `DeviceThread.aclose` waits for its thread to end, at most."""


class _Job(NamedTuple):
    work: Batch | Callable[[], None]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]


class _Launched(NamedTuple):
    handle: StepHandle
    job: _Job


class DeviceThread:
    """Launches steps without blocking the event loop, first in first out, on a thread of its own or on the loop's.

    The loop's thread launches what the executor says is brief, where the device computes meanwhile, or where no other
    code uses the loop: handing a step over and its result back takes 100 us or more, of which most is waiting for a
    thread to wake and for the interpreter's lock. Work that may block on other processes goes to the thread. Where
    launching does not wait for the device, a second thread does; the loop's makes results of what has come.

    Measured per step: a thread of our own with call_soon_threadsafe takes 31 us, an executor 44, anyio.to_thread 79.
    The threads are daemons: a forward pass that never returns must not keep the program from ending.
    """

    def __init__(self, executor: Executor, switch_interval: float | None, depth: int) -> None:
        """`switch_interval`: seconds, of the interpreter while the thread lives (`engine.switching`). `depth`: steps in
        flight at a time: where launching is computing, a brief step must be the only one."""
        self.executor = executor
        self._asynchronous = executor.asynchronous
        self._is_brief = executor.is_brief if depth == 1 or self._asynchronous else None
        self._may_launch_here = self._asynchronous
        self._switch_interval = switch_interval
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._line: deque[_Job] = deque()
        """Jobs neither launched nor handed over, in order. Only the loop's thread changes it."""
        self._flying: deque[_Launched] = deque()
        """Steps that the loop's thread has launched, and has not expected yet."""
        self._expected: asyncio.Future[StepResult] | None = None
        self._handed_over = self._handled = 0
        """Jobs of the thread so far: the first is counted by the loop's, the second by itself."""
        self._closing = False
        self._ended = promised()
        self._thread = threading.Thread(target=self._work, name="asyncengine-device", daemon=True)
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="asyncengine-device-results", daemon=True)

    def launch(self, batch: Batch) -> asyncio.Future[StepResult]:
        """Launch a step; results come back in launch order."""
        return self._submit(batch)

    def call(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Run `work` where steps run, after the steps launched before it."""
        return self._submit(work)

    def _submit(self, work: Batch | Callable[[], None]) -> asyncio.Future[Any]:
        self._start()
        loop = asyncio.get_running_loop()
        job = _Job(work, loop, loop.create_future())
        self._line.append(job)
        self._advance()
        return job.result

    @property
    def brief_tokens(self) -> int:
        """Most tokens of a step of texts that may be computed on the loop's thread, though other tasks run there."""
        return self.executor.brief_tokens

    def compute(self, batch: Batch) -> StepResult:
        """Compute a step on the calling thread, the loop's, while no other is under way."""
        self._start()
        return self.executor.launch(batch).wait()

    def have_loop(self) -> None:
        """Note that no other code uses the event loop that launches: short steps may be computed on its thread."""
        self._may_launch_here = True

    def _advance(self) -> None:
        """On the loop's thread: launch the jobs in line, or hand them over, none before one that the thread has to
        do."""
        while self._line:
            job, is_brief = self._line[0], self._is_brief if self._may_launch_here else None
            if not isinstance(job.work, Batch) or is_brief is None or not is_brief(job.work):
                self._handed_over += 1
                self._jobs.put(self._line.popleft())
            elif self._handled != self._handed_over:
                return  # the thread calls this again when it has done that
            else:
                self._line.popleft()
                if self._asynchronous:
                    self._launch_here(job)  # at once: the device computes while the loop delivers
                else:  # later: this computes the step, so outputs are delivered first
                    job.loop.call_soon(self._launch_here, job)

    def _launch_here(self, job: _Job) -> None:
        """On the loop's thread: the launch, and the whole step where that computes it."""
        if job.result.done():
            return  # the engine has ended meanwhile, and the executor may be closed
        began = time.perf_counter()
        outcome = self._begin(job, here=self._asynchronous)
        if outcome is None:
            if job.result is self._expected:
                self.expect(job.result)
            return
        if time.perf_counter() - began < _LATE:
            _settle(job.result, outcome)
        else:  # the limits of a step's time hold here, too: a timer that was due fires before this
            job.loop.call_soon(job.loop.call_soon, _settle, job.result, outcome)

    def _begin(self, job: _Job, *, here: bool) -> StepResult | BaseException | None:
        """Launch a step. Returns its result or error; None: the result comes when the device has finished, and on the
        loop's thread (`here`) once `expect` was called for it."""
        try:
            assert isinstance(job.work, Batch)
            handle = self.executor.launch(job.work)
            if handle.ready and not here and self._waiter.ident is None:
                return handle.wait()
        except BaseException as error:
            return error
        launched = _Launched(handle, job)
        if here:
            self._flying.append(launched)
        else:
            self._have_waited_for(launched)
        return None

    def expect(self, result: asyncio.Future[StepResult]) -> None:
        """Note that the loop waits for this result of `launch`, the oldest one missing, and has nothing else to do."""
        self._expected = result
        if self._flying and self._flying[0].job.result is result:
            launched = self._flying.popleft()
            if launched.handle.ready:  # two threads would be woken for nothing
                _read(launched, None)
            else:
                self._have_waited_for(launched)

    def _have_waited_for(self, launched: _Launched) -> None:
        if self._waiter.ident is None:
            self._waiter.start()
        self._launched.put(launched)

    def _start(self) -> None:
        """Start the threads at their first use: an engine that was built and never served leaves none behind."""
        if self._thread.ident is None:
            if self._asynchronous:
                self._waiter.start()  # now: later two threads might start it at once
            self._thread.start()

    def _work(self) -> None:
        HEAP.begin()
        try:
            with INTERPRETER.shortened(self._switch_interval):
                self._serve()
            HEAP.end(self.executor.close)
        finally:
            self._ended.set_result(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            outcome = self._begin(job, here=False) if isinstance(job.work, Batch) else _outcome(job.work)
            self._handled += 1  # before the result is told: the loop may launch by itself then
            if self._line:
                _tell(job, self._advance)
            if isinstance(job.work, Batch) and outcome is None:
                settled = not job.loop.is_closed()
            else:
                settled = _tell(job, _settle, job.result, outcome)
            if not settled:
                break  # the loop is closed: no task waits for results any more
            del job, outcome  # hold nothing of a finished step while waiting for the next
        if self._waiter.ident is not None:
            self._launched.put(None)
            self._waiter.join()
        for launched in self._flying:
            _outcome(launched.handle.block)

    def _wait(self) -> None:
        while (launched := self._launched.get()) is not None:
            _tell(launched.job, _read, launched, _outcome(launched.handle.block))
            del launched  # as above

    def close_soon(self) -> None:
        """Stop after the current step and leave nothing behind. From any thread; idempotent."""
        if not self._closing:
            self._closing = True
            self._jobs.put(None)
            self._start()  # if it never ran: the executor is closed on this thread in any case

    async def aclose(self) -> None:
        """Stop as `close_soon` does, and wait some seconds for the thread's end."""
        if not self._closing:
            self.close_soon()
            with anyio.CancelScope(shield=True), anyio.move_on_after(_PATIENCE):
                await finished(self._ended)
                self._thread.join(_PATIENCE)


def _outcome(work: Callable[[], Any]) -> Any:
    """Call `work`. Returns its value, or the error that it raises."""
    try:
        return work()
    except BaseException as error:
        return error


def _tell(job: _Job, *callback: Any) -> bool:
    """Have a function called with its arguments on the loop that waits. False: it is closed."""
    try:
        job.loop.call_soon_threadsafe(*callback)
    except RuntimeError:
        return False
    return True


def _read(launched: _Launched, failure: BaseException | None) -> None:
    """Make the result of a step whose numbers are on the host, on the thread that needs it next."""
    result = launched.job.result
    if not result.done():
        _settle(result, _outcome(launched.handle.wait) if failure is None else failure)


def _settle(result: asyncio.Future[Any], outcome: Any) -> None:
    if result.done():
        return
    if isinstance(outcome, StopIteration):  # a future refuses it, and the step would never end
        result.set_exception(RuntimeError("the step raised StopIteration"))
    elif isinstance(outcome, BaseException):
        result.set_exception(outcome)
    else:
        result.set_result(outcome)
