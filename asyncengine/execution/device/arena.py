"""Memory of weights, side by side in huge pages: what is read from end to end in every step.

In pages of 4 KiB a core looks up an address every 64 lines, and its prefetchers stop at every page: reading weights
takes a seventh longer than from pages of 2 MiB (docs/performance.md). Linux gives those where it is asked
(`madvise(MADV_HUGEPAGE)`, transparent huge pages); everywhere else, and where it has none, nothing changes.

Memory that nobody has written to yet is found by the system as it is touched, page by page. In a virtual machine its
host has to be asked as well: of loading 1.2 GB that may be the longest part. `find_memory` has several threads do it
ahead (`madvise(MADV_POPULATE_WRITE)`, Linux 5.14).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

Empty = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""A new uninitialised tensor on the CPU, of a shape and a dtype."""

_HUGE = 2**21
"""Bytes of a huge page."""
_CHUNK = 2**26
"""Bytes that are asked for at once, at least; those that nobody writes to are never taken."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""`MADV_POPULATE_READ` and `MADV_POPULATE_WRITE`, which Python has no names for."""
_FOUND_AT_ONCE = 2**25
"""Bytes that the system is asked to find at once."""
_LINE = 64


def ordinary(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An `Empty`: wherever torch puts it."""
    return torch.empty(tuple(shape), dtype=dtype)


class MappedPart(NamedTuple):
    """Some of the memory that an arena has given out."""

    memory: mmap.mmap
    """The arena that holds it."""
    address: int
    size: int


class Arena:
    """Gives out pieces of a few large blocks; a block goes when the last tensor in it does."""

    def __init__(self) -> None:
        self.file_bytes = 0
        """Bytes of a file that was mapped in the place of this memory."""
        self._block: torch.Tensor | None = None
        self._used = 0
        self._given: list[tuple[weakref.ref[mmap.mmap], int, int]] = []
        """Blocks: the mapping that holds each, its first byte, and the bytes of it that were given out."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An `Empty`, aligned to a cache line. Raises `RuntimeError` or `OSError` where memory is not to be had."""
        taken = self._take(shape, dtype)
        return ordinary(shape, dtype) if taken is None else taken

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The same, all zeros; what is never written to takes no memory."""
        taken = self._take(shape, dtype)  # new from the system, and nothing is given out twice: it is zeros
        return torch.zeros(tuple(shape), dtype=dtype) if taken is None else taken

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """None: there are no huge pages here."""
        size = math.prod(shape) * dtype.itemsize
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return None
        if self._block is None or self._used + size > len(self._block):
            memory, self._block = _block(max(size, _CHUNK))
            self._used = 0
            self._given.append((weakref.ref(memory), self._block.data_ptr(), 0))
        place = self._block[self._used : self._used + size]
        self._used += -(-size // _LINE) * _LINE
        self._given[-1] = (*self._given[-1][:2], min(self._used, len(self._block)))
        return place.view(dtype).view(tuple(shape))

    def give_back(self) -> None:
        """Let the system have all memory that was given out: it is zeros until it is written to again."""
        for part in self.parts():
            give_back(part.address, part.size)

    def parts(self) -> list[MappedPart]:
        """All memory that was given out and is still held, in parts of some megabytes, for `find_memory`."""
        held = [(memory(), address, used) for memory, address, used in self._given]
        return [
            MappedPart(memory, address + first, min(_FOUND_AT_ONCE, used - first))
            for memory, address, used in held
            if memory is not None
            for first in range(0, used, _FOUND_AT_ONCE)
        ]


def give_back(address: int, size: int) -> None:
    """Let the system take back the whole pages in these bytes, which nobody reads before they are written again. Those
    of a file are read from it then, others are zeros. Nothing happens where it is not Linux."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def find_memory(
    parts: Sequence[MappedPart], threads: int, advance: Callable[[], object], *, of_file: bool = False
) -> None:
    """Have the system find memory for `parts`, which will be written to soon, by so many threads; or, of a file that is
    mapped there, its pages, which will be read. `advance` is called once for each part, by the caller's thread; what it
    raises ends the work.

    Where the system cannot be asked that, it finds memory as it is touched.
    """
    waiting, done = deque(parts), queue.SimpleQueue[None]()
    advice = _POPULATE_READ if of_file else _POPULATE_WRITE
    helpers = []
    for _ in range(min(threads, len(parts))):
        helper = threading.Thread(target=_find, args=(waiting, done, advice), name="asyncengine-memory", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # the system has no more threads
            break
        helpers.append(helper)
    try:
        for _ in parts if helpers else ():
            done.get()
            advance()
    finally:
        waiting.clear()
        for helper in helpers:
            helper.join()


def _find(waiting: deque[MappedPart], done: queue.SimpleQueue[None], advice: int) -> None:
    """One part after the other, while there are any."""
    madvise = ctypes.CDLL(None).madvise  # lets go of the interpreter's lock, which mmap's own does not
    while True:
        try:
            part = waiting.popleft()
        except IndexError:
            return
        madvise(ctypes.c_void_p(part.address), ctypes.c_size_t(part.size), advice)
        done.put(None)


def _block(size: int) -> tuple[mmap.mmap, torch.Tensor]:
    """uint8 [size or a little more] that begins with a huge page, and the memory it lies in."""
    size = -(-size // _HUGE) * _HUGE
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _HUGE
    return memory, whole[first : first + size]


# Memory for one large result after the other.

_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


_ALIKE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""numpy's types by bytes of a number: it has no bfloat16."""


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the CPU, made without letting go of the interpreter's lock as `torch.empty` does."""
    return torch.from_numpy(np.empty(shape, dtype=_ALIKE[dtype.itemsize])).view(dtype)


_LARGE = 2**18
"""Numbers of a result for which the system maps fresh pages each time."""


class OutputBufferPool:
    """float32 memory for one result after the other: mapping fresh pages for megabytes takes longer than filling them.

    A result keeps its numbers as long as it, or a view of it, is referenced.
    """

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """An uninitialised tensor of that shape, contiguous."""
        size = math.prod(shape)
        if size < _LARGE or _use_count is None:
            return torch.empty(shape, dtype=torch.float32)
        storage: Any = None if self._last is None else self._last.untyped_storage()
        # referenced, by torch's count, by this tensor and by the storage looked at here: nobody has the last result
        free = storage is not None and _use_count(storage._cdata) == 2
        if self._last is None or not free or not size <= self._last.numel() <= 4 * size:
            self._last = torch.empty(size, dtype=torch.float32)
        return self._last[:size].view(shape)
