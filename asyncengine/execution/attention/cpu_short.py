"""Plans of steps for the compiled kernels; short ones are made item by item, long ones of arrays (`cpu`).

Of a few rows, each of a token or of a short chunk, every call of numpy takes longer than the arithmetic in it. The
numbers are the same. Memory is one block for each group of layers, at one address for all steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.device.transfer import Int64Array
from asyncengine.kernels.api import attention_fields as fields
from asyncengine.kernels.api import team

FEW = 64
"""Tokens, rows and items of a plan up to which it is made here."""
ROWS = 64
"""Queries times the query heads of a kv head in a piece of a prompt chunk: as many as share a load of the keys."""
LOAD, START = 20, 1000
"""Cost of loading a key, of starting an item; 1: one query head and one key that is there, about a nanosecond."""
EVEN = 8
"""Long decode rows are split while one unit of work is more than a thread's share of the whole divided by this."""
_PIECES = 1024
"""Most pieces of a plan, less one."""
_ITEMS = fields.STEP_FIELDS
_JOINS = _ITEMS + FEW * fields.ITEM_FIELDS
_BOUNDS = _JOINS + FEW * 3
_NUMBERS = _BOUNDS + _PIECES


class ShortRows(NamedTuple):
    """The rows that a plan is made of: of each its first position, its tokens, and its first token in the batch."""

    starts: list[int]
    counts: list[int]
    begins: list[int]


class ShortItems(NamedTuple):
    """Items of a plan, `fields.ITEM_FIELDS` numbers each; their costs; and of results to be joined three each."""

    items: list[int]
    costs: list[int]
    joins: list[int]
    partials: int


class StepPlan:
    """The plan of one group of layers, at one address for all steps."""

    __slots__ = ("_fixed", "_held", "_numbers", "step")

    def __init__(self) -> None:
        self._numbers = np.zeros(_NUMBERS, dtype=np.int64)
        self.step: int = self._numbers.ctypes.data
        """The address of what the kernels are told of a step."""
        self._fixed = tuple(self.step + 8 * place for place in (_ITEMS, _BOUNDS, _JOINS))
        self._held: tuple[Any, ...] = ()
        """Arrays whose addresses were written down here: kept alive."""

    def fill(
        self, work: ShortItems, bounds: list[int], table: np.ndarray[Any, Any], slots: Any, partials: Any, scratch: Any,
        scratch_size: int,
    ) -> None:  # fmt: skip
        """`table` int32 [rows, pages], `slots` int64 [tokens], `partials` float32 and `scratch` bytes lie there until
        the next step."""
        numbers, items = self._numbers, work.items
        if not table.flags.c_contiguous or table.dtype != np.int32:
            table = np.ascontiguousarray(table, dtype=np.int32)
        self._held = (table, slots, partials, scratch)
        items_at, bounds_at, joins_at = self._fixed
        numbers[: _ITEMS + len(items)] = [
            items_at, len(work.costs), bounds_at, table.ctypes.data, table.shape[1], slots.data_ptr(), slots.numel(),
            joins_at, len(work.joins) // 3, partials.data_ptr(), scratch.data_ptr(), scratch_size, len(bounds) - 1,
            *items,
        ]  # fmt: skip
        numbers[_BOUNDS : _BOUNDS + len(bounds)] = bounds
        if work.joins:
            numbers[_JOINS : _JOINS + len(work.joins)] = work.joins

    def refer_to(
        self, items: Int64Array, joins: Int64Array, bounds: Int64Array, table: np.ndarray[Any, Any], slots: Any,
        partials: Any, scratch: Any, scratch_size: int,
    ) -> None:  # fmt: skip
        """Plan by items [items, ITEM_FIELDS], joins [joins, 3] and bounds [pieces + 1] that lie elsewhere."""
        table = np.ascontiguousarray(table, dtype=np.int32)
        self._held = (items, joins, bounds, table, slots, partials, scratch)
        self._numbers[:_ITEMS] = [
            items.ctypes.data, len(items), bounds.ctypes.data, table.ctypes.data, table.shape[1], slots.data_ptr(),
            slots.numel(), joins.ctypes.data, len(joins), partials.data_ptr(), scratch.data_ptr(), scratch_size,
            len(bounds) - 1,
        ]  # fmt: skip


def short_items(spec: LayerSpec, rows: ShortRows, threads: int) -> ShortItems | None:
    """Items to compute for the layers of `spec`, by so many threads. None: more than `FEW` items."""
    work = ShortItems([], [], [], 0)
    group = spec.num_heads // spec.num_kv_heads
    decodes = [row for row, count in enumerate(rows.counts) if count == 1]
    split = _worth_splitting(spec, rows, decodes, threads)
    partials = 0
    for row in decodes:
        token, position = rows.begins[row], rows.starts[row]
        begin, end = _first_seen(spec, position), position + 1
        first, last = begin // fields.SPLIT, position // fields.SPLIT
        if not split or first == last:
            work.items.extend((token, 1, position, row, begin, end, -1, 0))
            work.costs.append((end - begin) * (LOAD + group) + START)
            continue
        work.joins.extend((token, partials, last - first + 1))
        for part in range(first, last + 1):
            low, high = max(begin, part * fields.SPLIT), min(end, (part + 1) * fields.SPLIT)
            work.items.extend((token, 1, position, row, low, high, partials, 0))
            work.costs.append((high - low) * (LOAD + group) + START)
            partials += 1
    if len(decodes) < len(rows.counts):
        for row, count in enumerate(rows.counts):
            if count > 1:
                _add_chunk(spec, rows, row, work)
    return work._replace(partials=partials) if len(work.costs) <= FEW else None


def _worth_splitting(spec: LayerSpec, rows: ShortRows, decodes: Sequence[int], threads: int) -> bool:
    """True if whole decode rows are too few or too uneven for the threads. The results are the same."""
    if not decodes or threads == 1 or len(decodes) < len(rows.counts):
        return False
    keys = [rows.starts[row] + 1 - _first_seen(spec, rows.starts[row]) for row in decodes]
    return max(keys) * threads * EVEN > sum(keys) * spec.num_kv_heads


def _first_seen(spec: LayerSpec, position: int) -> int:
    """The first position that `position` sees (`base.first_seen`)."""
    first = spec.first if spec.window is None else max(position - spec.window + 1, spec.first)
    return first if spec.chunk is None else max(first, position // spec.chunk * spec.chunk)


def _add_chunk(spec: LayerSpec, rows: ShortRows, row: int, work: ShortItems) -> None:
    """One chunk, cut into pieces of a few queries; all of a piece are of one chunk of the layer's attention."""
    start, count, token = rows.starts[row], rows.counts[row], rows.begins[row]
    group = spec.num_heads // spec.num_kv_heads
    size = max(ROWS * spec.num_kv_heads // spec.num_heads, 1)
    offsets = list(range(0, count, size))
    if spec.chunk is not None:
        following = -(-(start + 1) // spec.chunk) * spec.chunk
        offsets = sorted({*offsets, *range(following - start, count, spec.chunk)})
    for begin, end in zip(offsets, (*offsets[1:], count), strict=True):
        low = _first_seen(spec, start + begin)
        high = min(start + end + spec.later, start + count)
        work.items.extend((token + begin, end - begin, start + begin, row, low, high, -1, 0))
        work.costs.append((high - low) * (LOAD + group * (end - begin)) + START)


def short_pieces(costs: Sequence[int], heads: int, threads: int, least: int) -> list[int] | None:
    """[pieces + 1] bounds of the units of each piece, which go head by head over all items; a piece costs `least`.
    None: there are more than fit."""
    ends, whole = [], 0
    for cost in costs:
        whole += cost
        ends.append(whole)
    total, items = whole * heads, len(costs)
    pieces = 1 if threads == 1 else max(1, min(threads * team.PER_THREAD, total // max(1, least), items * heads))
    if pieces >= _PIECES:
        return None
    bounds = []
    for piece in range(pieces + 1):
        head, rest = divmod(piece * total // pieces, whole)
        bounds.append(head * items + bisect_right(ends, rest))
    return bounds
