"""Shared memory through which the processes of one model exchange results on a CPU.

It is an anonymous file (`memfd_create`, Linux): no name, and nothing to remove afterwards. Each process writes its
columns of a result into one shared matrix, waits at a barrier until all have, and copies what it needs. There are two
such buffers, used alternately: a process that writes into one has passed the barrier of the other's last use, and by
then every process has read the first. Each pipeline stage has two buffers of its own; stages wait for each other by
counts of arrivals.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from asyncengine.kernels.api import compiler_missing

_BUFFER_BYTES = 2**25
"""Bytes of each buffer. Untouched pages take no memory; a longer result is exchanged in several pieces."""
_PAGE = mmap.PAGESIZE
_MOST = 64
"""Processes of a model, at most."""
_WORDS = 192
"""Bytes of one counter of arrivals (`kernels.cpu.atomics`), of which each process has one."""
_HEAD = -(-2 * _MOST * _WORDS // _PAGE) * _PAGE
"""Bytes before the buffers: the counters of all processes, then those of all stages' barriers."""
_VIEWS = 256
"""Views that are kept for the next step of the same shape."""


def missing() -> str | None:
    """Why there is no such memory here; None: there is."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return "needs Linux, whose processes share memory without a name"
    return compiler_missing(torch.float32, torch.device("cpu"))


def make_memory(stages: int = 1) -> int:
    """The descriptor of new memory, which the ranks inherit. Raises `OSError`."""
    made = os.memfd_create("asyncengine-ranks")
    os.ftruncate(made, _HEAD + 2 * _BUFFER_BYTES * stages)
    return made


class SharedGather:
    """One process's view of the memory: a `layers.sharded.Ranks`. Used by one thread at a time."""

    exact = True

    def __init__(
        self, memory: int, rank: int, size: int, stages: int = 1, links: Sequence[Connection] = ()
    ) -> None:  # fmt: skip
        """`memory`: the descriptor of `make_memory`, which may be closed afterwards. `rank`: among `size` processes,
        which `stages` divide evenly in order. `links`: if each stage has a machine, rank 0's connections to the other
        stages, or the connection of a later stage's first rank to rank 0; otherwise none."""
        from asyncengine.kernels.api import atomics

        self.size, self.stages = size // stages, stages
        self.stage, self.rank = divmod(rank, self.size)
        self.lost: str | None = None
        """The reason that `break_off` was given."""
        self.links, self.shares_pages = links, not links
        self.readers: list[threading.Thread] = []
        """Threads that read links; they end when the links are closed and waiting is broken off."""
        self._end = _HEAD + 2 * _BUFFER_BYTES * stages
        whole = torch.frombuffer(mmap.mmap(memory, self._end), dtype=torch.uint8)
        self._memory: torch.Tensor | None = whole
        self._file = os.dup(memory)
        self._close_file = weakref.finalize(self, os.close, self._file)
        self._address: int = whole.data_ptr()
        self._buffers: Sequence[torch.Tensor] = whole[_HEAD:].view(stages, 2, _BUFFER_BYTES)[self.stage].unbind()
        self._meet: Any = atomics.meet
        self._arrive: Any = atomics.arrive
        self._reach: Any = atomics.reach
        self._break_off: Any = atomics.break_off
        self._target = self._turn = 0
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def rows_at_once(self, row_bytes: int) -> int:
        """Number of rows of `row_bytes` each that a buffer holds. Raises `ValueError` if it does not hold one."""
        if row_bytes > _BUFFER_BYTES:
            raise ValueError(f"a row of {row_bytes} bytes is larger than the shared memory, {_BUFFER_BYTES}")
        return _BUFFER_BYTES // row_bytes

    def buffer(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [rows, columns] that all ranks write before the next `meet`, and read after it until the `meet`
        after that. It is uninitialised."""
        key = self._turn, rows, columns, dtype
        view = self._views.get(key)
        if view is None:
            if len(self._views) == _VIEWS:
                self._views.clear()
            nbytes = rows * columns * dtype.itemsize
            view = self._buffers[self._turn][:nbytes].view(dtype).view(rows, columns)
            self._views[key] = view
        return view

    def meet(self) -> None:
        """Wait until all ranks have called this as often as this one. Raises `RuntimeError` if a rank is gone."""
        self._target += self.size
        self._turn = 1 - self._turn
        if not self._meet(self._address + (_MOST + self.stage) * _WORDS, self._target):
            raise RuntimeError(self.lost or "another rank of the model is gone")

    def arrive(self, stage: int | None = None, rank: int | None = None) -> None:
        """Increment the counter of this process, or that of another, whose results this one has received."""
        self._arrive(self._words(stage, rank))

    def reach(self, stage: int, count: int, rank: int | None = None) -> None:
        """Wait until the counter of a rank (None: this one's number) of a stage is at least `count`. Raises
        `RuntimeError` if a process is gone."""
        if not self._reach(self._words(stage, rank), count):
            raise RuntimeError(self.lost or "another rank of the model is gone")

    def _words(self, stage: int | None, rank: int | None) -> int:
        """Address of the counter of a process; None: this process's stage, or rank."""
        of_stage = (self.stage if stage is None else stage) * self.size
        return self._address + (of_stage + (self.rank if rank is None else rank)) * _WORDS

    def break_off(self, reason: str) -> None:
        """End all waiting in all processes, as one of them is gone. From any thread; the first reason is kept."""
        self.lost = self.lost or reason
        for words in range(2 * _MOST):
            self._break_off(self._address + words * _WORDS)

    def pools(self, nbytes: int) -> SharedPools:
        """Memory of at least `nbytes` for the caches of each rank; the same ranks of all stages share it. All processes
        call this once, with the same number. Raises `OSError` if there is no memory."""
        region = -(-nbytes // _PAGE) * _PAGE
        os.ftruncate(self._file, self._end + self.size * region)  # all processes set the same size, in any order
        return SharedPools(self._file, self._end, self.rank, self.size, region)

    def close(self) -> None:
        """Let go of the memory, after the last exchange. Idempotent."""
        if self.readers:
            self.break_off("the model is closed")
        for reader in self.readers:
            reader.join()
        self._close_file()
        self._meet = self._reach = self._arrive = self._break_off = _gone
        self._views.clear()
        self._buffers, self._memory = (), None


def _gone(*arguments: int) -> int:
    """Stand in for the barrier after `close`: 0 means that a rank is gone."""
    return 0


# Memory of pages and states that several processes of one model share on a CPU: each computes with its own region, and
# the engine's process copies prefixes from and into all of them.

_ALIGNED = mmap.PAGESIZE
"""Alignment of allocations in bytes."""


class SharedPools:
    """One process's view of the regions of all ranks, which all allocate from theirs in the same order."""

    def __init__(self, descriptor: int, first: int, rank: int, size: int, nbytes: int) -> None:
        """`first`: offset in the file of the regions of `size` processes, of `nbytes` each; both are whole pages."""
        self._region = nbytes
        self._first, self.size = rank * self._region, size
        self._used = 0
        self._mapped = mmap.mmap(descriptor, size * self._region, offset=first)
        self._memory = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An `Empty` in this process's region, all zeros. Raises `MemoryError` if the region is full."""
        nbytes, begin = math.prod(shape) * dtype.itemsize, self._used
        if begin + nbytes > self._region:
            raise MemoryError(f"{nbytes} bytes are more than is left of {self._region} shared ones")
        self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        offset = self._first + begin
        return self._memory[offset : offset + nbytes].view(dtype).view(tuple(shape))

    def of_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """For each rank the bytes of its tensor that corresponds to `tensor`, one that `empty` returned here."""
        begin = tensor.data_ptr() - self._memory.data_ptr() - self._first
        regions = range(begin, self.size * self._region, self._region)
        return [self._memory[offset : offset + tensor.nbytes] for offset in regions]

    def give_back(self) -> None:
        """Give the memory of this process's region back to the system: it is zeros until it is written to again."""
        used = min(self._used, self._region)
        if used:
            self._mapped.madvise(mmap.MADV_REMOVE, self._first, used)
