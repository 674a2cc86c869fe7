"""Pages and states of a model on a CPU as bytes: the memory itself, so that a disk reads into it and writes from it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.execution.attention.base import PagePool
from asyncengine.execution.device.arena import give_back
from asyncengine.execution.device.shared_gather import SharedPools
from asyncengine.execution.layers.states import StatePools
from asyncengine.step import RecordPart


class _Pool(NamedTuple):
    """Memory of one pool in each of the processes that have it, by rank."""

    views: Sequence[memoryview]
    stride: int
    """Bytes from one page to the next."""
    pieces: Sequence[tuple[int, int, int]]
    """(rank, first byte, bytes) of each piece of page 0, in the order of one process's bytes."""
    divided: bool
    """Each process has some pieces; else each has a copy of those of rank 0."""

    @property
    def nbytes(self) -> int:
        """Bytes of a page, of all processes if it is divided among them."""
        return sum(size for *_, size in self.pieces)

    def page(self, index: int, copy: int = 0) -> list[memoryview]:
        """All of the page `index`; of what is not divided, this rank's copy."""
        begin = index * self.stride
        return [self.views[rank + copy][begin + first :][:size] for rank, first, size in self.pieces]


class CpuPageMemory:
    """`PageMemory` of pools on a CPU. It keeps them alive."""

    def __init__(
        self, pools: Sequence[PagePool], states: StatePools | None, layout: str, shared: SharedPools | None = None
    ) -> None:
        """`layout`: the backend and the size of its pages, in words. `shared`: where they lie if several processes have
        pages. Those of a layer whose heads are divided are a page together; of all others each has a copy."""
        self._shared = shared
        parts = 1 if shared is None else shared.size
        slots = [] if states is None else _state_pools(states, parts)
        self._whole = [*(pool.memory for pool in pools), *(each.memory for each in slots)]
        sizes = [(pool.page_bytes, pool.pieces * (parts if pool.divided else 1), pool.of_windows) for pool in pools]
        self.layout = f"{layout} {sizes} {[each.shape for each in slots]}"
        self._pools: dict[RecordPart, list[_Pool]] = {part: [] for part in RecordPart}
        for pool in pools:
            part = RecordPart.WINDOW if pool.of_windows else RecordPart.PAGE
            firsts = [number * pool.stride for number in range(pool.pieces)]
            ranks = range(parts if pool.divided else 1)
            pieces = [(rank, first, pool.page_bytes) for rank in ranks for first in firsts]
            self._pools[part].append(_Pool(self._views(pool.memory), pool.page_bytes, pieces, pool.divided))
        for each in slots:
            ends, ranks = [*accumulate(each.sizes, initial=0)], range(parts if each.divided else 1)
            pieces = [(rank, first, end - first) for first, end in pairwise(ends) for rank in ranks]
            self._pools[RecordPart.STATE].append(_Pool(self._views(each.memory), ends[-1], pieces, each.divided))

    def _views(self, memory: torch.Tensor) -> list[memoryview]:
        own = [memory] if self._shared is None else self._shared.of_all(memory)
        return [_bytes_of(each).data for each in own]

    def nbytes(self, part: RecordPart) -> int:
        return sum(pool.nbytes for pool in self._pools[part])

    def buffers(self, part: RecordPart, index: int) -> Sequence[memoryview]:
        return [piece for pool in self._pools[part] for piece in pool.page(index)]

    def filled(self, part: RecordPart, index: int, buffers: Sequence[memoryview]) -> None:
        """The memory itself was filled; copies of other processes follow."""
        for pool in self._pools[part]:
            for rank in range(1, 1 if pool.divided else len(pool.views)):
                for piece, copy in zip(pool.page(index), pool.page(index, rank), strict=True):
                    copy[:] = piece

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Make the second page of each of `copies` one of the first."""
        for source, page in copies:
            for pool in self._pools[RecordPart.PAGE]:
                for piece, copied in zip(pool.page(source), pool.page(page), strict=True):
                    copied[:] = piece

    def give_back(self) -> None:
        """Let the system have the memory of all pages and states of this process, of which nothing is read any more."""
        if self._shared is not None:
            self._shared.give_back()
            return
        for memory in self._whole:
            give_back(memory.data_ptr(), memory.nbytes)


class _States(NamedTuple):
    """Memory of one layer's recurrent states, or windows."""

    memory: torch.Tensor
    sizes: Sequence[int]
    """Bytes of what stands side by side in one of them, each of which processes divide by itself."""
    shape: tuple[int, ...]
    """Shape of all processes' together."""
    divided: bool


def _state_pools(states: StatePools, parts: int) -> list[_States]:
    """`parts`: processes that may divide states."""
    heads, windows = [], []
    for spec, recurrent, window in zip(states.specs, states.recurrent, states.windows, strict=True):
        size = parts if spec.divided else 1
        if recurrent is not None:
            first, *rest = spec.recurrent
            heads.append(_States(recurrent, [recurrent[0].nbytes], (first * size, *rest), spec.divided))
        if window is not None:
            rows, channels = spec.window
            sizes = [window[0].nbytes]  # one piece is read and written faster than many
            if spec.divided:
                sizes = [kind * window.itemsize for kind in spec.kinds or (channels,)] * rows
            windows.append(_States(window, sizes, (rows, channels * size), spec.divided))
    return heads + windows


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
