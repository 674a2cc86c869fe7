"""Hidden rows of passes on their way from stage to stage of a pipeline, through shared memory on a CPU.

Every stage computes every pass, in order. A pass has a place, where each stage finds what the one before it wrote. As
many passes as there are stages may be on their way: the place of one is used again when the first stage has what the
last one made of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from asyncengine.execution.device.shared_gather import SharedGather
from asyncengine.execution.device.shared_pools import SharedPools


class StageRelay:
    """One stage's door to the one before it and the one behind it. All make it before anything else of `memory`."""

    def __init__(
        self, gather: SharedGather, memory: SharedPools, tokens: int, width: int, vectors: Sequence[int],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`tokens`: of a pass, at most. `width`: numbers of a token between two stages. `vectors`: shape of what each
        token has for all layers beside it; (): nothing."""
        self._gather, self._width = gather, width
        self._rows = memory.empty((gather.size, tokens * width), dtype)
        self._vectors = memory.empty((gather.size, tokens, *vectors), dtype) if vectors else None
        self._passed = self._collected = 0
        """Passes that this stage has handed on, and that the first has back."""

    @staticmethod
    def nbytes(size: int, tokens: int, width: int, vectors: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes that hold what `size` stages exchange."""
        return size * tokens * (width + math.prod(vectors) * bool(vectors)) * dtype.itemsize + 2**16

    def take(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(rows [count, width] that the stage before has made of the next pass, the pass's vectors), which are
        there until this stage hands on. Raises `RuntimeError` if a stage is gone."""
        self._gather.reach(self._gather.rank - 1, self._passed + 1)
        place = self._passed % self._gather.size
        rows = self._rows[place, : count * self._width].view(count, self._width)
        return rows, None if self._vectors is None else self._vectors[place, :count]

    def hand_on(self, rows: torch.Tensor, vectors: torch.Tensor | None = None) -> None:
        """Let the next stage have what this one has made of the next pass; `vectors`: in the first stage."""
        place = self._passed % self._gather.size
        self._rows[place, : rows.numel()].view(rows.shape).copy_(rows)
        if vectors is not None and self._vectors is not None:
            self._vectors[place, : len(vectors)] = vectors
        self._passed += 1
        self._gather.arrive()

    def collect(self, count: int, width: int) -> torch.Tensor:
        """Hidden rows [count, width] that the last stage has made of the oldest pass that the first one, which this is,
        has not got back yet. They are there as long as that pass is. Raises `RuntimeError` if a stage is gone."""
        place = self._collected % self._gather.size
        self._collected += 1
        self._gather.reach(self._gather.size - 1, self._collected)
        return self._rows[place, : count * width].view(count, width)
