"""The number of threads that compute the next step: all that the engine may use, unless they slow each other down.

Engines of one process share its cores: while two of them run steps, each uses half of its threads, and a long step
over documents gives up threads midway when another engine's short step begins. When the machine is busy with other
programs, threads of a step wait for one another; if that costs more than they gain, an engine uses half as many, and
tries more again later, at growing intervals.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from asyncengine.kernels.api import compiler_missing
from asyncengine.stats import ThreadStats

if TYPE_CHECKING:
    from asyncengine.kernels.api import team as teams

_WINDOW = 0.05
"""Seconds of steps after which the number of threads is reconsidered."""
_POOR = 0.4
"""Efficiency (share of the threads' time spent computing) below which half of the threads would do as well."""
_PREEMPTED = 100.0
"""Preemptions of this process's threads per second, and two in each step, from which OpenMP's threads, which all wait
for the slowest one, count as disturbed."""
_FIRST_REST, _LONGEST_REST = 0.5, 16.0
"""First and longest interval in seconds until more threads are tried again; it doubles each time that fails."""


class Sharing:
    """The steps that are running in a process, each (its `Cores`) with its share of the cores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Cores] = []

    def enter(self, step: Cores) -> int:
        """Begin a step: the number of threads that it may use. All running steps are limited to their shares."""
        with self._lock:
            self._running.append(step)
            self._limit()
            return self._share(step)

    def leave(self, step: Cores) -> None:
        with self._lock:
            self._running.remove(step)
            self._limit()

    def _limit(self) -> None:
        for step in self._running:
            step.limit(self._share(step))

    def _share(self, step: Cores) -> int:
        return max(1, step.most // len(self._running))


_CPU = torch.device("cpu")
_PROCESS = Sharing()
"""The running steps of this process; its engines share nothing else."""


def threads_for(threads: int | None, device: torch.device) -> int:
    """The number of threads for an engine on this device; None: as many as torch uses in this program."""
    return (threads or torch.get_num_threads()) if device.type == "cpu" else 1


class Cores:
    """The threads of one engine's kernels, and of torch's operators in its steps. One step at a time."""

    def __init__(
        self, threads: int | None = None, device: torch.device = _CPU, sharing: Sharing = _PROCESS,
        team: teams.Team | None = None,
    ) -> None:  # fmt: skip
        """`threads` None: as many as torch uses in this program. On a GPU there is one, which launches. `team`: the
        threads that share kernels' loops; None: they are started when first needed, since a first load is busy
        compiling until then."""
        self.most = threads_for(threads, device)
        self._here = device.type == "cpu"
        self._sharing = sharing
        self._company = Company(self.most)
        self._used = self.most
        self._compiled = compiler_missing(torch.float32, device) is None
        self._team = team

    @contextmanager
    def step(self, *, torch_alone: bool = False, small: bool = False) -> Iterator[None]:
        """Context in which one step is computed. `torch_alone`: torch's own operators do so little that one thread is
        best for them. `small`: one thread is best for the whole step."""
        if not self._here:
            yield
            return
        with self._joined(1 if small else self._company.threads):
            threads = 1 if small else min(self._company.threads, self._sharing.enter(self))
            for_torch = 1 if small or torch_alone else threads
            self._used = threads
            team = self._team if threads > 1 else None  # one thread needs no team
            began, preempted = time.perf_counter(), _preempted() if for_torch > 1 else 0
            before = None if team is None else team.account
            try:
                with torch_threads(for_torch):
                    yield
                loops = None if team is None or before is None else team.account.since(before)
                lost = _preempted() - preempted if for_torch > 1 else 0
                self._company.note(threads, time.perf_counter() - began, loops, lost)
            finally:
                if not small:
                    self._sharing.leave(self)

    def limit(self, threads: int) -> None:
        """Limit the threads of the running step's kernels, as another step shares the cores. Torch's operators keep
        their number."""
        if self._team is not None:
            self._team.limit(min(threads, self._company.threads))

    def loading(self) -> AbstractContextManager[None]:
        """Context in which a model's weights are prepared, by all threads."""
        return self._joined(None)

    def _joined(self, threads: int | None) -> AbstractContextManager[None]:
        if not self._compiled:
            return nullcontext()
        if self._team is None:
            from asyncengine.kernels.api import team as teams

            self._team = teams.Team(self.most)
        return self._team.joined(threads)

    def forget(self) -> None:
        """Forget the durations so far: those of first steps, which compile, would mislead."""
        self._company = Company(self.most)

    @property
    def stats(self) -> ThreadStats:
        return ThreadStats(self._used, self.most, self._company.efficiency)

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._team is not None:
            self._team.close()


class Company:
    """Decides from the durations of steps how many threads the next ones use."""

    def __init__(self, most: int) -> None:
        self.threads = most
        self.efficiency = 1.0
        self._most = most
        self._rest = _FIRST_REST
        self._until = 0.0
        """Time at which more threads are tried, on a clock of seconds spent in steps: idle time is no evidence."""
        self._clock = 0.0
        self._clear(most)

    def _clear(self, threads: int) -> None:
        self._used = threads
        self._steps, self._seconds = 0, 0.0
        self._loops: teams.Account | None = None
        self._preempted = 0

    def note(self, threads: int, seconds: float, loops: teams.Account | None, preempted: int) -> None:
        """Note a step of `threads` threads: its seconds, the account of its shared loops, and the preemptions of
        threads that torch's operators may have waited for."""
        self._clock += seconds
        if threads != self._used:  # another engine's step took some threads, or ended: measurements do not mix
            self._clear(threads)
        self._steps += 1
        self._seconds += seconds
        if loops is not None:
            self._loops = loops if self._loops is None else self._loops.plus(loops)
        self._preempted += preempted
        if self._seconds < _WINDOW:
            return
        self.efficiency = 1.0 if self._loops is None or threads == 1 else self._loops.efficiency
        disturbed = self._preempted > max(_PREEMPTED * self._seconds, 2 * self._steps)
        poor = threads > 1 and (self.efficiency < _POOR or disturbed)
        self._clear(threads)
        if poor:
            self.threads = max(1, threads // 2)
            self._until, self._rest = self._clock + self._rest, min(2 * self._rest, _LONGEST_REST)
        elif self.threads < self._most and self._clock >= self._until:
            self.threads = min(2 * self.threads, self._most)
        elif self.threads == self._most:
            self._rest = max(_FIRST_REST, self._rest / 2)


def _preempted() -> int:
    """Involuntary context switches of this process so far; 0 where the system does not count them."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


# The number of threads that torch's operators use on one thread of the program: OpenMP's setting of that thread.

_NAMES = ("*gomp*", "*iomp5*", "*omp.*", "*omp140*")


@functools.cache
def _setter() -> Callable[[int], None] | None:
    """`omp_set_num_threads` of the OpenMP library that torch uses; None: not found. It is tried out on the first
    calling thread: several such libraries may be loaded, and only one changes torch's number."""
    before = torch.get_num_threads()
    for pattern in _NAMES:
        for path in sorted((Path(torch.__file__).parent / "lib").glob(pattern)):
            try:
                setter = ctypes.CDLL(str(path)).omp_set_num_threads
            except (OSError, AttributeError):
                continue
            setter(before + 1)
            now = torch.get_num_threads()
            setter(before)
            if now == before + 1:
                return setter
    return None


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Context in which torch's operators on this thread use `threads` threads. Other threads are not affected.

    Does nothing if torch was built with another library than the OpenMP that it ships with.
    """
    before = torch.get_num_threads()  # also makes torch read its own setting before ours
    setter = _setter() if before != threads else None
    if setter is None:
        yield
        return
    setter(threads)
    try:
        yield
    finally:
        setter(before)
