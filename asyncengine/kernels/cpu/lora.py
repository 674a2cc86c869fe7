"""Low-rank deltas: y += (x A^T) B of each row's own adapter (LoRA, Hu et al. 2021), for one or more merged matrices.

A decoding step has a row, or a few, of each adapter, so that the time is that of reading A and B: each is read once for
all rows of its adapter, as it lies in memory, and prefetched. Rows without an adapter cost nothing. Numbers are
float32 between the two products. Every sum is made in one order: a row's result depends neither on the rows beside it
nor on the number of threads (S-LoRA's and Punica's kernels do the same work on a GPU).

Memory: A [slots, matrices, rank, inputs]; B [slots, rank, outputs], with the matrices' outputs side by side.
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

# Indices of a product's record of int64. A, B: addresses; RANKS: address of int64 [slots, matrices], the rank of each
# factor, 0 where an adapter has none; ENDS: address of int64 [matrices + 1], where each matrix's outputs begin.
A, B, RANKS, ENDS, MATRICES, RANK, INPUTS = range(7)
PRODUCT_FIELDS = 7
# Indices of a step's record of int64. GROUPS: address of int64 [NUM_GROUPS, 3], the rows of one adapter each: where
# they begin in the list of rows, their number, the adapter's slot; ROWS: address of that list, int64 [NUM_ROWS].
GROUPS, NUM_GROUPS, ROWS, NUM_ROWS = range(4)
STEP_FIELDS = 4
_FIRST, _COUNT, _SLOT = range(3)

_BLOCK = 8 * LANES
"""Outputs whose sums stay in registers."""
_TILE = 3
"""Rows whose sums for a block stay there together, so that B is read fewer times."""
_EVEN = 4
"""Rows whose arithmetic takes as long as reading a factor."""
_WORK = 4
"""Bytes that could be read while one of a factor is: reads are short and scattered, and helpers must stay awake."""
_SIDE = 4
"""Rows of A, and of x, whose products are summed together, each product in a sum of its own."""
_CHUNK = 64
"""Rows of x that are multiplied by all of A before the next ones, as they stay in the second-level cache."""


class Factors:
    """A [slots, parts, rank, inputs] and B [slots, rank, outputs] of all adapters for one product, both contiguous.

    `widths` are the matrices' outputs. `ranks` int64 [slots, matrices], the rows of each factor that are used, is read
    at every call.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, ranks: NDArray[np.int64], widths: Sequence[int]) -> None:
        ends = np.cumsum([0, *widths], dtype=np.int64)
        self._owners = (a, b, ranks, ends)  # an address does not keep memory alive
        _, matrices, rank, inputs = a.shape
        fields = (a.data_ptr(), b.data_ptr(), ranks.ctypes.data, ends.ctypes.data, matrices, rank, inputs)
        self._record = np.array(fields, dtype=np.int64)
        self.address: int = self._record.ctypes.data
        self.across = matrices * rank
        """Numbers of x A^T for a row."""


class RowGroups:
    """The rows of a step by adapter: `slots` int64 [rows], -1 for none."""

    def __init__(self, slots: NDArray[np.int64]) -> None:
        order = np.argsort(slots, kind="stable")
        rows = np.ascontiguousarray(order[np.searchsorted(slots[order], 0) :])
        used, firsts, counts = np.unique(slots[rows], return_index=True, return_counts=True)
        groups = np.ascontiguousarray(np.stack([firsts, counts, used], axis=1), dtype=np.int64)
        self.groups, self.rows = groups, rows
        """Groups int64 [adapters, 3], each with its first index in the list of rows, its number of rows and its slot;
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
    """`add_deltas` for product `index` of a table of addresses of `Factors`; nothing if the address there is 0.

    `records`: the addresses of the table, of a step's `RowGroups` and of memory for the numbers between the factors.
    """
    add_adapters(x.data_ptr(), y.data_ptr(), records[0], index, *records[1:], tag_of(x.dtype), use_team())


def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernels for rows with adapters, which a model without adapters never calls."""
    tag, int64 = numba.typeof(tag_of(dtype)), numba.types.int64
    compile_named(name_of(add_low_rank, (int64,) * 5 + (tag, tag, int64)))
    compile_named(f"{__name__}:add_adapters:({'int64, ' * 6}{tag}, int64)")


@serial_in_order
def add_adapters(
    x: int, y: int, products: int, index: int, rows: int, memory: int, dtype: np.generic, team: int
) -> None:
    """`add_table_deltas` by address."""
    factors = array(pointer(products, np.int64(0)), (index + 1,))[index]
    if factors != 0:
        call(add_low_rank, (x, y, factors, rows, memory, dtype, dtype, team))


@serial_in_order
def add_low_rank(
    x: int, y: int, product: int, step: int, down: int, dtype: np.generic, out_dtype: np.generic, team: int
) -> None:
    """`add_deltas` by address. `down`: memory for float32 [NUM_ROWS, PARTS * RANK]."""
    fields = array(pointer(product, np.int64(0)), (PRODUCT_FIELDS,))
    step_fields = array(pointer(step, np.int64(0)), (STEP_FIELDS,))
    count, matrices, size = step_fields[NUM_GROUPS], fields[MATRICES], size_of(dtype)
    groups = array(pointer(step_fields[GROUPS], np.int64(0)), (count, 3))
    ends = array(pointer(fields[ENDS], np.int64(0)), (matrices + 1,))
    reads, writes, blocks, chunks = 0, 0, 0, 0
    for group in range(count):
        worth = reads_worth(groups[group, _COUNT], _EVEN) * size * _WORK
        chunks += (groups[group, _COUNT] + _CHUNK - 1) // _CHUNK
        ranks = array(pointer(fields[RANKS] + groups[group, _SLOT] * matrices * 8, np.int64(0)), (matrices,))
        for matrix in range(matrices):
            reads += ranks[matrix] * fields[INPUTS] * worth
            writes += ranks[matrix] * (ends[matrix + 1] - ends[matrix]) * worth
    if reads == 0:
        return
    for matrix in range(matrices):
        blocks += (ends[matrix + 1] - ends[matrix] + _BLOCK - 1) // _BLOCK
    sides = chunks * matrices * ((fields[RANK] + _SIDE - 1) // _SIDE)
    parallel_for(_down_piece, team, pieces_of(reads, sides, team), (x, product, step, down, sides, dtype))
    pieces = pieces_of(writes, count * blocks, team)
    parallel_for(_up_piece, team, pieces, (y, product, step, down, blocks, dtype, out_dtype))


@serial_in_order
def _down_piece(
    piece: int, pieces: int, worker: int, x: int, product: int, step: int, down: int, total: int, dtype: np.generic
) -> None:
    """x A^T: of all groups, chunks of rows, parts and ranks, those of one of `pieces`. `total`: the number of sides of
    all groups: chunks of rows, times a few rows of A each."""
    fields = array(pointer(product, np.int64(0)), (PRODUCT_FIELDS,))
    step_fields = array(pointer(step, np.int64(0)), (STEP_FIELDS,))
    groups = array(pointer(step_fields[GROUPS], np.int64(0)), (step_fields[NUM_GROUPS], 3))
    matrices, rank, inputs = fields[MATRICES], fields[RANK], fields[INPUTS]
    across, length, sides = matrices * rank, inputs * size_of(dtype), (rank + _SIDE - 1) // _SIDE
    begin, end, done = total * piece // pieces, total * (piece + 1) // pieces, 0
    for group in range(step_fields[NUM_GROUPS]):
        first, count, slot = groups[group, _FIRST], groups[group, _COUNT], groups[group, _SLOT]
        units = (count + _CHUNK - 1) // _CHUNK * matrices * sides
        ranks = array(pointer(fields[RANKS] + slot * matrices * 8, np.int64(0)), (matrices,))
        for unit in range(max(begin - done, 0), min(end - done, units)):
            chunk = unit // (matrices * sides)
            matrix = unit // sides - chunk * matrices
            first_rank = unit % sides * _SIDE
            if first_rank < ranks[matrix]:
                start = first + chunk * _CHUNK
                _multiply_down(
                    x, length, step_fields[ROWS], start, min(start + _CHUNK, first + count),
                    fields[A] + (slot * across + matrix * rank + first_rank) * length,
                    min(_SIDE, ranks[matrix] - first_rank), inputs, down + (matrix * rank + first_rank) * 4, across * 4,
                    dtype,
                )  # fmt: skip
        done += units


@serial_in_order
def _multiply_down(
    x: int, length: int, rows: int, first: int, end: int, factor: int, sides: int, inputs: int, down: int, across: int,
    dtype: np.generic,
) -> None:  # fmt: skip
    """Rows [first, end) of the list by `sides` rows of A, at most `_SIDE`, into `down`, `across` bytes a row."""
    index = first
    while index < end:
        entry, target = rows + index * 8, down + index * across
        if sides < _SIDE:
            for side in range(sides):
                _dot(x, length, entry, factor + side * length, inputs, target + side * 4, across, dtype)
        elif end - index >= _SIDE:
            _dots_of_rows(x, length, entry, factor, inputs, target, across, dtype)
            index += _SIDE
            continue
        else:
            _dots_of_row(x, length, entry, factor, inputs, target, across, dtype)
        index += 1


@serial_in_order
def _up_piece(
    piece: int, pieces: int, worker: int, y: int, product: int, step: int, down: int, blocks: int, dtype: np.generic,
    out_dtype: np.generic,
) -> None:  # fmt: skip
    """y += down B: of all groups and blocks of outputs, those of one of `pieces`."""
    fields = array(pointer(product, np.int64(0)), (PRODUCT_FIELDS,))
    step_fields = array(pointer(step, np.int64(0)), (STEP_FIELDS,))
    groups = array(pointer(step_fields[GROUPS], np.int64(0)), (step_fields[NUM_GROUPS], 3))
    matrices, rank = fields[MATRICES], fields[RANK]
    ends = array(pointer(fields[ENDS], np.int64(0)), (matrices + 1,))
    total = step_fields[NUM_GROUPS] * blocks
    for unit in range(total * piece // pieces, total * (piece + 1) // pieces):
        group = unit // blocks
        block, matrix = unit - group * blocks, 0
        while block >= (ends[matrix + 1] - ends[matrix] + _BLOCK - 1) // _BLOCK:
            block -= (ends[matrix + 1] - ends[matrix] + _BLOCK - 1) // _BLOCK
            matrix += 1
        slot = groups[group, _SLOT]
        ranks = array(pointer(fields[RANKS] + slot * matrices * 8, np.int64(0)), (matrices,))
        if ranks[matrix] > 0:
            begin = ends[matrix] + block * _BLOCK
            end = min(begin + _BLOCK, ends[matrix + 1])
            factor = fields[B] + slot * rank * ends[matrices] * size_of(dtype)
            _add_block(
                y, factor, down + matrix * rank * 4, step_fields[ROWS], groups[group, _FIRST], groups[group, _COUNT],
                ranks[matrix], begin, end, ends[matrices], matrices * rank, dtype, out_dtype,
            )  # fmt: skip


@serial_in_order
def _add_block(
    y: int, factor: int, down: int, rows: int, first: int, count: int, rank: int, begin: int, end: int, outputs: int,
    across: int, dtype: np.generic, out_dtype: np.generic,
) -> None:  # fmt: skip
    """Add to outputs [begin, end) of one matrix, for rows [first, first + count) of the list."""
    size, out_size = size_of(dtype), size_of(out_dtype)
    source, target, row, length = factor + begin * size, y + begin * out_size, outputs * size, outputs * out_size
    index = first
    while index < first + count:
        weights, entry = down + index * across * 4, rows + index * 8
        if end - begin == _BLOCK and first + count - index >= _TILE:
            _add_tile(weights, across * 4, rank, source, row, target, length, entry, dtype, out_dtype)
            index += _TILE
            continue
        if end - begin == _BLOCK:
            _add_row(weights, across * 4, rank, source, row, target, length, entry, dtype, out_dtype)
        else:
            _add_rest(weights, rank, source, row, target, length, entry, end - begin, dtype, out_dtype)
        index += 1


@serial_in_order
def _add_rest(
    weights: int, rank: int, factor: int, stride: int, y: int, length: int, entry: int, count: int, dtype: np.generic,
    out_dtype: np.generic,
) -> None:  # fmt: skip
    """Add to `count` outputs of one row, fewer than a block."""
    size, out_size = size_of(dtype), size_of(out_dtype)
    whole = count // LANES * LANES
    for begin in range(0, whole, LANES):
        _add_vector(
            weights, 0, rank, factor + begin * size, stride, y + begin * out_size, length, entry, dtype, out_dtype
        )
    numbers = array(pointer(weights, np.float32(0)), (rank,))
    row = array(pointer(entry, np.int64(0)), (1,))[0]
    results = array(pointer(y + row * length, out_dtype), (count,))
    for index in range(whole, count):
        total = np.float32(0)
        for turn in range(rank):
            total += numbers[turn] * widen(array(pointer(factor + turn * stride, dtype), (count,))[index])
        results[index] = narrow(widen(results[index]) + total, out_dtype)


def _write_dots(
    builder: Any, x: Any, length: Any, entries: Any, factor: Any, count: Any, target: Any, across: Any, dtype: Any, *,
    rows: int, sides: int,
) -> None:  # fmt: skip
    """Multiply `count` numbers of each of `rows` rows by those of each of `sides` rows of a factor; every sum of
    products is made in one order.

    Rows of x and of the factor are `length` bytes apart, those of float32 at `target` `across`; the rows' numbers are
    int64 at `entries`.
    """
    size, form = dtype.bitwidth // 8, vectors.ACCUMULATE[dtype]
    zero, none = vectors.constant(FLOATS, 0.0), LONG(0)
    row_indices = [load(builder, builder.add(entries, LONG(row * 8)), LONG) for row in range(rows)]
    left = [builder.add(x, builder.mul(row_index, length)) for row_index in row_indices]
    right = [vectors.at(builder, factor, length, side, none) for side in range(sides)]
    following = builder.mul(length, LONG(sides))
    cells = [(row, side) for row in range(rows) for side in range(sides)]
    sums = {cell: cgutils.alloca_once_value(builder, zero) for cell in cells}
    lines = builder.udiv(count, LONG(LINE // size))
    with cgutils.for_range(builder, lines) as loop:
        offset = builder.mul(loop.index, LONG(LINE))
        own = [load(builder, builder.add(base, offset), WORDS) for base in left]
        for side, base in enumerate(right):
            address = builder.add(base, offset)
            words = load(builder, address, WORDS)
            vectors.prefetch(builder, builder.add(address, following))
            for row in range(rows):
                builder.store(form(builder, own[row], words, builder.load(sums[row, side])), sums[row, side])
    totals = {}
    for row in range(rows):
        four = [builder.load(sums[row, side]) if side < sides else zero for side in range(4)]
        lane_sums = vectors.sum_lanes(builder, four)
        for side in range(sides):
            totals[row, side] = cgutils.alloca_once_value(builder, builder.extract_element(lane_sums, WORD(side)))
    done = builder.mul(lines, LONG(LINE))
    with cgutils.for_range(builder, builder.sub(count, builder.mul(lines, LONG(LINE // size)))) as loop:
        offset = builder.add(done, builder.mul(loop.index, LONG(size)))
        own, other = (
            [vectors.read(builder, builder.add(base, offset), dtype, one=True) for base in bases]
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
    builder: Any, weights: Any, across: Any, rank: Any, factor: Any, stride: Any, y: Any, length: Any, entries: Any,
    dtype: Any, out_dtype: Any, *, rows: int, count: int,
) -> None:  # fmt: skip
    """Add, to 16 * `count` numbers of each of `rows` rows, the sum of `rank` rows of a factor, each times its float32
    weight.

    Bytes from row to row: `across` of weights, `stride` of the factor, `length` of y, whose rows' numbers are int64 at
    `entries`.
    """
    size, out_size = dtype.bitwidth // 8, out_dtype.bitwidth // 8
    zero = vectors.constant(FLOATS, 0.0)
    cells = [(row, vector) for row in range(rows) for vector in range(count)]
    sums = {cell: cgutils.alloca_once_value(builder, zero) for cell in cells}
    with cgutils.for_range(builder, rank) as loop:
        offset = builder.mul(loop.index, LONG(4))
        scalars = [load(builder, vectors.at(builder, weights, across, row, offset), FLOAT) for row in range(rows)]
        values = [vectors.splat(builder, weight) for weight in scalars]
        source = builder.add(factor, builder.mul(loop.index, stride))
        for line in range(count * LANES * size // LINE):  # of the block that follows
            vectors.prefetch(builder, builder.add(source, LONG(count * LANES * size + line * LINE)))
        for vector in range(count):
            numbers = vectors.read(builder, builder.add(source, LONG(vector * LANES * size)), dtype)
            for row in range(rows):
                total = sums[row, vector]
                builder.store(vectors.multiply_add(builder, values[row], numbers, builder.load(total)), total)
    for row in range(rows):
        row_index = load(builder, builder.add(entries, LONG(row * 8)), LONG)
        begin = builder.add(y, builder.mul(row_index, length))
        for vector in range(count):
            target = builder.add(begin, LONG(vector * LANES * out_size))
            sum_ = builder.fadd(vectors.read(builder, target, out_dtype), builder.load(sums[row, vector]))
            vectors.write(builder, sum_, target, out_dtype)


_add_vector, _add_row, _add_tile = (
    emitted(*[INT64] * 8, TAG, TAG, rows=rows, count=count)(_write_add)
    for rows, count in ((1, 1), (1, _BLOCK // LANES), (_TILE, _BLOCK // LANES))
)
