"""The kernel of a simulated world: its threads, of which one runs at a time, and its time, which jumps.

Every thread of a world is a real one with a stack of its own, so that blocking code runs as it is; but all wait for
their turn, and the seed says whose it is next. A turn ends where a thread waits, and perhaps at any other place that
the virtual primitives call `pause` from. Where no thread can run, time jumps to the next alarm: an idle hour
costs nothing. The idea is that of FoundationDB's simulation and TigerBeetle's VOPR.
"""

from __future__ import annotations

import _thread
import random
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Collection
from heapq import heappop, heappush
from math import inf
from types import FrameType
from typing import Any

MOST_TICKS = 2 * 10**6


class Ended(BaseException):
    """Unwinds a thread of a world that has ended. Not an `Exception`, so that no handler catches it."""


class Stuck(AssertionError):
    """All threads wait for each other (deadlock), or something goes on for ever (livelock)."""


class Strand:
    """One thread of a world, as the kernel sees it."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.ident = 0
        """The identifier of the real thread."""
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.waiting = self.ended = False
        self.wait_number = 0
        self.thread: Any = None
        """The `VirtualThread` that it is."""


class World:
    """Threads and time, both decided by a seed. One world at a time runs in a process."""

    def __init__(self, seed: int, *, switching: float = 0.2, stalling: float = 0.0) -> None:
        """`switching`: the probability that a thread's turn ends at a place where it may. `stalling`: that it is
        held up there for a while, as on a busy machine."""
        self.rng = random.Random(seed)
        self.now = 0.0
        self.horizon = inf
        """The moment after which it is `Stuck`."""
        self.ticks = self.switches = self.digest = 0
        """Places passed where a turn might have ended; turns; a sum over these: equal ones, equal runs."""
        self.complaints: list[str] = []
        """Unhandled errors of threads, and of callbacks of virtual loops."""
        self.ending = False
        self._switching = switching
        self._stalling = stalling
        self._numbers = 0
        self._main = self.current = Strand("main", 0)
        self._strands = [self._main]
        self._by_ident: dict[int, Strand] = {}
        self._runnable = [self._main]
        self._alarms: list[tuple[float, int, Strand, int]] = []
        self._error: Stuck | None = None
        self._tracer: Callable[..., Any] | None = None

    # ---------------------------------------------------------------- from outside

    def run(self, work: Callable[[], object]) -> None:
        """Do `work`, with this thread as the first one of the world. When it has returned or raised, threads that are
        left are unwound."""
        before = sys.gettrace()
        self._main.ident = _thread.get_ident()
        self._by_ident[self._main.ident] = self._main
        sys.settrace(self._tracer or before)
        try:
            work()
        finally:
            self.ending = True
            sys.settrace(before)
            for strand in self._strands[1:]:
                if not strand.ended:
                    self.current = strand
                    strand.gate.release()
                    self._main.gate.acquire()

    def interrupt_lines_of(self, files: Collection[str], probability: float) -> None:
        """Before `run`: have threads pause before lines of these files, too. This finds races of code without locks,
        and makes the world slower."""

        def enter(frame: FrameType, event: str, arg: Any) -> Any:
            return line if frame.f_code.co_filename in files else None

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line" and self.rng.random() < probability and self.inside:
                self.pause()
            return line

        self._tracer = enter

    # ---------------------------------------------------------------- from inside

    @property
    def inside(self) -> bool:
        """Whether the thread that asks is one of this world, which has not ended."""
        return not self.ending and _thread.get_ident() in self._by_ident

    def either(self, virtual: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        """`virtual` for threads of this world, `real` for others."""

        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (virtual if self.inside else real)(*args, **kwargs)

        return chosen

    @property
    def alive(self) -> list[str]:
        """Names of the threads that have not ended, without the first one."""
        return [strand.name for strand in self._strands[1:] if not strand.ended]

    def number(self) -> int:
        """The next of the world's numbers, which are the same in every run."""
        self._numbers += 1
        return self._numbers

    def spawn(self, work: Callable[[], object], name: str) -> Strand:
        """A new thread that runs `work`, from its first turn on."""
        strand = Strand(name, len(self._strands))
        self._strands.append(strand)
        self._runnable.append(strand)
        threading.Thread(target=self._begin, args=(strand, work), name=name, daemon=True).start()
        return strand

    def _begin(self, strand: Strand, work: Callable[[], object]) -> None:
        strand.gate.acquire()
        strand.ident = _thread.get_ident()
        try:
            if not self.ending:
                self._by_ident[strand.ident] = strand
                sys.settrace(self._tracer)
                work()
        except Ended:
            pass
        except BaseException as error:
            self.complain(f"thread {strand.name}", error)
        sys.settrace(None)
        del work  # what it holds ends here, in our turn
        strand.ended = True
        self._by_ident.pop(strand.ident, None)
        if self.ending:
            self._main.gate.release()
        else:
            self._runnable.remove(strand)
            self._hand_to(self._choose())

    def complain(self, source: str, error: BaseException | None) -> None:
        """Note an unhandled error."""
        if not self.ending:
            self.complaints.append(f"{source}: {''.join(traceback.format_exception(error))}")

    def pause(self) -> None:
        """A place where another thread may run, and this one be held up."""
        if self.ending:
            return
        self.ticks += 1
        draw = self.rng.random()
        if draw < self._switching:
            if len(self._runnable) > 1:
                self._pass_on()
        elif draw > 1.0 - self._stalling:
            self.block(self.now + self.rng.expovariate(1.0) * self.rng.choice([0.01, 0.1, 1.0, 3.0]))
        if self.ticks > MOST_TICKS and self._error is None:
            self._interrupt("this goes on for ever")
            self._pass_on()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of the world's time."""
        until = self.now + seconds
        while self.now < until:
            self.block(until)

    def block(self, until: float = inf) -> None:
        """Wait for `wake`, or for the moment `until`. May wake for nothing."""
        if self.ending:
            raise Ended
        strand = self.current
        strand.wait_number += 1
        strand.waiting = True
        self._runnable.remove(strand)
        self.set_alarm(strand, until)
        self._pass_on()

    def set_alarm(self, strand: Strand, at: float) -> None:
        """Have a thread that waits go on at that moment, if it still waits then."""
        if at < inf and strand.waiting:
            heappush(self._alarms, (at, self.number(), strand, strand.wait_number))

    def wake(self, strand: Strand) -> None:
        """Let a thread that waits go on."""
        if strand.waiting:
            strand.waiting = False
            self._runnable.append(strand)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """On the first thread: wait until it holds, looking again after each `wake_first`."""
        while not holds():
            self.block()

    def wake_first(self) -> None:
        """Let the first thread look again."""
        self.wake(self._main)

    # ---------------------------------------------------------------- choosing the next thread

    def _choose(self) -> Strand:
        """The thread whose turn is next. Where none can run, time jumps."""
        while self._error is None:
            alarms = self._alarms
            while alarms and (alarms[0][0] <= self.now or not _counts(alarms[0])):
                alarm = heappop(alarms)
                if _counts(alarm):
                    self.wake(alarm[2])
            if self._runnable:
                return self._runnable[int(self.rng.random() * len(self._runnable))]
            if not alarms:
                self._interrupt("all threads wait for each other")
            elif alarms[0][0] > self.horizon:
                self._interrupt(f"nothing has come of it after {self.now:.0f} s")
            else:
                self.now = alarms[0][0]
        return self._main

    def _interrupt(self, problem: str) -> None:
        """Have the first thread raise that it is stuck, with the innermost calls of each thread."""
        frames = sys._current_frames()
        for strand in (strand for strand in self._strands if not strand.ended and strand.ident in frames):
            calls = traceback.extract_stack(frames[strand.ident])
            shown = [f"{c.filename}:{c.lineno} {c.name}" for c in calls if "/testing/world/" not in c.filename]
            problem += f"\n{strand.name}: {' > '.join(shown[-3:])}"
        self._error = Stuck(problem)
        self.wake(self._main)

    def _pass_on(self) -> None:
        """End this turn, and wait for the next one."""
        strand, chosen = self.current, self._choose()
        if chosen is not strand:
            self._hand_to(chosen)
            strand.gate.acquire()
        if strand is self._main and self._error is not None:
            raise self._error
        if self.ending:
            raise Ended

    def _hand_to(self, chosen: Strand) -> None:
        self.switches += 1
        self.digest = zlib.crc32(b"%d %d %r" % (chosen.number, self.ticks, self.now), self.digest)
        self.current = chosen
        chosen.gate.release()


def _counts(alarm: tuple[float, int, Strand, int]) -> bool:
    return alarm[2].waiting and alarm[2].wait_number == alarm[3]
