"""Shared memory through which the processes of one model exchange results on a CPU.

It is an anonymous file (`memfd_create`, Linux): no name, and nothing to remove afterwards. Each process
writes its columns of a result into the one matrix, waits at a barrier until all have, and copies what it needs. There
are two such places, used in turns: a process that writes into one has passed the barrier behind the last use of the
other, by which all have read the first. Each stage of a pipeline has two of its own; stages wait for each other by
counts.
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

_PLACE = 2**25
"""Bytes of each place. Untouched bytes take no memory; a longer result goes through in several parts."""
_PAGE = mmap.PAGESIZE
_MOST = 64
"""Processes of a model, at most."""
_WORDS = 192
"""Bytes of the words that one count of arrivals takes (`kernels.cpu.atomics`); each process has one."""
_HEAD = -(-2 * _MOST * _WORDS // _PAGE) * _PAGE
"""Bytes before the places: the words of all processes, and then of all stages."""
_VIEWS = 256
"""Views that are kept for the next step of the same shape."""


def missing() -> str | None:
    """The reason for which there is no such memory here; None: there is."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return "needs Linux, whose processes share memory without a name"
    return compiler_missing(torch.float32, torch.device("cpu"))


def make_memory(stages: int = 1) -> int:
    """A descriptor of new memory, which its processes inherit. Raises `OSError`."""
    made = os.memfd_create("asyncengine-ranks")
    os.ftruncate(made, _HEAD + 2 * _PLACE * stages)
    return made


class SharedGather:
    """One process's view of the memory: a `layers.sharded.Ranks`. Used by one thread at a time."""

    exact = True

    def __init__(
        self, memory: int, rank: int, size: int, stages: int = 1, links: Sequence[Connection] = ()
    ) -> None:  # fmt: skip
        """`memory`: the descriptor of `make_memory`, which may be closed afterwards. `rank`: of `size` processes of all
        `stages`, of which each has as many, one behind the other. `links`: where the stages have a machine each, the
        connections of rank 0 to all stages behind the first, and of a later stage's first rank to rank 0."""
        from asyncengine.kernels.api import atomics

        self.size, self.stages = size // stages, stages
        self.stage, self.rank = divmod(rank, self.size)
        self.lost: str | None = None
        """The reason that `break_off` was given."""
        self.links, self.shares_pages = links, not links
        self.readers: list[threading.Thread] = []
        """Threads that read links, and end when these and all waiting do."""
        self._end = _HEAD + 2 * _PLACE * stages
        whole = torch.frombuffer(mmap.mmap(memory, self._end), dtype=torch.uint8)
        self._memory: torch.Tensor | None = whole
        self._file = os.dup(memory)
        self._close_file = weakref.finalize(self, os.close, self._file)
        self._address: int = whole.data_ptr()
        self._places: Sequence[torch.Tensor] = whole[_HEAD:].view(stages, 2, _PLACE)[self.stage].unbind()
        self._meet: Any = atomics.meet
        self._arrive: Any = atomics.arrive
        self._reach: Any = atomics.reach
        self._break_off: Any = atomics.break_off
        self._target = self._turn = 0
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def rows_at_once(self, row_bytes: int) -> int:
        """Number of rows of `row_bytes` each that a place holds. Raises `ValueError` where it does not hold one."""
        if row_bytes > _PLACE:
            raise ValueError(f"a row of {row_bytes} bytes is larger than the shared memory, {_PLACE}")
        return _PLACE // row_bytes

    def place(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [rows, columns] into which all ranks write before the next `meet`, and from which they read behind
        it until the one after. Nothing in particular is in it at first."""
        key = self._turn, rows, columns, dtype
        found = self._views.get(key)
        if found is None:
            if len(self._views) == _VIEWS:
                self._views.clear()
            nbytes = rows * columns * dtype.itemsize
            found = self._places[self._turn][:nbytes].view(dtype).view(rows, columns)
            self._views[key] = found
        return found

    def meet(self) -> None:
        """Wait until all ranks have called this as often as this one. Raises `RuntimeError` if one of them is gone."""
        self._target += self.size
        self._turn = 1 - self._turn
        if not self._meet(self._address + (_MOST + self.stage) * _WORDS, self._target):
            raise RuntimeError(self.lost or "another rank of the model is gone")

    def arrive(self, stage: int | None = None, rank: int | None = None) -> None:
        """Count one more arrival of this process, or in the name of another."""
        self._arrive(self._words(stage, rank))

    def reach(self, stage: int, count: int, rank: int | None = None) -> None:
        """Wait until this rank, or another, of a stage has called `arrive` so often. Raises `RuntimeError` if one of
        the processes is gone."""
        if not self._reach(self._words(stage, rank), count):
            raise RuntimeError(self.lost or "another rank of the model is gone")

    def _words(self, stage: int | None, rank: int | None) -> int:
        """Address of the count of a process; None: this one's stage, or rank."""
        of_stage = (self.stage if stage is None else stage) * self.size
        return self._address + (of_stage + (self.rank if rank is None else rank)) * _WORDS

    def break_off(self, reason: str) -> None:
        """End all waiting, in all processes: one of them is gone. From any thread; the first reason
        stands."""
        self.lost = self.lost or reason
        for words in range(2 * _MOST):
            self._break_off(self._address + words * _WORDS)

    def pools(self, nbytes: int) -> SharedPools:
        """Memory of at least `nbytes` for what each rank keeps, together with the same rank of other stages: all
        processes call this once, with the same number. Raises `OSError` where the system does not give it."""
        region = -(-nbytes // _PAGE) * _PAGE
        os.ftruncate(self._file, self._end + self.size * region)  # to the same size, whoever comes first
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
        self._places, self._memory = (), None


def _gone(*arguments: int) -> int:
    """The answer of `meet` where another rank is gone."""
    return 0


# Memory of pages and states that several processes of one model share on a CPU: each computes with its own region, and
# the engine's process copies prefixes from and into all of them.

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
