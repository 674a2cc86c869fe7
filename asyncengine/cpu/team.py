"""A team of threads that shares one loop's pieces, and loses little when the machine is busy with something else.

One thread owns the team and calls; helpers join in. A loop is cut into more pieces than there are threads. Each thread
has a share of pieces that follow each other, takes them one by one, and then takes from the end of the others' shares
(work stealing: Blumofe and Leiserson, 1999): a helper without a core holds nobody up but for a piece that it had
already begun. Whoever waits spins for a moment and then sleeps: in a step's midst the next loop comes within that
moment, and in company a sleeping caller leaves its core to the helper it waits for. OpenMP's runtimes do neither: they
share loops out beforehand, and either spin for milliseconds or sleep after every loop.

All of it is one block of memory. A share is one word, the next piece and the end; a piece is taken by exchanging the
word as it was seen. Shares of a loop that is over are empty, so whoever succeeds has a piece of the present loop, and
the caller cannot go on before it is done: only then is it read what the loop is made of (function, record, pieces).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from asyncengine.cpu.atomics import (
    LOCK_BYTES,
    add,
    exchange,
    load,
    lock,
    make_lock,
    nanoseconds,
    pause,
    store,
    unlock,
    wait,
    wake,
)
from asyncengine.cpu.jit import inline, serial_in_order
from asyncengine.cpu.vectors import LONG

_LINE = 64
"""Bytes that travel between cores together: words that different threads write do not share them."""
# Places in bytes. What all read and the caller writes ...
FUNCTION, RECORD, PIECES, ACTIVE, STOPPED, PIECE, HELPER_SPIN, CALLER_SPIN = range(0, _LINE, 8)
DONE = 1 * _LINE
SLEEPERS = 2 * _LINE
WAITING = 3 * _LINE
# ... and what only the caller uses: pieces that helpers have been counted on for, and its account of the loops.
EXPECTED, LOOPS, ALL_PIECES, OWN_PIECES, OWN_TIME, WAITED_TIME = range(4 * _LINE, 4 * _LINE + 48, 8)
MUTEX = 5 * _LINE
WORK_CONDITION = MUTEX + LOCK_BYTES
DONE_CONDITION = WORK_CONDITION + LOCK_BYTES
ACTIVE_CONDITION = DONE_CONDITION + LOCK_BYTES
WORKERS = ACTIVE_CONDITION + LOCK_BYTES
"""For each worker, the caller first, a line with its share and a line with two words for its clock."""
_WORKER = 2 * _LINE
_NEXT = 1 << 32
"""In a share: one piece further. The end is in the lower half."""
_END = _NEXT - 1
_LOOK = 16
"""Pauses between two looks at the clock."""
PER_THREAD = 16
"""Most pieces of a loop for each thread."""
PIECE_BYTES = 2**17
"""Work in a piece at least, in bytes of memory read once (or arithmetic that takes as long): some microseconds."""
_HELPER_SPIN, _CALLER_SPIN = 10_000, 5_000
"""Nanoseconds that who waits spins before it sleeps: helpers for the next loop, as long as what lies between two of a
step; the caller for helpers, as long as a piece that has begun should take."""


def _call_piece(_: Any, function: Any, piece: Any, pieces: Any, worker: Any, record: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [LONG] * 4)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return numba.types.void(*[numba.types.int64] * 5), generate


call_piece: Any = intrinsic(_call_piece)
"""call_piece(function, piece, pieces, worker, record), inside kernels: of a function at an address."""


@inline
def _share_of(team: int, worker: int) -> int:
    return team + WORKERS + worker * _WORKER


@inline
def _clock_of(team: int, worker: int) -> int:
    return team + WORKERS + worker * _WORKER + _LINE


@serial_in_order
def _any_left(team: int) -> bool:
    """Is there a piece that nobody has taken?"""
    for worker in range(load(team + ACTIVE) + 1):
        share = load(_share_of(team, worker))
        if share >> 32 < share & _END:
            return True
    return False


@serial_in_order
def pieces_of(work: int, most: int, team: int) -> int:
    """In how many pieces a loop is cut, `most` at most: as many as `work` bytes to read are worth, 1 without a team."""
    if team == 0:
        return 1
    threads: int = load(team + ACTIVE) + 1
    return max(1, min(work // load(team + PIECE), most, threads * PER_THREAD))


@inline
def reads_worth(rows: int, even: int) -> int:
    """How often a weight could be read while its product with so many rows is computed; once up to `even` rows."""
    return (rows + even - 1) // even


@serial_in_order
def _take_pieces(team: int, worker: int) -> int:
    """Compute pieces of the present loop until all are taken. How many there were for this thread."""
    count = 0
    workers = load(team + ACTIVE) + 1
    for turn in range(workers):
        other = worker + turn
        place = _share_of(team, other if other < workers else other - workers)
        while True:
            share = load(place)
            first, end = share >> 32, share & _END
            if first >= end:
                break
            if exchange(place, share, share + _NEXT if turn == 0 else share - 1) == 1:
                piece = first if turn == 0 else end - 1
                call_piece(load(team + FUNCTION), piece, load(team + PIECES), worker, load(team + RECORD))
                count += 1
    return count


@serial_in_order
def run_together(function: int, record: int, pieces: int, team: int) -> None:
    """function(piece, pieces, worker, record) for every piece, by the caller and whichever helpers have a core.

    `worker` is 0 for the caller and 1 .. for helpers.
    """
    clock = _clock_of(team, 0)
    began = nanoseconds(clock)
    store(team + FUNCTION, function)
    store(team + RECORD, record)
    store(team + PIECES, pieces)
    workers = load(team + ACTIVE) + 1
    for worker in range(workers):
        first, end = pieces * worker // workers, pieces * (worker + 1) // workers
        store(_share_of(team, worker), first * _NEXT + end)
    if load(team + SLEEPERS) > 0:
        wake(team + WORK_CONDITION, team + MUTEX)
    own = _take_pieces(team, 0)
    ready = nanoseconds(clock)
    expected = load(team + EXPECTED) + pieces - own
    store(team + EXPECTED, expected)
    ended = ready
    if load(team + DONE) != expected:
        _await_helpers(team, expected, ready)
        ended = nanoseconds(clock)
    store(team + LOOPS, load(team + LOOPS) + 1)
    store(team + ALL_PIECES, load(team + ALL_PIECES) + pieces)
    store(team + OWN_PIECES, load(team + OWN_PIECES) + own)
    store(team + OWN_TIME, load(team + OWN_TIME) + ready - began)
    store(team + WAITED_TIME, load(team + WAITED_TIME) + ended - ready)


@serial_in_order
def _await_helpers(team: int, expected: int, began: int) -> None:
    """Wait for the pieces that helpers have begun: spin for a moment, then sleep, which may be what they need."""
    clock = _clock_of(team, 0)
    until = began + load(team + CALLER_SPIN)
    while load(team + DONE) != expected:
        for _ in range(_LOOK):
            pause()
        if load(team + DONE) != expected and nanoseconds(clock) > until:
            lock(team + MUTEX)
            store(team + WAITING, 1)
            while load(team + DONE) != expected:
                wait(team + DONE_CONDITION, team + MUTEX)
            store(team + WAITING, 0)
            unlock(team + MUTEX)


@serial_in_order
def _help(team: int, index: int) -> None:
    """What helper `index`, from 0 on, does until the team is stopped."""
    clock = _clock_of(team, index + 1)
    idle_since = nanoseconds(clock)
    while load(team + STOPPED) == 0:
        if index < load(team + ACTIVE) and _any_left(team):
            count = _take_pieces(team, index + 1)
            if count > 0:
                add(team + DONE, count)
                if load(team + WAITING) != 0:
                    wake(team + DONE_CONDITION, team + MUTEX)
            idle_since = nanoseconds(clock)
            continue
        for _ in range(_LOOK):
            pause()
        if nanoseconds(clock) - idle_since > load(team + HELPER_SPIN):
            _sleep(team, index)
            idle_since = nanoseconds(clock)


@serial_in_order
def _sleep(team: int, index: int) -> None:
    """Until there may be a piece for this helper, or the team is stopped. Only who waits for pieces is a sleeper: a
    caller need not wake helpers that are to rest."""
    lock(team + MUTEX)
    if index < load(team + ACTIVE):
        add(team + SLEEPERS, 1)
        while load(team + STOPPED) == 0 and index < load(team + ACTIVE) and not _any_left(team):
            wait(team + WORK_CONDITION, team + MUTEX)
        add(team + SLEEPERS, -1)
    else:
        while load(team + STOPPED) == 0 and index >= load(team + ACTIVE):
            wait(team + ACTIVE_CONDITION, team + MUTEX)
    unlock(team + MUTEX)


@serial_in_order
def _make(team: int) -> None:
    make_lock(team + MUTEX, team + WORK_CONDITION)
    make_lock(team + MUTEX, team + DONE_CONDITION)
    make_lock(team + MUTEX, team + ACTIVE_CONDITION)


@serial_in_order
def _set(team: int, place: int, value: int) -> None:
    """ACTIVE or STOPPED, for helpers that sleep as well."""
    store(team + place, value)
    wake(team + WORK_CONDITION, team + MUTEX)
    wake(team + ACTIVE_CONDITION, team + MUTEX)


class Account(NamedTuple):
    """Of a team's loops since it began."""

    loops: int
    pieces: int
    own: int
    """Pieces that the caller computed."""
    computing: int
    """Nanoseconds that the caller took for those."""
    waiting: int
    """Nanoseconds that it waited for pieces that helpers had begun."""

    def efficiency(self, threads: int) -> float:
        """What the caller would have taken for all pieces, over `threads` times what it took; 1 at most, and where
        there were none."""
        taken = threads * (self.computing + self.waiting) * self.own
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

    def __init__(self, threads: int, name: str = "asyncengine-core", piece: int = PIECE_BYTES) -> None:
        """`piece`: work in a piece at least, in bytes (`pieces_of`)."""
        self.threads, self.piece = threads, piece
        self._name = name
        self._helpers: list[threading.Thread] = []
        self._busy = threading.Lock()
        self._memory = np.zeros((WORKERS + threads * _WORKER + _LINE) // 8, dtype=np.int64)
        offset = -self._memory.ctypes.data % _LINE // 8
        self._words = self._memory[offset:]
        self._address: int = self._words.ctypes.data
        self._words[PIECE // 8] = piece
        self._words[HELPER_SPIN // 8], self._words[CALLER_SPIN // 8] = _HELPER_SPIN, _CALLER_SPIN
        _make(self._address)
        self._end = weakref.finalize(self, _stop, self._memory, self._address)
        self._end.atexit = False  # helpers are daemons: nobody waits for them when the program ends

    @contextmanager
    def joined(self, threads: int | None = None) -> Iterator[None]:
        """Within, kernels called on this thread share their loops among so many of the team's threads; None: all.

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
        if threads > 1 and not self._helpers:
            for index in range(self.threads - 1):
                thread = threading.Thread(
                    target=_help_on, args=(self._memory, self._address, index), name=self._name, daemon=True
                )
                thread.start()
                self._helpers.append(thread)
        if self._words[ACTIVE // 8] != threads - 1:
            _set(self._address, ACTIVE, threads - 1)

    @property
    def active(self) -> int:
        """Threads that loops are shared among now."""
        return int(self._words[ACTIVE // 8]) + 1

    @property
    def address(self) -> int:
        """What `spread` takes; 0: the caller does it all."""
        return self._address if self.active > 1 else 0

    @property
    def account(self) -> Account:
        first = LOOPS // 8
        return Account(*self._words[first : first + len(Account._fields)].tolist())

    def close(self, patience: float = 5.0) -> None:
        """End the helpers, and wait for them. Idempotent."""
        self._end()
        for helper in self._helpers:
            helper.join(patience)


_LOCAL = threading.local()
"""`team`: whose turn it is on this thread. Kernels are called through modules that know nothing of threads."""


def use_team() -> int:
    """The team of this thread, as `spread` and `pieces` take it; 0 where there is none."""
    team: Team | None = getattr(_LOCAL, "team", None)
    return 0 if team is None else team.address


def team_threads() -> tuple[int, int]:
    """(how many threads share the loops of kernels called here, bytes of work in a piece at least)."""
    team: Team | None = getattr(_LOCAL, "team", None)
    return (1, PIECE_BYTES) if team is None else (team.active, team.piece)


def _help_on(memory: Any, address: int, index: int) -> None:
    _help(address, index)
    del memory  # until now it had to stay where it was


def _stop(memory: Any, address: int) -> None:
    _set(address, STOPPED, 1)
