"""Pages and states of a model on a CPU as bytes: the memory itself, so that a disk reads into it and writes from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.attention.base import PagePool
from asyncengine.layers.states import StatePools
from asyncengine.step import RecordPart


class CpuPageMemory:
    """`PageMemory` of pools on a CPU. It keeps them alive."""

    def __init__(
        self, pools: Sequence[PagePool], states: StatePools | None, layout: str,
        mirror: Callable[[RecordPart, int, Sequence[memoryview]], object] | None = None,
    ) -> None:  # fmt: skip
        """`layout`: the backend and the size of its pages, in words. `mirror` takes what was filled, for other
        processes that have the same pages."""
        self._mirror = mirror
        sizes = [(pool.page_bytes, pool.pieces, pool.of_windows) for pool in pools]
        shapes = [] if states is None else [tuple(pool.shape[1:]) for pool in _state_pools(states)]
        self.layout = f"{layout} {sizes} {shapes}"
        self._pools = {
            RecordPart.PAGE: [pool for pool in pools if not pool.of_windows],
            RecordPart.WINDOW: [pool for pool in pools if pool.of_windows],
        }
        self._states = [] if states is None else [_bytes_of(pool, len(pool)) for pool in _state_pools(states)]
        self.whole = [*(_bytes_of(pool.memory) for pool in pools), *self._states]
        """Bytes of all pools of pages and states."""
        self._nbytes = {part: sum(pool.page_bytes * pool.pieces for pool in own) for part, own in self._pools.items()}
        self._nbytes[RecordPart.STATE] = sum(pool.shape[1] for pool in self._states)
        self._views = {
            part: [(memoryview(_bytes_of(pool.memory)[0]), pool.page_bytes, pool.pieces, pool.stride) for pool in own]
            for part, own in self._pools.items()
        }

    def nbytes(self, part: RecordPart) -> int:
        return self._nbytes[part]

    def buffers(self, part: RecordPart, index: int) -> Sequence[memoryview]:
        if part is RecordPart.STATE:
            return [memoryview(pool[index]) for pool in self._states]
        found = []
        for memory, size, pieces, stride in self._views[part]:
            first = index * size
            found += [memory[at : at + size] for at in range(first, first + pieces * stride, stride)]
        return found

    def filled(self, part: RecordPart, index: int, buffers: Sequence[memoryview]) -> None:
        """The memory itself was filled."""
        if self._mirror is not None:
            self._mirror(part, index, buffers)


def _state_pools(states: StatePools) -> list[torch.Tensor]:
    return [pool for pool in (*states.recurrent, *states.windows) if pool is not None]


def _bytes_of(tensor: torch.Tensor, rows: int = 1) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor, [rows, bytes of a row]."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().reshape(rows, -1)
