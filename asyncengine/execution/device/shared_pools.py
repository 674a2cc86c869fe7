"""Memory of pages and states that several processes of one model share on a CPU: each computes with its own region, and
the engine's process copies prefixes from and into all of them.

It lies in the anonymous file of `shared_gather`. Untouched bytes take no memory.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

_ALIGNED = mmap.PAGESIZE
"""Bytes between two places where something may begin."""


class SharedPools:
    """One process's view of the regions, which all of them cut in the same way."""

    def __init__(self, descriptor: int, first: int, rank: int, size: int, nbytes: int) -> None:
        """`first`: the byte of the file where the regions of `size` processes begin, of `nbytes` each; whole pages of
        memory both."""
        self._region = nbytes
        self._first, self.size = rank * self._region, size
        self._used = 0
        self._mapped = mmap.mmap(descriptor, size * self._region, offset=first)
        self._memory = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An `Empty` of this process's region, all zeros. Raises `MemoryError` where the region has no room."""
        nbytes, begin = math.prod(shape) * dtype.itemsize, self._used
        if begin + nbytes > self._region:
            raise MemoryError(f"{nbytes} bytes are more than is left of {self._region} shared ones")
        self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        place = self._first + begin
        return self._memory[place : place + nbytes].view(dtype).view(tuple(shape))

    def of_all(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The bytes of what `empty` gave each of the processes when it gave `own` to this one, by rank."""
        begin = own.data_ptr() - self._memory.data_ptr() - self._first
        regions = range(begin, self.size * self._region, self._region)
        return [self._memory[place : place + own.nbytes] for place in regions]

    def give_back(self) -> None:
        """Let the system have the memory of this process's region: it is zeros until it is written to again."""
        used = min(self._used, self._region)
        if used:
            self._mapped.madvise(mmap.MADV_REMOVE, self._first, used)
