"""The number of threads that torch's operators use on one thread of the program: OpenMP's setting of that thread.

`torch.set_num_threads` is the program's: it also says how many threads operators use on threads to come. OpenMP keeps
the number for each thread by itself, and torch asks it at every operator.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_NAMES = ("*gomp*", "*iomp5*", "*omp.*", "*omp140*")


@functools.cache
def _setter() -> Callable[[int], None] | None:
    """`omp_set_num_threads` of the library that torch uses; None: not found. Tried on the thread that calls first."""
    before = torch.get_num_threads()
    for pattern in _NAMES:
        for path in sorted((Path(torch.__file__).parent / "lib").glob(pattern)):
            try:
                setter = ctypes.CDLL(str(path)).omp_set_num_threads
            except (OSError, AttributeError):
                continue
            setter(before + 1)
            found = torch.get_num_threads()
            setter(before)
            if found == before + 1:
                return setter
    return None


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Within, torch's operators on this thread use `threads` threads; on others, and afterwards, as many as before.

    Does nothing where torch is built with another library than the OpenMP it comes with.
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
