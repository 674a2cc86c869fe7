"""Synchronization of compiled code: words of shared memory, a clock, a lock with a condition to sleep on, a barrier.

Every access to a word is sequentially consistent. The protocol of `team` rests on that: of two threads that each write
one word and then read the other's, at least one sees what the other wrote.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu.intrinsics import emitted
from asyncengine.kernels.cpu.jit import array, pointer, serial
from asyncengine.kernels.cpu.vectors import LONG

_ORDER = "seq_cst"
_WINDOWS = sys.platform == "win32"
_MONOTONIC = 6 if sys.platform == "darwin" else 1
"""CLOCK_MONOTONIC."""
LOCK_BYTES = 64
"""At least those of a lock and of a condition: pthread_mutex_t, pthread_cond_t on Linux and macOS, less on Windows."""
AFFINITY_BYTES = 128
"""The size of a set of cores, a bit for each: cpu_set_t on Linux."""

_int32, _int64 = numba.types.int32, numba.types.int64


def _external(name: str, *arguments: Any) -> Any:
    """A function of the system. `lock` and `unlock` take a mutex; `wake` wakes all threads that sleep on a condition. A
    thread that checks with the mutex held before it sleeps must not miss the change: take and leave the mutex between
    the change and that."""
    return numba.types.ExternalFunction(name, _int32(*arguments))


def _at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, LONG.as_pointer())


@emitted(_int64, result=_int64)
def load(builder: Any, address: Any) -> Any:
    """The int64 at an address."""
    return builder.load_atomic(_at(builder, address), _ORDER, 8)


@emitted(_int64, _int64)
def store(builder: Any, address: Any, value: Any) -> None:
    """Write the int64 at an address."""
    builder.store_atomic(value, _at(builder, address), _ORDER, 8)


@emitted(_int64, _int64, result=_int64)
def add(builder: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at an address; returns what was there before."""
    return builder.atomic_rmw("add", _at(builder, address), value, _ORDER)


@emitted(_int64, _int64, _int64, result=_int64)
def exchange(builder: Any, address: Any, expected: Any, wanted: Any) -> Any:
    """Replace `expected` at the address by `wanted`; returns 1, or 0 if another value was there, which stays."""
    swapped = builder.cmpxchg(_at(builder, address), expected, wanted, _ORDER, _ORDER)
    return builder.zext(builder.extract_value(swapped, 1), LONG)


@emitted()
def pause(builder: Any) -> None:
    """Tell the core that this thread waits for a word to change."""
    name = {"x86_64": "llvm.x86.sse2.pause", "amd64": "llvm.x86.sse2.pause"}.get(platform.machine().lower())
    if name is not None:
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), name), [])


if _WINDOWS:  # slim locks begin as zeros; the counter goes ten million times a second
    lock = _external("AcquireSRWLockExclusive", _int64)
    unlock = _external("ReleaseSRWLockExclusive", _int64)
    _sleep_on = _external("SleepConditionVariableSRW", _int64, _int64, _int32, _int32)
    wake = _external("WakeAllConditionVariable", _int64)
    _counter = _external("QueryPerformanceCounter", _int64)

    @serial
    def nanoseconds(space: int) -> int:
        """Nanoseconds of a clock that only goes forward. `space`: two words that are this thread's own."""
        _counter(space)
        ticks: int = array(pointer(space, np.int64(0)), (1,))[0]
        return ticks * 100

    @serial
    def make_mutex(mutex: int) -> None:
        """Make a mutex of zeros."""

    @serial
    def make_condition(condition: int) -> None:
        """Make a condition of zeros."""

    @serial
    def wait(condition: int, mutex: int) -> None:
        """Let go of the mutex, sleep until `wake` (or for no reason at all), and hold it again."""
        _sleep_on(condition, mutex, np.int32(-1), np.int32(0))

else:
    _make_mutex = _external("pthread_mutex_init", _int64, _int64)
    _make_condition = _external("pthread_cond_init", _int64, _int64)
    lock = _external("pthread_mutex_lock", _int64)
    unlock = _external("pthread_mutex_unlock", _int64)
    _sleep_on = _external("pthread_cond_wait", _int64, _int64)
    wake = _external("pthread_cond_broadcast", _int64)
    _clock = _external("clock_gettime", _int32, _int64)

    @serial
    def nanoseconds(space: int) -> int:
        """Nanoseconds of a clock that only goes forward. `space`: two words that are this thread's own."""
        _clock(np.int32(_MONOTONIC), space)
        fields = array(pointer(space, np.int64(0)), (2,))
        seconds: int = fields[0]
        total: int = seconds * 1_000_000_000 + fields[1]
        return total

    @serial
    def make_mutex(mutex: int) -> None:
        """Make it of zeros."""
        _make_mutex(mutex, 0)

    @serial
    def make_condition(condition: int) -> None:
        """Make it of zeros."""
        _make_condition(condition, 0)

    @serial
    def wait(condition: int, mutex: int) -> None:
        """Let go of the mutex, sleep until `wake` (or for no reason at all), and hold it again."""
        _sleep_on(condition, mutex)


if sys.platform == "linux":
    _this_core = _external("sched_getcpu")
    _get_affinity = _external("sched_getaffinity", _int32, _int64, _int64)
    _set_affinity = _external("sched_setaffinity", _int32, _int64, _int64)

    @serial
    def keep_off_core(thread: int, space: int) -> int:
        """Forbid a sleeping thread the core that the caller is on, so that it wakes on another.

        `space`: twice AFFINITY_BYTES, whose first half gets the cores that the thread may use. Returns 1, or 0 if
        nothing changed, as there is no other core, or the system refuses.
        """
        core = np.int64(_this_core())
        words = AFFINITY_BYTES // 8
        cores = array(pointer(space, np.uint64(0)), (2 * words,))
        if core < 0 or core >= 64 * words or _get_affinity(np.int32(thread), AFFINITY_BYTES, space) < 0:
            return 0
        for word in range(words):
            cores[words + word] = cores[word]
        cores[words + (core >> 6)] &= ~(np.uint64(1) << np.uint64(core & 63))
        return 1 if _set_affinity(np.int32(thread), AFFINITY_BYTES, space + AFFINITY_BYTES) == 0 else 0

    @serial
    def allow_cores(space: int) -> None:
        """Let the calling thread use the cores again that `keep_off_core` wrote to `space`."""
        _set_affinity(np.int32(0), AFFINITY_BYTES, space)

else:

    @serial
    def keep_off_core(thread: int, space: int) -> int:
        """Return 0: the system alone says which core a thread wakes on."""
        return 0

    @serial
    def allow_cores(space: int) -> None:
        """Do nothing, as nothing was forbidden."""


# A barrier for processes that share memory, in compiled code: it does not hold the interpreter's lock, and takes about
# as long as a cache line takes from core to core. Its two halves are of use by themselves where one waits for another.
#
# Arrivals are counted and never reset: a process that has passed the barrier n times waits for n + 1 times as many
# arrivals as there are processes. Where others want the cores, too, waiting in a loop keeps them from those that are
# waited for: after some tens of microseconds a process sleeps on the count (futex), and who arrives wakes the sleepers.
# A process that notices that another is gone sets a word, which all that wait look at.

_ARRIVED, _BROKEN, _SLEEPERS = 0, 64, 128
"""Bytes from the beginning of the shared words to the number of arrivals, the word that says that one is gone, and the
number of those that sleep: each has a cache line of its own."""
WORDS_BYTES = 192
_SPINS = 1000
_SLEEP, _WAKE = 0, 1
"""FUTEX_WAIT and FUTEX_WAKE, between processes."""
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
"""The number of the system call; 0: unknown, and who waits offers the core instead."""

_system = numba.types.ExternalFunction("syscall", _int64(_int64, _int64, _int64, _int64, _int64, _int64, _int64))
_yield = numba.types.ExternalFunction("sched_yield", numba.types.int32())


@serial
def meet(words: int, target: int) -> int:
    """Arrive, and wait until there were `target` arrivals; `words`: the address of the shared words. Returns 1, or 0 if
    one of the processes is gone."""
    arrive(words)
    return reach(words, target)


@serial
def reach(words: int, target: int) -> int:
    """Wait until there were `target` arrivals; the rest as for `meet`."""
    spins = 0
    while load(words + _BROKEN) == 0:
        arrived = load(words + _ARRIVED)
        if arrived >= target:
            return 1
        spins += 1
        if spins < _SPINS:
            pause()
        elif _FUTEX == 0:
            _yield()
        else:  # it does not sleep if there was another arrival meanwhile, which may not have seen the sleeper
            add(words + _SLEEPERS, 1)
            _system(_FUTEX, words + _ARRIVED, _SLEEP, arrived & 0xFFFFFFFF, 0, 0, 0)
            add(words + _SLEEPERS, -1)
    return 0


@serial
def arrive(words: int) -> None:
    """Count this process's arrival and wake those that sleep, without waiting itself."""
    add(words + _ARRIVED, 1)
    if load(words + _SLEEPERS) != 0 and _FUTEX != 0:
        _system(_FUTEX, words + _ARRIVED, _WAKE, 0x7FFFFFFF, 0, 0, 0)


@serial
def break_off(words: int) -> None:
    """End every wait at the barrier, present and future, since a process is gone."""
    store(words + _BROKEN, 1)
    arrive(words)  # a count that was about to be slept on is another now
