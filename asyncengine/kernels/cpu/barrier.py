"""A barrier for processes that share memory, in compiled code: it holds nobody's interpreter, and takes about as long
as a cache line takes from one core to another. Its two halves are of use by themselves where one waits for another.

Arrivals are counted and never reset: a process that has passed the barrier n times waits for n + 1 times as many
arrivals as there are processes. Where others want the cores, too, waiting in a loop keeps them from those that are
waited for: after some tens of microseconds a process sleeps on the count (futex), and who arrives wakes the sleepers.
Whoever finds out that a process is gone sets a word, at which all look that wait.
"""

from __future__ import annotations

import platform

import numba

from asyncengine.kernels.cpu.atomics import add, load, pause, store
from asyncengine.kernels.cpu.jit import serial

_ARRIVED, _BROKEN, _SLEEPERS = 0, 64, 128
"""Bytes from the beginning of the shared words to the number of arrivals, the word that says that one is gone, and the
number of those that sleep: each has a cache line of its own."""
WORDS_BYTES = 192
_SPINS = 1000
_SLEEP, _WAKE = 0, 1
"""FUTEX_WAIT and FUTEX_WAKE, between processes."""
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
"""The number of the system call; 0: unknown, and who waits offers the core instead."""

_int64 = numba.types.int64
_system = numba.types.ExternalFunction("syscall", _int64(_int64, _int64, _int64, _int64, _int64, _int64, _int64))
_yield = numba.types.ExternalFunction("sched_yield", numba.types.int32())


@serial
def meet(words: int, target: int) -> int:
    """Arrive, and wait until there were `target` arrivals; `words`: the address of the shared words. Returns 1; 0: one
    of the processes is gone."""
    arrive(words)
    return reach(words, target)


@serial
def reach(words: int, target: int) -> int:
    """Wait until there were `target` arrivals; the rest as for `meet`."""
    spins = 0
    while load(words + _BROKEN) == 0:
        seen = load(words + _ARRIVED)
        if seen >= target:
            return 1
        spins += 1
        if spins < _SPINS:
            pause()
        elif _FUTEX == 0:
            _yield()
        else:  # it does not sleep if there was another arrival meanwhile, which may not have seen the sleeper
            add(words + _SLEEPERS, 1)
            _system(_FUTEX, words + _ARRIVED, _SLEEP, seen & 0xFFFFFFFF, 0, 0, 0)
            add(words + _SLEEPERS, -1)
    return 0


@serial
def arrive(words: int) -> None:
    """Arrive, and wait for nobody."""
    add(words + _ARRIVED, 1)
    if load(words + _SLEEPERS) != 0 and _FUTEX != 0:
        _system(_FUTEX, words + _ARRIVED, _WAKE, 0x7FFFFFFF, 0, 0, 0)


@serial
def break_off(words: int) -> None:
    """Let nobody wait any more."""
    store(words + _BROKEN, 1)
    arrive(words)  # a count that was about to be slept on is another now
