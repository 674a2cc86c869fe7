"""Memory of weights, side by side in huge pages, since every step reads all of it.

In pages of 4 KiB a core looks up an address every 64 cache lines, and its prefetchers stop at every page: reading
weights takes a seventh longer than from pages of 2 MiB (docs/performance.md). Linux gives huge pages if asked
(`madvise(MADV_HUGEPAGE)`, transparent huge pages); without them, and on other systems, memory is ordinary.

New memory is mapped by page faults as it is first touched, and in a virtual machine the host takes part in each of
these: it may be the longest part of loading 1.2 GB. `populate_memory` does it ahead in several threads
(`madvise(MADV_POPULATE_WRITE)`, Linux 5.14).
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
"""Least bytes of a block; pages of it that are never written to take no memory."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""`MADV_POPULATE_READ` and `MADV_POPULATE_WRITE`, which Python has no names for."""
_POPULATED_AT_ONCE = 2**25
"""Bytes that one call populates."""
_LINE = 64


def ordinary(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An `Empty` of torch's own allocator."""
    return torch.empty(tuple(shape), dtype=dtype)


class MappedRegion(NamedTuple):
    """A region of memory that an arena has given out."""

    memory: mmap.mmap
    """The mapping that holds it."""
    address: int
    size: int


class Arena:
    """Gives out pieces of a few large blocks; a block goes when the last tensor in it does."""

    def __init__(self) -> None:
        self.file_bytes = 0
        """Bytes of a file that was mapped over this memory."""
        self._block: torch.Tensor | None = None
        self._used = 0
        self._given: list[tuple[weakref.ref[mmap.mmap], int, int]] = []
        """Blocks: the mapping that holds each, its first byte, and the bytes of it that were given out."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An `Empty`, aligned to a cache line. Raises `RuntimeError` or `OSError` if there is no memory."""
        taken = self._take(shape, dtype)
        return ordinary(shape, dtype) if taken is None else taken

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros of a shape and a dtype; pages that are never written to take no memory."""
        taken = self._take(shape, dtype)  # fresh mappings are zero, and no region is given out twice
        return torch.zeros(tuple(shape), dtype=dtype) if taken is None else taken

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Uninitialised memory of the current block, or of a new one; None: this system has no huge pages."""
        size = math.prod(shape) * dtype.itemsize
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return None
        if self._block is None or self._used + size > len(self._block):
            memory, self._block = _block(max(size, _CHUNK))
            self._used = 0
            self._given.append((weakref.ref(memory), self._block.data_ptr(), 0))
        region = self._block[self._used : self._used + size]
        self._used += -(-size // _LINE) * _LINE
        self._given[-1] = (*self._given[-1][:2], min(self._used, len(self._block)))
        return region.view(dtype).view(tuple(shape))

    def give_back(self) -> None:
        """Give all memory that was handed out back to the system: it reads as zeros until it is written to again."""
        for region in self.regions():
            give_back(region.address, region.size)

    def regions(self) -> list[MappedRegion]:
        """All memory that was given out and is still referenced, in regions of some MiB, for `populate_memory`."""
        blocks = [(memory(), address, used) for memory, address, used in self._given]
        return [
            MappedRegion(memory, address + first, min(_POPULATED_AT_ONCE, used - first))
            for memory, address, used in blocks
            if memory is not None
            for first in range(0, used, _POPULATED_AT_ONCE)
        ]


def give_back(address: int, size: int) -> None:
    """Give the whole pages in these bytes back to the system. Pages of a mapped file are read from it again when they
    are touched, others are zeros. Does nothing on systems other than Linux."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def populate_memory(
    regions: Sequence[MappedRegion], threads: int, advance: Callable[[], object], *, of_file: bool = False
) -> None:
    """Populate the pages of `regions`, which will be written to soon, by `threads` threads; or, with `of_file`, read
    the pages of a file that is mapped there. `advance` is called once for each region, by the caller's thread; an
    exception of it ends the work.

    Systems without this call populate memory as it is touched.
    """
    waiting, done = deque(regions), queue.SimpleQueue[None]()
    arguments = waiting, done, _POPULATE_READ if of_file else _POPULATE_WRITE
    helpers = []
    for _ in range(min(threads, len(regions))):
        helper = threading.Thread(target=_populate, args=arguments, name="asyncengine-memory", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # the system has no more threads
            break
        helpers.append(helper)
    try:
        for _ in regions if helpers else ():
            done.get()
            advance()
    finally:
        waiting.clear()
        for helper in helpers:
            helper.join()


def _populate(waiting: deque[MappedRegion], done: queue.SimpleQueue[None], advice: int) -> None:
    """Populate regions of the queue until it is empty."""
    madvise = ctypes.CDLL(None).madvise  # ctypes releases the interpreter lock, mmap's own method does not
    while True:
        try:
            region = waiting.popleft()
        except IndexError:
            return
        madvise(ctypes.c_void_p(region.address), ctypes.c_size_t(region.size), advice)
        done.put(None)


def _block(size: int) -> tuple[mmap.mmap, torch.Tensor]:
    """A new mapping, and uint8 [at least size] in it that begins with a huge page."""
    size = -(-size // _HUGE) * _HUGE
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _HUGE
    return memory, whole[first : first + size]


# Memory that large results reuse one after the other.

_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


_ALIKE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""numpy's types by bytes of a number: it has no bfloat16."""


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the CPU, made without releasing the interpreter lock as `torch.empty` does: waiting
    for the lock again can take longer than the allocation."""
    return torch.from_numpy(np.empty(shape, dtype=_ALIKE[dtype.itemsize])).view(dtype)


_LARGE = 2**18
"""Numbers of a result from which on the C library maps fresh pages for each."""


class OutputBufferPool:
    """float32 memory that large results reuse: faulting in fresh pages for megabytes takes longer than filling them.

    A result keeps its numbers as long as it, or a view of it, is referenced; the next result gets new memory then.
    """

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """An uninitialised tensor of that shape, contiguous."""
        size = math.prod(shape)
        if size < _LARGE or _use_count is None:
            return torch.empty(shape, dtype=torch.float32)
        storage: Any = None if self._last is None else self._last.untyped_storage()
        # two references are `self._last` and the `storage` made here: no caller still has the last result
        free = storage is not None and _use_count(storage._cdata) == 2
        if self._last is None or not free or not size <= self._last.numel() <= 4 * size:
            self._last = torch.empty(size, dtype=torch.float32)
        return self._last[:size].view(shape)
