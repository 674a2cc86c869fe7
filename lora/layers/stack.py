"""The factors of all device slots for one product of the model; how they are applied is up to subclasses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch

from asyncengine.execution.device.arena import Arena
from asyncengine.execution.device.transfer import send
from asyncengine.execution.layers.places import Place

RANK_STEP = 8
"""Ranks are padded to multiples of this, with zeros: a padded factor adds exact zeros."""

Segment = tuple[int, int, int]
"""(first row, end, slot) of neighbouring rows with one adapter. Slots count from 0 here."""


def padded_rank(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP


class LoraStack(ABC):
    """The factors of `slots` adapters. As wide as the largest rank so far, however large ranks may be."""

    by_input: ClassVar[bool] = False
    """Whether A lies [slots, in, parts, rank] in memory, not [slots, parts, rank, in]. Embeddings' always do."""

    def __init__(
        self, place: Place, slots: int, rank: int, dtype: torch.dtype, device: torch.device, memory: Arena | None = None
    ) -> None:
        """`memory`: where factors lie, on a CPU; None: wherever torch puts them."""
        self.place = place
        self.rank = padded_rank(rank)
        self.held: set[int] = set()
        """Slots that something was written into since they were cleared."""
        self._slots = slots
        self._ends = list(accumulate(place.widths, initial=0))
        self._dtype, self._device, self._memory = dtype, device, memory
        self._allocate()

    @property
    def nbytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    @property
    def out_features(self) -> int:
        return self._ends[-1]

    def grow(self, rank: int) -> bool:
        """Hold ranks up to `rank`, with what is there. True: in other memory than before."""
        if rank <= self.rank:
            return False
        old, a, b = self.rank, self._a, self._b
        self.rank = padded_rank(rank)
        self._allocate()
        self._a[:, :, :old].copy_(a)
        self._b[:, :old].copy_(b)
        return True

    def write(self, slot: int, part: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Put a [r, in] and b [the part's outputs here, r] into an empty slot; r is at most `rank`."""
        rank, device = a.shape[0], self._b.device
        self.held.add(slot)
        self._a[slot, part, :rank].copy_(send(a, device))
        self._b[slot, :rank, self._ends[part] : self._ends[part + 1]].copy_(send(b, device).T)

    def clear(self, slot: int) -> None:
        self.held.discard(slot)
        self._a[slot].zero_()
        self._b[slot].zero_()

    @abstractmethod
    def add(self, x: torch.Tensor, y: torch.Tensor, step: Any) -> None:
        """Add each row's delta to `y` [..., out] in place; x [..., in], or token ids for an embedding."""

    def _allocate(self) -> None:
        parts, inputs = len(self.place.parts), self.place.in_features
        if self.by_input or self.place.embedding:
            self._a = self._zeros(self._slots, inputs, parts, self.rank).permute(0, 2, 3, 1)
        else:
            self._a = self._zeros(self._slots, parts, self.rank, inputs)
        # A [slots, parts, rank, in] whatever its layout; B [slots, rank, out]: a row for each number of x @ A^T
        self._b = self._zeros(self._slots, self.rank, self.out_features)

    def _zeros(self, *shape: int) -> torch.Tensor:
        if self._memory is not None:
            return self._memory.zeros(shape, self._dtype)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _flat(self, x: torch.Tensor, y: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, in] (ids: [rows]) and y [rows, out], or an error if a module sees other rows than its step has."""
        x = x.reshape(-1) if self.place.embedding else x.reshape(-1, self.place.in_features)
        if len(x) != rows:
            raise RuntimeError(f"{self.place.parts[0][0]} got {len(x)} rows of a step of {rows}")
        return x, y.view(-1, self.out_features)

    def _add_segments(self, x: torch.Tensor, y: torch.Tensor, segments: tuple[Segment, ...]) -> None:
        """Two products for each segment (and one more for each further part): the segments of Punica's SGMV."""
        for begin, end, slot in segments:
            a, b = self._a[slot].flatten(0, 1).T, self._b[slot]
            down = a.index_select(0, x[begin:end]) if self.place.embedding else x[begin:end] @ a
            if len(self.place.parts) == 1:
                rows = y[begin:end]  # logits are float32 in a bfloat16 model
                rows.addmm_(down, b) if rows.dtype == b.dtype else rows.add_(down @ b)
                continue
            for part, (left, right) in enumerate(pairwise(self._ends)):
                part_of_down = down[:, part * self.rank : (part + 1) * self.rank]
                y[begin:end, left:right].addmm_(part_of_down, b[:, left:right])
