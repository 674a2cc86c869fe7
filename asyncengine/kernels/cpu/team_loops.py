"""A team of threads that shares one loop's pieces, and loses little when the machine is busy with something else.

One thread owns the team and calls; helpers join in. A loop is cut into more pieces than there are threads. Each thread
has a share of pieces that follow each other, takes them one by one, and then takes from the end of the others' shares
(work stealing: Blumofe and Leiserson, 1999): a helper without a core delays a loop only by a piece that it had
already begun. A waiting thread spins for a moment and then sleeps: in a step's midst the next loop comes within that
moment, and in company a sleeping caller leaves its core to the helper it waits for. OpenMP's runtimes do neither: they
share loops out beforehand, and either spin for milliseconds or sleep after every loop.

All of it is one block of memory. A share is one word, the next piece and the end; a piece is taken by exchanging the
word as it was seen. Shares of a loop that is over are empty, so a successful exchange yields a piece of the present
loop, whose end the caller awaits: only then are the loop's function, record and number of pieces read.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from asyncengine.kernels.cpu import atomics
from asyncengine.kernels.cpu.intrinsics import INT64, emitted
from asyncengine.kernels.cpu.jit import inline, serial_in_order
from asyncengine.kernels.cpu.vectors import LONG

LINE = 64
"""Bytes that travel between cores together: words that different threads write do not share them."""
# Offsets in bytes. Words that all threads read and the caller writes ...
FUNCTION, RECORD, PIECES, ACTIVE, STOPPED, PIECE, HELPER_SPIN, CALLER_SPIN = range(0, LINE, 8)
DONE = 1 * LINE
SLEEPERS = 2 * LINE
WAITING = 3 * LINE
WANTED = 3 * LINE + 8
"""The value that ACTIVE gets when the next loop begins; any thread may write it."""
# ... and words that only the caller uses: pieces expected of helpers so far, and its account of the loops.
EXPECTED, LOOPS, ALL_PIECES, OWN_PIECES, OWN_TIME, WAITED_TIME, CAPACITY = range(4 * LINE, 4 * LINE + 56, 8)
MUTEX = 5 * LINE
DONE_CONDITION = MUTEX + atomics.LOCK_BYTES
WORKERS = DONE_CONDITION + atomics.LOCK_BYTES
"""For each worker, the caller first: a line with its share; one with two words for its clock, whether it sleeps, its
thread's number and whether it is kept off a core; the condition that it sleeps on; and its cores. Each has its own
condition: in glibc, a thread that wakes a condition's sleepers a second time waits for those that were woken the first
time, and one of them may have no core."""
_CLOCK, _ASLEEP, THREAD, _KEPT_OFF, _CONDITION = LINE, LINE + 16, LINE + 24, LINE + 32, 2 * LINE
_CORES = _CONDITION + atomics.LOCK_BYTES
WORKER = _CORES + 2 * atomics.AFFINITY_BYTES
_NEXT = 1 << 32
"""In a share: one piece further. The end is in the lower half."""
_END = _NEXT - 1
_LOOK = 16
"""Pauses between two looks at the clock."""
PER_THREAD = 16
"""Most pieces of a loop for each thread."""
PIECE_BYTES = 2**17
"""Work in a piece at least, in bytes of memory read once (or arithmetic that takes as long): some microseconds."""
HELPER_SPIN_NS, CALLER_SPIN_NS = 30_000, 20_000
"""Nanoseconds that a waiting thread spins before it sleeps, about as long as it takes to sleep and run again:
then no more is lost than twice what must be (Karlin et al., 1994). Helpers wait for the next loop, longer than the time
between two of a step; the caller for helpers, longer than a piece that has begun."""


@emitted(*[INT64] * 5)
def call_piece(builder: Any, function: Any, piece: Any, pieces: Any, worker: Any, record: Any) -> None:
    """Call a function at an address."""
    function_type = ir.FunctionType(ir.VoidType(), [LONG] * 4)
    builder.call(builder.inttoptr(function, function_type.as_pointer()), [piece, pieces, worker, record])


@inline
def _share_of(team: int, worker: int) -> int:
    """The address of a worker's share, from which the offsets of its other words are counted."""
    return team + WORKERS + worker * WORKER


@serial_in_order
def _wake_helpers(team: int, helpers: int) -> None:
    """Wake helpers that sleep. One that is about to sleep holds the mutex: it is waited for, so that it hears of it.

    Each wakes on another core than the caller's. Linux often puts a thread on its waker's core although others idle
    (on machines of few cores it looks at no others if these were busy a moment ago), where the two take turns until
    the next balancing, milliseconds later: a short text's whole time.
    """
    atomics.lock(team + MUTEX)
    for worker in range(1, helpers + 1):
        share = _share_of(team, worker)
        if atomics.load(share + _ASLEEP) != 0 and atomics.load(share + _KEPT_OFF) == 0:
            atomics.store(share + _KEPT_OFF, atomics.keep_off_core(atomics.load(share + THREAD), share + _CORES))
    atomics.unlock(team + MUTEX)
    for worker in range(1, helpers + 1):
        if atomics.load(_share_of(team, worker) + _ASLEEP) != 0:
            atomics.wake(_share_of(team, worker) + _CONDITION)


@serial_in_order
def _any_left(team: int) -> bool:
    """Whether a piece of the present loop is not taken yet."""
    for worker in range(atomics.load(team + ACTIVE) + 1):
        share = atomics.load(_share_of(team, worker))
        if share >> 32 < share & _END:
            return True
    return False


@inline
def even_count(work: int, least: int, most: int, threads: int) -> int:
    """The number of pieces, `most` at most, of about `least` each: where there is more than one for each of the
    threads, as many for one as for the other."""
    worth = (work + least // 2) // least
    if worth > threads:
        worth = -(-worth // threads) * threads
    return max(1, min(worth, most, threads * PER_THREAD))


@serial_in_order
def pieces_of(work: int, most: int, team: int) -> int:
    """The number of pieces of a loop, `most` at most: as many as `work` bytes to read are worth, 1 without a team."""
    return 1 if team == 0 else even_count(work, atomics.load(team + PIECE), most, atomics.load(team + ACTIVE) + 1)


@inline
def reads_worth(rows: int, even: int) -> int:
    """The number of times a weight could be read while its product with `rows` rows is computed; 1 up to `even`."""
    return (rows + even - 1) // even


@serial_in_order
def _take_pieces(team: int, worker: int) -> int:
    """Compute pieces of the present loop until all are taken. Return how many this thread computed."""
    count = 0
    workers = atomics.load(team + ACTIVE) + 1
    for turn in range(workers):
        other = worker + turn
        share_address = _share_of(team, other if other < workers else other - workers)
        while True:
            share = atomics.load(share_address)
            first, end = share >> 32, share & _END
            if first >= end:
                break
            # thieves take from the end, where the share's owner comes last
            if atomics.exchange(share_address, share, share + _NEXT if turn == 0 else share - 1) == 1:
                piece = first if turn == 0 else end - 1
                function, record = atomics.load(team + FUNCTION), atomics.load(team + RECORD)
                call_piece(function, piece, atomics.load(team + PIECES), worker, record)
                count += 1
    return count


@serial_in_order
def _follow(team: int) -> None:
    """Between two loops, set the number of active helpers to WANTED, and wake those that rested and are active now."""
    wanted, before = atomics.load(team + WANTED), atomics.load(team + ACTIVE)
    atomics.store(team + ACTIVE, wanted)
    if wanted > before:
        _wake_helpers(team, wanted)


@serial_in_order
def run_together(function: int, record: int, pieces: int, team: int) -> None:
    """function(piece, pieces, worker, record) for every piece, by the caller and whichever helpers have a core.

    `worker` is 0 for the caller and 1 .. for helpers.
    """
    clock = _share_of(team, 0) + _CLOCK
    if atomics.load(team + WANTED) != atomics.load(team + ACTIVE):
        _follow(team)
    atomics.store(team + FUNCTION, function)
    atomics.store(team + RECORD, record)
    atomics.store(team + PIECES, pieces)
    workers = atomics.load(team + ACTIVE) + 1
    for worker in range(workers):
        first, end = pieces * worker // workers, pieces * (worker + 1) // workers
        atomics.store(_share_of(team, worker), first * _NEXT + end)
    # after the shares: a helper counts itself as a sleeper before it looks at them, so that one sees the other
    if atomics.load(team + SLEEPERS) > 0:
        _wake_helpers(team, workers - 1)
    began = atomics.nanoseconds(clock)
    own = _take_pieces(team, 0)
    ready = atomics.nanoseconds(clock)
    expected = atomics.load(team + EXPECTED) + pieces - own
    atomics.store(team + EXPECTED, expected)
    ended = ready
    if atomics.load(team + DONE) != expected:
        _await_helpers(team, expected, ready)
        ended = atomics.nanoseconds(clock)
    atomics.store(team + LOOPS, atomics.load(team + LOOPS) + 1)
    atomics.store(team + ALL_PIECES, atomics.load(team + ALL_PIECES) + pieces)
    atomics.store(team + OWN_PIECES, atomics.load(team + OWN_PIECES) + own)
    atomics.store(team + OWN_TIME, atomics.load(team + OWN_TIME) + ready - began)
    atomics.store(team + WAITED_TIME, atomics.load(team + WAITED_TIME) + ended - ready)
    atomics.store(team + CAPACITY, atomics.load(team + CAPACITY) + (ended - began) * min(workers, pieces))


@serial_in_order
def _await_helpers(team: int, expected: int, began: int) -> None:
    """Wait for the pieces that helpers have begun: spin for a moment, then sleep, which may be what they need."""
    clock = _share_of(team, 0) + _CLOCK
    until = began + atomics.load(team + CALLER_SPIN)
    while atomics.load(team + DONE) != expected:
        for _ in range(_LOOK):
            atomics.pause()
        if atomics.load(team + DONE) != expected and atomics.nanoseconds(clock) > until:
            atomics.lock(team + MUTEX)
            atomics.store(team + WAITING, 1)
            while atomics.load(team + DONE) != expected:
                atomics.wait(team + DONE_CONDITION, team + MUTEX)
            atomics.store(team + WAITING, 0)
            atomics.unlock(team + MUTEX)


@serial_in_order
def help_along(team: int, index: int) -> None:
    """Run helper `index`, from 0 on, until the team is stopped."""
    clock = _share_of(team, index + 1) + _CLOCK
    idle_since = atomics.nanoseconds(clock)
    while atomics.load(team + STOPPED) == 0:
        if index < atomics.load(team + ACTIVE) and _any_left(team):
            count = _take_pieces(team, index + 1)
            if count > 0:
                atomics.add(team + DONE, count)
                if atomics.load(team + WAITING) != 0:
                    # a caller between its look at DONE and its sleep holds the mutex: it must sleep before it is woken
                    atomics.lock(team + MUTEX)
                    atomics.unlock(team + MUTEX)
                    atomics.wake(team + DONE_CONDITION)
            idle_since = atomics.nanoseconds(clock)
            continue
        for _ in range(_LOOK):
            atomics.pause()
        if atomics.nanoseconds(clock) - idle_since > atomics.load(team + HELPER_SPIN):
            _sleep(team, index)
            idle_since = atomics.nanoseconds(clock)


@serial_in_order
def _sleep(team: int, index: int) -> None:
    """Sleep until there may be a piece for this helper, or the team is stopped. Only helpers that wait for pieces count
    as sleepers: a caller need not wake those that are to rest."""
    worker = index + 1
    atomics.lock(team + MUTEX)
    active = index < atomics.load(team + ACTIVE)
    atomics.store(_share_of(team, worker) + _ASLEEP, 1)
    if active:
        atomics.add(team + SLEEPERS, 1)
        while atomics.load(team + STOPPED) == 0 and index < atomics.load(team + ACTIVE) and not _any_left(team):
            _wait(team, worker)
        atomics.add(team + SLEEPERS, -1)
    else:
        while atomics.load(team + STOPPED) == 0 and index >= atomics.load(team + ACTIVE):
            _wait(team, worker)
    atomics.store(_share_of(team, worker) + _ASLEEP, 0)
    atomics.unlock(team + MUTEX)


@serial_in_order
def _wait(team: int, worker: int) -> None:
    """Sleep until this worker is woken, perhaps for nothing. Once awake it may use all its cores again."""
    share = _share_of(team, worker)
    atomics.wait(share + _CONDITION, team + MUTEX)
    if atomics.load(share + _KEPT_OFF) != 0:
        atomics.allow_cores(share + _CORES)
        atomics.store(share + _KEPT_OFF, 0)


@serial_in_order
def make(team: int, workers: int) -> None:
    """Initialise the locks of a team whose memory is all zeros."""
    atomics.make_mutex(team + MUTEX)
    atomics.make_condition(team + DONE_CONDITION)
    for worker in range(workers):
        atomics.make_condition(_share_of(team, worker) + _CONDITION)


@serial_in_order
def change(team: int, word: int, value: int, workers: int) -> None:
    """Set `word`, ACTIVE or STOPPED, and wake the helpers to see it; no loop may be running."""
    if word == ACTIVE:
        atomics.store(team + WANTED, value)
    atomics.store(team + word, value)
    _wake_helpers(team, workers - 1)
