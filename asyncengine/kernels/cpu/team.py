"""A team of threads for the loops of kernels, and whose turn it is on which thread. The loops: `team_loops`."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from asyncengine.kernels.cpu import team_loops as loops

__all__ = ["Account", "Team", "alone", "even_count", "team_threads", "use_team"]

logger = logging.getLogger("asyncengine")


class Account(NamedTuple):
    """Counts and times of a team's loops since it began."""

    loops: int
    pieces: int
    own: int
    """Pieces that the caller computed."""
    computing: int
    """Nanoseconds that the caller took for those."""
    waiting: int
    """Nanoseconds that it waited for pieces that helpers had begun."""
    capacity: int
    """Nanoseconds that the loops took, times the threads that could have computed pieces."""

    @property
    def efficiency(self) -> float:
        """The caller's time for all pieces, had it been alone, over the threads' capacity; 1 at most, and where there
        were no loops."""
        taken = self.capacity * self.own
        return min(1.0, self.computing * self.pieces / taken) if taken > 0 else 1.0

    def since(self, before: Account) -> Account:
        return Account(*(now - then for now, then in zip(self, before, strict=True)))

    def plus(self, other: Account) -> Account:
        return Account(*(one + another for one, another in zip(self, other, strict=True)))


class Team:
    """Threads that share the loops of kernels: the caller and `threads - 1` helpers.

    Helpers start with the first loop and end with `close`, or with the last reference to the team. One thread at a time
    may use it: within `joined`, the kernels called on that thread do.
    """

    def __init__(self, threads: int, name: str = "asyncengine-core", piece: int = loops.PIECE_BYTES) -> None:
        """`piece`: work in a piece at least, in bytes (`pieces_of`)."""
        self.threads, self.piece = threads, piece
        self._name = name
        self._helpers: list[threading.Thread] = []
        self._started = False
        self._joined = 1
        self._busy = threading.Lock()
        self._memory = np.zeros((loops.WORKERS + threads * loops.WORKER + loops.LINE) // 8, dtype=np.int64)
        offset = -self._memory.ctypes.data % loops.LINE // 8
        self._words = self._memory[offset:]
        self._address: int = self._words.ctypes.data
        self._words[loops.PIECE // 8] = piece
        self._words[loops.HELPER_SPIN // 8] = loops.HELPER_SPIN_NS
        self._words[loops.CALLER_SPIN // 8] = loops.CALLER_SPIN_NS
        loops.make(self._address, threads)
        self._end = weakref.finalize(self, _stop, self._memory, self._address, threads, os.getpid())
        self._end.atexit = False  # helpers are daemons: the interpreter does not join them when the program ends

    @contextmanager
    def joined(self, threads: int | None = None) -> Iterator[None]:
        """Within, kernels called on this thread share their loops among `threads` of the team's threads; None for all.

        Raises `RuntimeError` if another thread is within, or if the team is closed.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("another thread is using this team")
        before = getattr(_LOCAL, "team", None)
        try:
            self._use(self.threads if threads is None else max(1, min(threads, self.threads)))
            _LOCAL.team = self
            yield
        finally:
            _LOCAL.team = before
            self._busy.release()

    def _use(self, threads: int) -> None:
        if not self._end.alive:
            raise RuntimeError("the team is closed")
        self._joined = threads
        if threads > 1 and not self._started:
            self._started = True  # once, even if the system has no thread: it would be asked for in every step
            self._start_helpers()
        # `limit` may have lowered WANTED in an earlier step
        if not self._words[loops.ACTIVE // 8] == self._words[loops.WANTED // 8] == threads - 1:
            loops.change(self._address, loops.ACTIVE, threads - 1, self.threads)

    def limit(self, threads: int) -> None:
        """Share the next loops, within this `joined`, among `threads` threads at most. Any thread may call this."""
        self._words[loops.WANTED // 8] = max(1, min(threads, self._joined)) - 1

    def _start_helpers(self) -> None:
        for index in range(self.threads - 1):
            arguments = (self._memory, self._address, index)
            helper = threading.Thread(target=_help_on, args=arguments, name=self._name, daemon=True)
            try:
                helper.start()
            except RuntimeError as error:  # the system has no more: loops are done by those there are
                logger.warning("steps are computed by %d threads instead of %d: %s", index + 1, self.threads, error)
                return
            self._helpers.append(helper)

    @property
    def active(self) -> int:
        """Threads that the next loop is shared among."""
        return int(self._words[loops.WANTED // 8]) + 1

    @property
    def address(self) -> int:
        """The address for `parallel_for`; 0: the caller does it all."""
        return self._address if self.active > 1 else 0

    @property
    def account(self) -> Account:
        first = loops.LOOPS // 8
        return Account(*self._words[first : first + len(Account._fields)].tolist())

    def close(self, patience: float = 5.0) -> None:
        """End the helpers, and wait for them. Idempotent."""
        self._end()
        for helper in self._helpers:
            helper.join(patience)


_even_count: Any = loops.even_count
even_count: Callable[[int, int, int, int], int] = _even_count.py_func
"""`team_loops.even_count` for plans that Python makes."""
_LOCAL = threading.local()
"""`team`: whose turn it is on this thread. Kernels are called through modules that know nothing of threads."""


def use_team() -> int:
    """The team of this thread, as `parallel_for` and `pieces` take it; 0 where there is none."""
    team: Team | None = getattr(_LOCAL, "team", None)
    return 0 if team is None else team.address


@contextmanager
def alone() -> Iterator[None]:
    """Within, kernels called on this thread do their loops by themselves."""
    before = getattr(_LOCAL, "team", None)
    _LOCAL.team = None
    try:
        yield
    finally:
        _LOCAL.team = before


def team_threads() -> tuple[int, int, int]:
    """(how many threads share the loops of kernels called here, bytes of work in a piece at least, how many workers
    need memory of their own: a helper may come late, when fewer are wanted)."""
    team: Team | None = getattr(_LOCAL, "team", None)
    return (1, loops.PIECE_BYTES, 1) if team is None else (team.active, team.piece, team.threads)


def _help_on(memory: Any, address: int, index: int) -> None:
    word = address + loops.WORKERS + (index + 1) * loops.WORKER + loops.THREAD
    memory[(word - memory.ctypes.data) // 8] = threading.get_native_id()
    loops.help_along(address, index)
    del memory  # until now it had to stay where it was


def _stop(memory: Any, address: int, threads: int, process: int) -> None:
    if os.getpid() == process:  # in a fork there are no helpers, and their locks are as they were at that moment
        loops.change(address, loops.STOPPED, 1, threads)
