"""Biases that attention adds to a score for the distance between query and key."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.slots import TensorSlot

_FAR = 128
"""Distances from here on are one."""


class DistanceBias:
    """A learned bias per head of each bucket of distances, as T5's (Raffel et al. 2020), of which MPNet has one for all
    layers. Keys before a query and behind it have half of the buckets each: half of those are of one distance each,
    the rest reach logarithmically up to 128."""

    def __init__(self, options: LayerOptions, path: str, buckets: int, heads: int) -> None:
        self._path = path
        self._table = options.zeros(buckets, heads)

    def __call__(self, count: int) -> torch.Tensor:
        """[heads, count, count] of a sequence of `count` tokens: queries are rows."""
        places = torch.arange(count, device=self._table.device)
        away = self._table[self._buckets(torch.arange(1 - count, count))].T  # of all distances, once
        return away[:, places - places[:, None] + count - 1]

    def _buckets(self, distances: torch.Tensor) -> torch.Tensor:
        """int64, as `distances`: of keys minus queries."""
        each = len(self._table) // 2
        exact = each // 2
        far = distances.abs()
        growth = torch.log(far.clamp(min=1).float() / exact) / math.log(_FAR / exact) * (each - exact)
        bucket = torch.where(far < exact, far, (exact + growth.long()).clamp(max=each - 1))
        return (bucket + (distances > 0) * each).to(self._table.device)

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        yield f"{self._path}.weight", TensorSlot.into(self._table)
