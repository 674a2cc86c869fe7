"""Memory of weights, side by side in huge pages: what is read from end to end in every step.

In pages of 4 KiB a core looks up an address every 64 lines, and its prefetchers stop at every page: reading weights
takes a seventh longer than from pages of 2 MiB (docs/performance.md). Linux gives those where it is asked
(`madvise(MADV_HUGEPAGE)`, transparent huge pages); everywhere else, and where it has none, nothing changes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

Empty = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""A new uninitialised tensor on the CPU, of a shape and a dtype."""

_HUGE = 2**21
"""Bytes of a huge page."""
_CHUNK = 2**26
"""Bytes that are asked for at once, at least; those that nobody writes to are never taken."""
_LINE = 64
_SMALL = 2**16
"""Bytes of a tensor below which it does not matter where it lies."""


def ordinary(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An `Empty`: wherever torch puts it."""
    return torch.empty(tuple(shape), dtype=dtype)


class Arena:
    """Gives out pieces of a few large blocks; a block goes when the last tensor in it does."""

    def __init__(self) -> None:
        self._block: torch.Tensor | None = None
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An `Empty`, aligned to a cache line. Raises `RuntimeError` or `OSError` where memory is not to be had."""
        taken = self._take(shape, dtype)
        return ordinary(shape, dtype) if taken is None else taken

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The same, all zeros; what is never written to takes no memory."""
        taken = self._take(shape, dtype)  # new from the system, and nothing is given out twice: it is zeros
        return torch.zeros(tuple(shape), dtype=dtype) if taken is None else taken

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """None: it does not matter where so little lies, or there are no huge pages here."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL or not hasattr(mmap, "MADV_HUGEPAGE"):
            return None
        if self._block is None or self._used + size > len(self._block):
            self._block, self._used = _block(max(size, _CHUNK)), 0
        place = self._block[self._used : self._used + size]
        self._used += -(-size // _LINE) * _LINE
        return place.view(dtype).view(tuple(shape))


def _block(size: int) -> torch.Tensor:
    """uint8 [size or a little more] that begins with a huge page."""
    size = -(-size // _HUGE) * _HUGE
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _HUGE
    return whole[first : first + size]
