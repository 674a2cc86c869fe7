"""The factors of all device slots for one linear of the model; subclasses apply them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np
import torch

from asyncengine.execution.device.arena import Arena
from asyncengine.execution.device.transfer import Int64Array, send
from asyncengine.execution.layers.step import LoraTarget
from asyncengine.seams import LONG_ADAPTER_RUN

RANK_STEP = 8
"""Ranks are padded to multiples of this, with zeros: a padded factor adds exact zeros."""

_ROWS_AT_ONCE = 64
"""Rows that are scaled at once, which bounds the memory of their float32 copies."""

Segment = tuple[int, int, int]
"""(first row, end, slot) of neighbouring rows with one adapter. Slots count from 0 here."""


def padded_rank(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP


class LoraStack(ABC):
    """The factors of `slots` adapters, as wide as the largest rank so far, and not as `max_lora_rank`."""

    by_input: ClassVar[bool] = False
    """Whether A lies [slots, in, parts, rank] in memory, not [slots, parts, rank, in]. Embeddings' always do."""

    def __init__(
        self, target: LoraTarget, slots: int, rank: int, dtype: torch.dtype, device: torch.device,
        memory: Arena | None = None,
    ) -> None:  # fmt: skip
        """`memory`: where factors lie, on a CPU; None: wherever torch puts them."""
        self.target = target
        self.rank = padded_rank(rank)
        self.held: set[int] = set()
        """Slots that are not empty."""
        self._slots = slots
        self._ranks = np.zeros((slots, len(target.modules)), dtype=np.int64)
        """Ranks of the weights in each slot; beyond them there are zeros."""
        self._ends = list(accumulate(target.widths, initial=0))
        self._dtype, self._device, self._memory = dtype, device, memory
        self._allocate()

    @property
    def nbytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    def grow(self, rank: int) -> bool:
        """Make room for ranks up to `rank` and keep the factors. True if that moved the memory."""
        if rank <= self.rank:
            return False
        old_rank, a, b = self.rank, self._a, self._b
        self.rank = padded_rank(rank)
        self._allocate()
        self._a[:, :, :old_rank].copy_(a)
        self._b[:, :old_rank].copy_(b)
        return True

    def write(self, slot: int, index: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Put a [r, in] and b [outputs of module `index` on this device, r] into an empty slot; r is at most `rank`."""
        rank, device = a.shape[0], self._b.device
        self.held.add(slot)
        self._ranks[slot, index] = rank
        self._a[slot, index, :rank].copy_(send(a, device))
        self._b[slot, :rank, self._ends[index] : self._ends[index + 1]].copy_(send(b, device).T)

    def clear(self, slot: int) -> None:
        self.held.discard(slot)
        self._ranks[slot] = 0
        self._a[slot].zero_()
        self._b[slot].zero_()

    @abstractmethod
    def add(self, x: torch.Tensor, y: torch.Tensor, step: Any) -> None:
        """Add each row's delta to `y` [..., out] in place; x [..., in], or token ids for an embedding."""

    def _allocate(self) -> None:
        modules, inputs = len(self.target.modules), self.target.in_features
        if self.by_input or self.target.embedding:
            self._a = self._zeros(self._slots, inputs, modules, self.rank).permute(0, 2, 3, 1)
        else:
            self._a = self._zeros(self._slots, modules, self.rank, inputs)
        # A [slots, parts, rank, in] whatever its layout; B [slots, rank, out]: a row for each number of x @ A^T
        self._b = self._zeros(self._slots, self.rank, self._ends[-1])

    def _zeros(self, *shape: int) -> torch.Tensor:
        if self._memory is not None:
            return self._memory.zeros(shape, self._dtype)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _flat(self, x: torch.Tensor, y: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, in] (ids: [rows]) and y [rows, out], or an error if a module sees other rows than its step has."""
        x = x.reshape(-1) if self.target.embedding else x.reshape(-1, self.target.in_features)
        if len(x) != rows:
            raise RuntimeError(f"{self.target.modules[0][0]} got {len(x)} rows of a step of {rows}")
        return x, y.view(-1, self._ends[-1])

    def _add_segments(self, x: torch.Tensor, y: torch.Tensor, segments: tuple[Segment, ...]) -> None:
        """Two products for each segment, and one more for each further module of a merged linear: Punica's SGMV."""
        for begin, end, slot in segments:
            a, b = self._a[slot].flatten(0, 1).T, self._b[slot]
            down = a.index_select(0, x[begin:end]) if self.target.embedding else x[begin:end] @ a
            if len(self.target.modules) == 1:
                rows = y[begin:end]  # logits are float32 in a bfloat16 model
                rows.addmm_(down, b) if rows.dtype == b.dtype else rows.add_(down @ b)
                continue
            for index, (left, right) in enumerate(pairwise(self._ends)):
                down_slice = down[:, index * self.rank : (index + 1) * self.rank]
                y[begin:end, left:right].addmm_(down_slice, b[:, left:right])


# Low-rank deltas on CPU, where the compiled kernel does not serve (float16, embeddings): row by row for few rows of an
# adapter, by segment for many.
#
# A decoding step has one row, or a few, of each adapter: too little work for matrix products, whose calls cost more
# than the arithmetic. The delta of a row is a weighted sum of rows of a table, twice: of A^T with the row of x as
# weights, then of B with the result as weights. PyTorch's `embedding_bag` is exactly that: one call serves all rows and
# adapters (and merged linears), and reads only the factors that rows use.


class Stretch:
    """Neighbouring rows that are computed row by row: `slots` int64 [rows], -1 for none; `ranks` int64 [slots]."""

    def __init__(self, begin: int, slots: Int64Array, ranks: Int64Array) -> None:
        self.begin, self.end = begin, begin + len(slots)
        self._takes = slots >= 0
        self._own = slots[self._takes]
        self._ranks = ranks[self._own]
        self.rows = None if self._takes.all() else torch.from_numpy(np.flatnonzero(self._takes))
        """Rows with an adapter, counted from `begin`; None: all of them."""
        self._down: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._up: dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}

    def down(self, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices, offsets) into A^T [slots * inputs, ...] for the rows with an adapter."""
        if inputs not in self._down:
            indices = (self._own[:, None] * inputs + np.arange(inputs)).ravel()
            self._down[inputs] = _int32(indices), _int32(np.arange(len(self._own)) * inputs)
        return self._down[inputs]

    def first_rows(self, inputs: int) -> torch.Tensor:
        """int64: where each row's slot begins in A^T [slots * inputs, ...]."""
        return torch.from_numpy(self._own * inputs)

    def up(self, rank: int, modules: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(indices, offsets, pick) into B [slots * rank * blocks, ...], all rows' blocks in order.

        `modules`: the module of each block. `pick`: indices of the weights in x @ A^T, flat; None: all, in order.
        """
        key = rank, modules
        if key not in self._up:
            blocks, count = len(modules), len(self._own)
            steps, ranks = np.arange(rank), np.minimum(self._ranks, rank)
            used = np.broadcast_to(steps < ranks[:, None, None], (count, blocks, rank))
            cells = (self._own[:, None, None] * rank + steps) * blocks + np.arange(blocks)[:, None]
            pick = (np.arange(count)[:, None, None] * (max(modules) + 1) + np.array(modules)[:, None]) * rank + steps
            lengths = np.zeros(len(self._takes), dtype=np.int64)
            lengths[self._takes] = ranks
            offsets = np.cumsum([0, *np.repeat(lengths, blocks)])[:-1]
            is_all = used.all() and modules == tuple(range(blocks))
            self._up[key] = _int32(cells[used]), _int32(offsets), None if is_all else _int32(pick[used])
        return self._up[key]


class RowStep:
    """The rows of a step on CPU: `slots` int64 [rows], -1 for none. `ranks` int64 [slots] as padded."""

    def __init__(self, slots: Int64Array, ranks: Int64Array) -> None:
        self.size = len(slots)
        self.used = frozenset(np.unique(slots).tolist())
        self._slots, self._ranks = slots, ranks

    @cached_property
    def runs(self) -> tuple[tuple[Segment, ...], Sequence[Stretch]]:
        """Long runs of one adapter, and the stretches between them, in order. The compiled kernel never asks."""
        segments: list[Segment] = []
        stretches: list[Stretch] = []
        done = 0
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(self._slots)) + 1).tolist(), self.size]):
            if end - begin < LONG_ADAPTER_RUN:
                continue
            stretches += self._between(done, begin)
            done = end
            if self._slots[begin] >= 0:
                segments.append((begin, end, int(self._slots[begin])))
        return tuple(segments), stretches + self._between(done, self.size)

    def replace(self, slot: int, x: torch.Tensor, y: torch.Tensor, make: Callable[..., torch.Tensor]) -> None:
        """Replace the rows of y that use the slot by those of `make`."""
        rows = torch.from_numpy(np.flatnonzero(self._slots == slot))
        y[rows] = make(x[rows], y[rows])

    @cached_property
    def _adapted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows with an adapter, and their slots."""
        rows = np.flatnonzero(self._slots >= 0)
        return torch.from_numpy(rows), torch.from_numpy(self._slots[rows])

    def scale(self, y: torch.Tensor, factors: torch.Tensor, shifts: torch.Tensor) -> None:
        """Multiply each row of y that has an adapter by its slot's of `factors` [slots, out], and add its shifts."""
        for rows, slots in zip(*(torch.split(tensor, _ROWS_AT_ONCE) for tensor in self._adapted), strict=True):
            y[rows] = (y[rows].float() * factors[slots]).add_(shifts[slots]).to(y.dtype)

    @cached_property
    def groups(self) -> Any:
        """All rows by adapter, as the compiled kernel takes them."""
        from asyncengine.kernels.api import lora

        return lora.RowGroups(self._slots)

    def _between(self, begin: int, end: int) -> list[Stretch]:
        """The rows from `begin` to `end` as a stretch, trimmed of rows without an adapter; [] if none has one."""
        takes = begin + np.flatnonzero(self._slots[begin:end] >= 0)
        if not len(takes):
            return []
        first, last = int(takes[0]), int(takes[-1])
        return [Stretch(first, self._slots[first : last + 1], self._ranks)]


class RowStack(LoraStack):
    """Factors laid out as tables for `embedding_bag`."""

    by_input = True

    def add(self, x: torch.Tensor, y: torch.Tensor, step: RowStep) -> None:
        if self.held.isdisjoint(step.used):
            return
        x, y = self._flat(x, y, step.size)
        segments, stretches = step.runs
        self._add_segments(x, y, segments)
        for stretch in stretches:
            inputs = x[stretch.begin : stretch.end]
            if stretch.rows is not None:
                inputs = inputs.index_select(0, stretch.rows)
            if self.target.embedding:
                down = self._a_table.index_select(0, inputs + stretch.first_rows(self.target.in_features))
            else:
                down = _weighted_sums(self._a_table, *stretch.down(self.target.in_features), inputs.reshape(-1))
            indices, offsets, pick = stretch.up(self.rank, self._block_parts)
            weights = down.view(-1) if pick is None else down.view(-1).index_select(0, pick)
            delta = _weighted_sums(self._b_table, indices, offsets, weights)
            y[stretch.begin : stretch.end].view_as(delta).add_(delta)

    def _allocate(self) -> None:
        super()._allocate()
        sizes = self.target.widths
        width = math.gcd(*sizes)  # in blocks of one width, all outputs of a merged product are rows of one table
        self._block_parts = tuple(module for module, size in enumerate(sizes) for _ in range(size // width))
        self._a_table = self._a.permute(0, 3, 1, 2).view(-1, len(sizes) * self.rank)
        self._b_table = self._b.view(-1, width)


def _weighted_sums(
    table: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Row i: the sum of weights[j] * table[indices[j]] over j in offsets[i] .. offsets[i + 1]."""
    return torch.embedding_bag(table, indices, offsets, False, 0, False, weights)[0]


def _int32(numbers: Any) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(np.int32))
