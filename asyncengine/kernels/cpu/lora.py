"""Low-rank deltas: y += (x A^T) B of each row's own adapter (LoRA, Hu et al. 2021), for a product of one or more parts.

A decoding step has a row, or a few, of each adapter, so that the time is that of reading A and B: each is read once for
all rows of its adapter, as it lies in memory, and asked for ahead. Rows without an adapter cost nothing. Numbers are
float32 between the two products. Every sum is made in one order: a row's result depends neither on the rows beside it
nor on the number of threads (S-LoRA's and Punica's kernels do the same work on a GPU).

Memory: A [slots, parts, rank, inputs]; B [slots, rank, outputs], with the parts' outputs side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba.core import cgutils
from numpy.typing import NDArray

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.calls import call, compile_named, name_of, parallel_for
from asyncengine.kernels.cpu.intrinsics import INT64, TAG, emitted
from asyncengine.kernels.cpu.jit import array, narrow, pointer, serial_in_order, tag_of, widen
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of, reads_worth
from asyncengine.kernels.cpu.vectors import FLOAT, FLOATS, LANES, LINE, LONG, WORD, WORDS, load, size_of

# What is known of a product: int64 by place. A, B: addresses; RANKS: address of int64 [slots, parts], the rank of each
# factor that there is and 0 for the others; ENDS: address of int64 [parts + 1], where each part's outputs begin.
A, B, RANKS, ENDS, PARTS, RANK, INPUTS = range(7)
PRODUCT_FIELDS = 7
# What is known of a step. GROUPS: address of int64 [NUM_GROUPS, 3], the rows of one adapter each: where they begin in
# the list of rows, how many, slot; ROWS: address of that list, int64 [NUM_ROWS].
GROUPS, NUM_GROUPS, ROWS, NUM_ROWS = range(4)
STEP_FIELDS = 4
_FIRST, _COUNT, _SLOT = range(3)

_BLOCK = 8 * LANES
"""Outputs whose sums stay in registers."""
_TILE = 3
"""Rows whose sums for a block do: what is read of B is then in fewer turns."""
_EVEN = 4
"""Rows whose arithmetic takes as long as reading a factor."""
_WORK = 4
"""Bytes that could be read while one of a factor is: none follows another for long, and helpers must stay awake."""
_SIDE = 4
"""Rows of A, and of x, whose products are summed together, each product in a sum of its own."""
_CHUNK = 64
"""Rows of x that all of A is multiplied by before others: they stay in the second-level cache."""


class Factors:
    """A [slots, parts, rank, inputs] and B [slots, rank, outputs] of all adapters for one product, both contiguous.

    `widths` are the parts' outputs. `ranks` int64 [slots, parts] says how many rows of each factor there are; it is
    read at every call.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, ranks: NDArray[np.int64], widths: Sequence[int]) -> None:
        ends = np.cumsum([0, *widths], dtype=np.int64)
        self._held = (a, b, ranks, ends)  # an address keeps nothing where it is
        _, parts, rank, inputs = a.shape
        fields = (a.data_ptr(), b.data_ptr(), ranks.ctypes.data, ends.ctypes.data, parts, rank, inputs)
        self._record = np.array(fields, dtype=np.int64)
        self.address: int = self._record.ctypes.data
        self.across = parts * rank
        """Numbers of x A^T for a row."""


class RowGroups:
    """The rows of a step by adapter: `slots` int64 [rows], -1 for none."""

    def __init__(self, slots: NDArray[np.int64]) -> None:
        order = np.argsort(slots, kind="stable")
        rows = np.ascontiguousarray(order[np.searchsorted(slots[order], 0) :])
        used, firsts, counts = np.unique(slots[rows], return_index=True, return_counts=True)
        groups = np.ascontiguousarray(np.stack([firsts, counts, used], axis=1), dtype=np.int64)
        self.groups, self.rows = groups, rows
        """Groups int64 [adapters, 3], each with its first place in the list of rows, its number of rows and its slot;
        and that list, int64 [rows with an adapter]."""
        self.count = len(rows)
        """Rows with an adapter."""
        self._record = np.array([groups.ctypes.data, len(groups), rows.ctypes.data, len(rows)], dtype=np.int64)
        self.address: int = self._record.ctypes.data


def add_deltas(x: torch.Tensor, y: torch.Tensor, factors: Factors, rows: RowGroups) -> None:
    """Add each row's delta to y [rows, outputs], float32 or of x's type; x [rows, inputs] is of the factors' type.

    Both are contiguous.
    """
    down = np.empty(rows.count * factors.across, dtype=np.float32)
    add_low_rank(
        x.data_ptr(), y.data_ptr(), factors.address, rows.address, down.ctypes.data, tag_of(x.dtype),
        tag_of(y.dtype), use_team(),
    )  # fmt: skip


def add_table_deltas(x: torch.Tensor, y: torch.Tensor, index: int, records: tuple[int, int, int]) -> None:
    """`add_deltas` for product `index` of a table of addresses of `Factors`, if it has any there.

    `records`: the addresses of the table, of a step's `RowGroups` and of memory for the numbers between the factors.
    """
    add_adapters(x.data_ptr(), y.data_ptr(), records[0], index, *records[1:], tag_of(x.dtype), use_team())


def compile_for(dtype: torch.dtype) -> None:
    """Compile what rows with adapters need, which models without any never do."""
    kind, whole = numba.typeof(tag_of(dtype)), numba.types.int64
    compile_named(name_of(add_low_rank, (whole,) * 5 + (kind, kind, whole)))
    compile_named(f"{__name__}:add_adapters:({'int64, ' * 6}{kind}, int64)")


@serial_in_order
def add_adapters(
    x: int, y: int, products: int, index: int, rows: int, memory: int, kind: np.generic, team: int
) -> None:
    """`add_table_deltas` by address."""
    factors = array(pointer(products, np.int64(0)), (index + 1,))[index]
    if factors != 0:
        call(add_low_rank, (x, y, factors, rows, memory, kind, kind, team))


@serial_in_order
def add_low_rank(
    x: int, y: int, product: int, step: int, down: int, kind: np.generic, out_kind: np.generic, team: int
) -> None:
    """`add_deltas` by address. `down`: memory for float32 [NUM_ROWS, PARTS * RANK]."""
    known = array(pointer(product, np.int64(0)), (PRODUCT_FIELDS,))
    given = array(pointer(step, np.int64(0)), (STEP_FIELDS,))
    count, parts, size = given[NUM_GROUPS], known[PARTS], size_of(kind)
    groups = array(pointer(given[GROUPS], np.int64(0)), (count, 3))
    ends = array(pointer(known[ENDS], np.int64(0)), (parts + 1,))
    reads, writes, blocks, chunks = 0, 0, 0, 0
    for group in range(count):
        worth = reads_worth(groups[group, _COUNT], _EVEN) * size * _WORK
        chunks += (groups[group, _COUNT] + _CHUNK - 1) // _CHUNK
        ranks = array(pointer(known[RANKS] + groups[group, _SLOT] * parts * 8, np.int64(0)), (parts,))
        for part in range(parts):
            reads += ranks[part] * known[INPUTS] * worth
            writes += ranks[part] * (ends[part + 1] - ends[part]) * worth
    if reads == 0:
        return
    for part in range(parts):
        blocks += (ends[part + 1] - ends[part] + _BLOCK - 1) // _BLOCK
    sides = chunks * parts * ((known[RANK] + _SIDE - 1) // _SIDE)
    parallel_for(_down_part, team, pieces_of(reads, sides, team), (x, product, step, down, sides, kind))
    pieces = pieces_of(writes, count * blocks, team)
    parallel_for(_up_part, team, pieces, (y, product, step, down, blocks, kind, out_kind))


@serial_in_order
def _down_part(
    piece: int, pieces: int, worker: int, x: int, product: int, step: int, down: int, total: int, kind: np.generic
) -> None:
    """x A^T: of all groups, chunks of rows, parts and ranks, those of one of `pieces`. `total`: the number of sides of
    all groups: chunks of rows, times a few rows of A each."""
    known = array(pointer(product, np.int64(0)), (PRODUCT_FIELDS,))
    given = array(pointer(step, np.int64(0)), (STEP_FIELDS,))
    groups = array(pointer(given[GROUPS], np.int64(0)), (given[NUM_GROUPS], 3))
    parts, rank, inputs = known[PARTS], known[RANK], known[INPUTS]
    across, length, sides = parts * rank, inputs * size_of(kind), (rank + _SIDE - 1) // _SIDE
    begin, end, done = total * piece // pieces, total * (piece + 1) // pieces, 0
    for group in range(given[NUM_GROUPS]):
        first, count, slot = groups[group, _FIRST], groups[group, _COUNT], groups[group, _SLOT]
        units = (count + _CHUNK - 1) // _CHUNK * parts * sides
        ranks = array(pointer(known[RANKS] + slot * parts * 8, np.int64(0)), (parts,))
        for unit in range(max(begin - done, 0), min(end - done, units)):
            chunk = unit // (parts * sides)
            part = unit // sides - chunk * parts
            place = unit % sides * _SIDE
            if place < ranks[part]:
                start = first + chunk * _CHUNK
                _multiply_down(
                    x, length, given[ROWS], start, min(start + _CHUNK, first + count),
                    known[A] + (slot * across + part * rank + place) * length, min(_SIDE, ranks[part] - place), inputs,
                    down + (part * rank + place) * 4, across * 4, kind,
                )  # fmt: skip
        done += units


@serial_in_order
def _multiply_down(
    x: int, length: int, rows: int, first: int, end: int, factor: int, sides: int, inputs: int, down: int, across: int,
    kind: np.generic,
) -> None:  # fmt: skip
    """Rows [first, end) of the list by `sides` rows of A, at most `_SIDE`, into `down`, `across` bytes a row."""
    index = first
    while index < end:
        place, target = rows + index * 8, down + index * across
        if sides < _SIDE:
            for side in range(sides):
                _dot(x, length, place, factor + side * length, inputs, target + side * 4, across, kind)
        elif end - index >= _SIDE:
            _dots_of_rows(x, length, place, factor, inputs, target, across, kind)
            index += _SIDE
            continue
        else:
            _dots_of_row(x, length, place, factor, inputs, target, across, kind)
        index += 1


@serial_in_order
def _up_part(
    piece: int, pieces: int, worker: int, y: int, product: int, step: int, down: int, blocks: int, kind: np.generic,
    out_kind: np.generic,
) -> None:  # fmt: skip
    """y += down B: of all groups and blocks of outputs, those of one of `pieces`."""
    known = array(pointer(product, np.int64(0)), (PRODUCT_FIELDS,))
    given = array(pointer(step, np.int64(0)), (STEP_FIELDS,))
    groups = array(pointer(given[GROUPS], np.int64(0)), (given[NUM_GROUPS], 3))
    parts, rank = known[PARTS], known[RANK]
    ends = array(pointer(known[ENDS], np.int64(0)), (parts + 1,))
    total = given[NUM_GROUPS] * blocks
    for unit in range(total * piece // pieces, total * (piece + 1) // pieces):
        group = unit // blocks
        block, part = unit - group * blocks, 0
        while block >= (ends[part + 1] - ends[part] + _BLOCK - 1) // _BLOCK:
            block -= (ends[part + 1] - ends[part] + _BLOCK - 1) // _BLOCK
            part += 1
        slot = groups[group, _SLOT]
        ranks = array(pointer(known[RANKS] + slot * parts * 8, np.int64(0)), (parts,))
        if ranks[part] > 0:
            begin = ends[part] + block * _BLOCK
            end = min(begin + _BLOCK, ends[part + 1])
            factor = known[B] + slot * rank * ends[parts] * size_of(kind)
            _add_block(
                y, factor, down + part * rank * 4, given[ROWS], groups[group, _FIRST], groups[group, _COUNT],
                ranks[part], begin, end, ends[parts], parts * rank, kind, out_kind,
            )  # fmt: skip


@serial_in_order
def _add_block(
    y: int, factor: int, down: int, rows: int, first: int, count: int, rank: int, begin: int, end: int, outputs: int,
    across: int, kind: np.generic, out_kind: np.generic,
) -> None:  # fmt: skip
    """Outputs [begin, end) of one part, for rows [first, first + count) of the list."""
    size, out_size = size_of(kind), size_of(out_kind)
    source, target, row, length = factor + begin * size, y + begin * out_size, outputs * size, outputs * out_size
    index = first
    while index < first + count:
        weights, place = down + index * across * 4, rows + index * 8
        if end - begin == _BLOCK and first + count - index >= _TILE:
            _add_tile(weights, across * 4, rank, source, row, target, length, place, kind, out_kind)
            index += _TILE
            continue
        if end - begin == _BLOCK:
            _add_row(weights, across * 4, rank, source, row, target, length, place, kind, out_kind)
        else:
            _add_rest(weights, rank, source, row, target, length, place, end - begin, kind, out_kind)
        index += 1


@serial_in_order
def _add_rest(
    weights: int, rank: int, factor: int, stride: int, y: int, length: int, place: int, count: int, kind: np.generic,
    out_kind: np.generic,
) -> None:  # fmt: skip
    """`count` outputs of one row: fewer than a block."""
    size, out_size = size_of(kind), size_of(out_kind)
    whole = count // LANES * LANES
    for begin in range(0, whole, LANES):
        _add_vector(
            weights, 0, rank, factor + begin * size, stride, y + begin * out_size, length, place, kind, out_kind
        )
    numbers = array(pointer(weights, np.float32(0)), (rank,))
    row = array(pointer(place, np.int64(0)), (1,))[0]
    results = array(pointer(y + row * length, out_kind), (count,))
    for index in range(whole, count):
        total = np.float32(0)
        for turn in range(rank):
            total += numbers[turn] * widen(array(pointer(factor + turn * stride, kind), (count,))[index])
        results[index] = narrow(widen(results[index]) + total, out_kind)


def _write_dots(
    builder: Any, x: Any, length: Any, places: Any, factor: Any, count: Any, target: Any, across: Any, kind: Any, *,
    rows: int, sides: int,
) -> None:  # fmt: skip
    """Multiply `count` numbers of each of `rows` rows by those of each of `sides` rows of a factor; every sum of
    products is made in one order.

    Rows of x and of the factor are `length` bytes apart, those of float32 at `target` `across`; the rows' numbers are
    int64 at `places`.
    """
    size, form = kind.bitwidth // 8, vectors.ACCUMULATE[kind]
    zero, none = vectors.constant(FLOATS, 0.0), LONG(0)
    numbers = [load(builder, builder.add(places, LONG(row * 8)), LONG) for row in range(rows)]
    left = [builder.add(x, builder.mul(number, length)) for number in numbers]
    right = [vectors.at(builder, factor, length, side, none) for side in range(sides)]
    following = builder.mul(length, LONG(sides))
    cells = [(row, side) for row in range(rows) for side in range(sides)]
    sums = {cell: cgutils.alloca_once_value(builder, zero) for cell in cells}
    lines = builder.udiv(count, LONG(LINE // size))
    with cgutils.for_range(builder, lines) as loop:
        offset = builder.mul(loop.index, LONG(LINE))
        own = [load(builder, builder.add(base, offset), WORDS) for base in left]
        for side, base in enumerate(right):
            place = builder.add(base, offset)
            words = load(builder, place, WORDS)
            vectors.prefetch(builder, builder.add(place, following))
            for row in range(rows):
                builder.store(form(builder, own[row], words, builder.load(sums[row, side])), sums[row, side])
    totals = {}
    for row in range(rows):
        four = [builder.load(sums[row, side]) if side < sides else zero for side in range(4)]
        found = vectors.sum_lanes(builder, four)
        for side in range(sides):
            totals[row, side] = cgutils.alloca_once_value(builder, builder.extract_element(found, WORD(side)))
    done = builder.mul(lines, LONG(LINE))
    with cgutils.for_range(builder, builder.sub(count, builder.mul(lines, LONG(LINE // size)))) as loop:
        offset = builder.add(done, builder.mul(loop.index, LONG(size)))
        own, other = (
            [vectors.read(builder, builder.add(base, offset), kind, one=True) for base in bases]
            for bases in (left, right)
        )
        for row, side in cells:
            product = builder.fmul(own[row], other[side])
            builder.store(builder.fadd(builder.load(totals[row, side]), product), totals[row, side])
    for row, side in cells:
        vectors.store(
            builder, builder.load(totals[row, side]), vectors.at(builder, target, across, row, LONG(side * 4))
        )


_dot, _dots_of_row, _dots_of_rows = (
    emitted(*[INT64] * 7, TAG, rows=rows, sides=sides)(_write_dots)
    for rows, sides in ((1, 1), (1, _SIDE), (_SIDE, _SIDE))
)


def _write_add(
    builder: Any, weights: Any, across: Any, rank: Any, factor: Any, stride: Any, y: Any, length: Any, places: Any,
    kind: Any, out_kind: Any, *, rows: int, count: int,
) -> None:  # fmt: skip
    """Add, to 16 * `count` numbers of each of `rows` rows, the sum of `rank` rows of a factor, each times its float32
    weight.

    Bytes from row to row: `across` of weights, `stride` of the factor, `length` of y, whose rows' numbers are int64 at
    `places`.
    """
    size, out_size = kind.bitwidth // 8, out_kind.bitwidth // 8
    zero = vectors.constant(FLOATS, 0.0)
    cells = [(row, place) for row in range(rows) for place in range(count)]
    sums = {cell: cgutils.alloca_once_value(builder, zero) for cell in cells}
    with cgutils.for_range(builder, rank) as loop:
        offset = builder.mul(loop.index, LONG(4))
        own = [load(builder, vectors.at(builder, weights, across, row, offset), FLOAT) for row in range(rows)]
        values = [vectors.splat(builder, weight) for weight in own]
        source = builder.add(factor, builder.mul(loop.index, stride))
        for line in range(count * LANES * size // LINE):  # of the block that follows
            vectors.prefetch(builder, builder.add(source, LONG(count * LANES * size + line * LINE)))
        for place in range(count):
            numbers = vectors.read(builder, builder.add(source, LONG(place * LANES * size)), kind)
            for row in range(rows):
                total = sums[row, place]
                builder.store(vectors.multiply_add(builder, values[row], numbers, builder.load(total)), total)
    for row in range(rows):
        number = load(builder, builder.add(places, LONG(row * 8)), LONG)
        begin = builder.add(y, builder.mul(number, length))
        for place in range(count):
            target = builder.add(begin, LONG(place * LANES * out_size))
            found = builder.fadd(vectors.read(builder, target, out_kind), builder.load(sums[row, place]))
            vectors.write(builder, found, target, out_kind)


_add_vector, _add_row, _add_tile = (
    emitted(*[INT64] * 8, TAG, TAG, rows=rows, count=count)(_write_add)
    for rows, count in ((1, 1), (1, _BLOCK // LANES), (_TILE, _BLOCK // LANES))
)
