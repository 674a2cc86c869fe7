"""Pages and states of a model on a CPU as bytes: the memory itself, so that a disk reads into it and writes from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.attention.base import PagePool
from asyncengine.device.shared_pools import SharedPools
from asyncengine.kernels.arena import give_back
from asyncengine.layers.states import StatePools
from asyncengine.step import RecordPart


class _Pool(NamedTuple):
    """Memory of one pool in each of the processes that have it, by rank. Places as in `PagePool`."""

    views: Sequence[memoryview]
    page_bytes: int
    pieces: int
    stride: int
    divided: bool

    @property
    def nbytes(self) -> int:
        """Bytes of a page, of all processes if it is divided among them."""
        return self.page_bytes * self.pieces * (len(self.views) if self.divided else 1)

    def page(self, index: int) -> list[memoryview]:
        """All of the page `index`."""
        views = self.views if self.divided else self.views[:1]
        return [piece for view in views for piece in self.part(view, index)]

    def part(self, view: memoryview, index: int) -> list[memoryview]:
        """The pieces of the page `index` that one process has."""
        first = index * self.page_bytes
        begins = (first + number * self.stride for number in range(self.pieces))
        return [view[begin : begin + self.page_bytes] for begin in begins]


class CpuPageMemory:
    """`PageMemory` of pools on a CPU. It keeps them alive."""

    def __init__(
        self, pools: Sequence[PagePool], states: StatePools | None, layout: str, shared: SharedPools | None = None
    ) -> None:
        """`layout`: the backend and the size of its pages, in words. `shared`: where they lie if several processes have
        pages. Those of a layer whose heads are divided are a page together; of all others each has a copy."""
        self._shared = shared
        slots = [] if states is None else _state_pools(states)
        self._whole = [*(pool.memory for pool in pools), *slots]
        parts = 1 if shared is None else shared.size
        sizes = [(pool.page_bytes, pool.pieces * (parts if pool.divided else 1), pool.of_windows) for pool in pools]
        self.layout = f"{layout} {sizes} {[tuple(pool.shape[1:]) for pool in slots]}"
        self._pools: dict[RecordPart, list[_Pool]] = {part: [] for part in RecordPart}
        for pool in pools:
            part = RecordPart.WINDOW if pool.of_windows else RecordPart.PAGE
            views = self._views(pool.memory)
            self._pools[part].append(_Pool(views, pool.page_bytes, pool.pieces, pool.stride, pool.divided))
        for memory in slots:
            own = _Pool(self._views(memory), memory.nbytes // len(memory), 1, 0, False)
            self._pools[RecordPart.STATE].append(own)

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
            for view in () if pool.divided else pool.views[1:]:
                for piece, copy in zip(pool.part(pool.views[0], index), pool.part(view, index), strict=True):
                    copy[:] = piece

    def give_back(self) -> None:
        """Let the system have the memory of all pages and states of this process, of which nothing is read any more."""
        if self._shared is not None:
            self._shared.give_back()
            return
        for memory in self._whole:
            give_back(memory.data_ptr(), memory.nbytes)


def _state_pools(states: StatePools) -> list[torch.Tensor]:
    return [pool for pool in (*states.recurrent, *states.windows) if pool is not None]


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
