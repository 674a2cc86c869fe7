"""Plans of steps for the compiled kernels: which queries of which row meet which keys, and what is joined of that.

They are made item by item: of a few rows, each of a token or of a short chunk, every call of numpy takes longer than
the arithmetic in it, and of many rows the step itself takes a thousand times as long as its plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncengine.execution.attention.base import LayerSpec, StepView
from asyncengine.kernels.api import attention_fields as fields
from asyncengine.kernels.api import team

ROWS = 64
"""Queries times the query heads of a kv head in a piece of a prompt chunk: as many as share a load of the keys."""
LOAD, START = 20, 1000
"""Cost of loading a key, of starting an item; 1: one query head and one key that is there, about a nanosecond."""
EVEN = 8
"""Long decode rows are split while one unit of work is more than a thread's share of the whole divided by this."""


class StepRows(NamedTuple):
    """The rows that a plan is made of: of each its first position, its tokens, and its first token in the batch; and
    positions that attend to each other both ways (`StepView.blocks`)."""

    starts: list[int]
    counts: list[int]
    begins: list[int]
    blocks: Sequence[tuple[int, int, int]]

    @classmethod
    def of(cls, step: StepView) -> StepRows:
        return cls(step.starts.tolist(), step.counts.tolist(), step.qo_indptr.tolist(), step.blocks)


class PlannedItems(NamedTuple):
    """Items of a plan, `fields.ITEM_FIELDS` numbers each; their costs; and of results to be joined three each."""

    items: list[int]
    costs: list[int]
    joins: list[int]
    partials: int


KeptPlan = tuple[np.ndarray[Any, Any], tuple[Any, ...]]
"""A plan's numbers, and the arrays whose addresses are among them."""


class StepPlan:
    """The plan of one group of layers. What the kernels are told of a step lies at one address for all steps."""

    __slots__ = ("_held", "_numbers", "step")

    def __init__(self) -> None:
        self._numbers = np.zeros(fields.STEP_FIELDS, dtype=np.int64)
        self.step: int = self._numbers.ctypes.data
        """The address of what the kernels are told of a step."""
        self._held: tuple[Any, ...] = ()
        """Arrays whose addresses were written down here: kept alive."""

    def kept(self) -> KeptPlan:
        """A copy, for `resume`."""
        return self._numbers.copy(), self._held

    def resume(self, kept: KeptPlan) -> None:
        self._numbers[:], self._held = kept

    def fill(
        self, work: PlannedItems, bounds: list[int], table: np.ndarray[Any, Any], slots: Any, partials: Any,
        scratch: Any, scratch_size: int,
    ) -> None:  # fmt: skip
        """`table` int32 [rows, pages], `slots` int64 [tokens], `partials` float32 and `scratch` bytes lie there until
        the next step."""
        if not table.flags.c_contiguous or table.dtype != np.int32:
            table = np.ascontiguousarray(table, dtype=np.int32)
        lists = np.array([*work.items, *work.joins, *bounds], dtype=np.int64)
        self._held = (lists, table, slots, partials, scratch)
        items_at = lists.ctypes.data
        joins_at = items_at + 8 * len(work.items)
        self._numbers[:] = [
            items_at, len(work.costs), joins_at + 8 * len(work.joins), table.ctypes.data, table.shape[1],
            slots.data_ptr(), slots.numel(), joins_at, len(work.joins) // 3, partials.data_ptr(), scratch.data_ptr(),
            scratch_size, len(bounds) - 1,
        ]  # fmt: skip


def items_of(spec: LayerSpec, rows: StepRows, threads: int) -> PlannedItems:
    """Items to compute for the layers of `spec`, by `threads` threads."""
    work = PlannedItems([], [], [], 0)
    group = spec.num_heads // spec.num_kv_heads
    decodes = [
        (row, rows.begins[row], rows.starts[row], _first_seen(spec, rows.starts[row]))
        for row, count in enumerate(rows.counts)
        if count == 1
    ]
    split = len(decodes) == len(rows.counts) and _worth_splitting(spec, decodes, threads)
    partials = 0
    for row, token, position, begin in decodes:
        first, last = begin // fields.SPLIT, position // fields.SPLIT
        if not split or first == last:
            work.items.extend((token, 1, position, row, begin, position + 1, -1, 0))
            work.costs.append((position + 1 - begin) * (LOAD + group) + START)
            continue
        work.joins.extend((token, partials, last - first + 1))
        for part in range(first, last + 1):
            low, high = max(begin, part * fields.SPLIT), min(position + 1, (part + 1) * fields.SPLIT)
            work.items.extend((token, 1, position, row, low, high, partials, 0))
            work.costs.append((high - low) * (LOAD + group) + START)
            partials += 1
    if len(decodes) < len(rows.counts):
        for row, count in enumerate(rows.counts):
            if count > 1:
                _add_chunk(spec, rows, row, work)
    return work._replace(partials=partials)


def _worth_splitting(spec: LayerSpec, decodes: Sequence[tuple[int, ...]], threads: int) -> bool:
    """True if whole decode rows are too few or too uneven for the threads. The results are the same."""
    keys = [position + 1 - begin for *_, position, begin in decodes]
    return threads > 1 and max(keys) * threads * EVEN > sum(keys) * spec.num_kv_heads


def _first_seen(spec: LayerSpec, position: int) -> int:
    """The first position that `position` sees (`base.first_seen`)."""
    first = spec.first if spec.window is None else max(position - spec.window + 1, spec.first)
    return first if spec.chunk is None else max(first, position // spec.chunk * spec.chunk)


def _add_chunk(spec: LayerSpec, rows: StepRows, row: int, work: PlannedItems) -> None:
    """One prompt chunk, cut into pieces of a few queries; all of a piece are of one chunk of the layer's attention, and
    all or none of a block."""
    start, count, token = rows.starts[row], rows.counts[row], rows.begins[row]
    group = spec.num_heads // spec.num_kv_heads
    size = max(ROWS * spec.num_kv_heads // spec.num_heads, 1)
    cuts = set(range(0, count, size))
    if spec.chunk is not None:
        following = -(-(start + 1) // spec.chunk) * spec.chunk
        cuts.update(range(following - start, count, spec.chunk))
    blocks = [(max(first - start, 0), end - start) for own, first, end in rows.blocks if own == row]
    cuts.update(bound for block in blocks for bound in block if bound < count)
    offsets = sorted(cuts)
    for begin, end in zip(offsets, (*offsets[1:], count), strict=True):
        low = _first_seen(spec, start + begin)
        high, beyond = min(start + end + spec.later, start + count), 0
        for first, last in blocks:
            if first <= begin < last:
                high = beyond = start + last
        work.items.extend((token + begin, end - begin, start + begin, row, low, high, -1, beyond))
        work.costs.append((high - low) * (LOAD + group * (end - begin)) + START)


def even_pieces(costs: Sequence[int], heads: int, threads: int, least: int) -> list[int]:
    """[pieces + 1] bounds of the units of each piece, which go head by head over all items; a piece costs `least`."""
    ends, whole = [], 0
    for cost in costs:
        whole += cost
        ends.append(whole)
    total, items = whole * heads, len(costs)
    pieces = 1 if threads == 1 else team.even_count(total, max(1, least), items * heads, threads)
    bounds = []
    for piece in range(pieces + 1):
        head, rest = divmod(piece * total // pieces, whole)
        bounds.append(head * items + bisect_right(ends, rest))
    return bounds
