"""The innermost parts of attention over a paged pool: two matrix products and the softmax between them.

A tile holds `lanes` keys (or values) of one head that follow each other in a page. Keys lie dimension by dimension, so
that a vector holds one dimension of all keys of the tile and no sum ever crosses lanes; bfloat16 by pairs of
dimensions, one pair in a word. Values lie key by key, bfloat16 by pairs of keys. So a word always holds two numbers
that belong to one sum: what the CPU's instruction for pairs (AVX512-BF16) wants, and the cheapest form to widen.

    keys    [key dim / 2][lanes][2]   bfloat16, or [key dim][lanes] float32
    values  [lanes / 2][value dim][2] bfloat16, or [lanes][value dim] float32, or [1][value dim] bfloat16 for one lane

Keys and values of 8 bits lie like those of bfloat16, a byte each; the scales of the tile's tokens follow, [lanes]
float32. They are multiplied by queries and weights of 16 bits: sums of whole numbers are the same in any order.

Every sum is made in one order, whatever the number of rows beside it: a query's result depends on nothing but the
query, its keys and its values. The softmax goes block by block (M. Milakov, N. Gimelshein: Online normalizer
calculation for softmax, 2018; T. Dao et al.: FlashAttention, 2022).

Three types travel as zeros: `dtype` is what the pool holds (see `jit`); `operand` what queries and weights are held as,
uint16 to multiply pairs by the CPU's instruction (sixteen lanes only), float32, or int16 where the pool holds bytes
(sixteen lanes only, whatever `dtype`); `lanes` see `LANES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.intrinsics import INT64, TAG, emitted
from asyncengine.kernels.cpu.vectors import FLOAT, FLOATS, LONG, WORD, load, store

BLOCK = 128
"""Keys between two corrections of the softmax; a multiple of any tile."""
LANES = {1: np.int8(0), 2: np.int16(0), 4: np.int32(0), 8: np.uint8(0), 16: np.uint16(0)}
"""Zeros by whose type a kernel knows the number of keys in a tile."""
AHEAD = 8
"""Memory is prefetched this many tiles before it is read: `tiles` must list as many more than are to be computed."""
FLOOR = -1e30
"""The first maximum, in place of minus infinity: the difference of two infinities would be NaN."""
SCORES = BLOCK + 16
"""Floats of a row of scores: a block, and room for the second tile of the last pair, which may not exist."""

_LANES_OF = {numba.typeof(zero): lanes for lanes, zero in LANES.items()}
_HALF, _FLOAT32, _SHORT = numba.types.uint16, numba.types.float32, numba.types.int16


@emitted(TAG, TAG, result=INT64)
def stored_size(builder: Any, dtype: Any, operand: Any) -> Any:
    """Bytes of a number in the pool."""
    return LONG(1 if operand == _SHORT else dtype.bitwidth // 8)


@emitted(*[INT64] * 7, TAG, TAG, TAG)
def scores(
    builder: Any, rows: Any, query: Any, query_size: Any, tiles: Any, steps: Any, out: Any, out_size: Any, dtype: Any,
    lanes: Any, operand: Any,
) -> None:  # fmt: skip
    """out [rows, 2 * lanes], float32, = query [rows, :] times two tiles. `query`, `tiles` (two addresses) and `out` are
    addresses, `query_size` and `out_size` bytes of a row. A step is a word."""

    def write(count: int, row: Any) -> None:
        source, to = builder.add(query, builder.mul(row, query_size)), builder.add(out, builder.mul(row, out_size))
        types = dtype, operand
        _write_scores(builder, count, _LANES_OF[lanes], types, source, query_size, tiles, steps, to, out_size)

    _by_rows(builder, rows, (8 if vectors.WIDE else 6, 4, 3, 2, 1), write)


def _by_rows(builder: Any, rows: Any, counts: tuple[int, ...], write: Callable[[int, Any], None]) -> None:
    """Emit `write(count, first row)` for all rows, taken by `counts` at a time, the largest first, down to 1."""
    done: Any = LONG(0)
    for count in counts:
        turns = builder.udiv(builder.sub(rows, done), LONG(count))
        with cgutils.for_range(builder, turns) as loop:
            write(count, builder.add(done, builder.mul(loop.index, LONG(count))))
        done = builder.add(done, builder.mul(turns, LONG(count)))


def _make_sum_values(width: int, counts: tuple[int, ...]) -> Any:
    """sum_values(rows, weights, weights_size, tiles, count, steps, size, column, out, out_size, decay, dtype, lanes,
    operand):

    out [rows, 16 * width] = out * decay [rows, 1] + weights [rows, :] times `count` tiles of `steps` words each, `size`
    bytes from one to the next, `column` bytes into them. Rows are taken by `counts` at a time (`_by_rows`).
    Behind `decay` are the scales of quantized weights, [rows].
    """

    @emitted(*[INT64] * 11, TAG, TAG, TAG)
    def sum_values(
        builder: Any, rows: Any, weights: Any, weights_size: Any, tiles: Any, count: Any, steps: Any, size: Any,
        column: Any, out: Any, out_size: Any, decay: Any, dtype: Any, lanes: Any, operand: Any,
    ) -> None:  # fmt: skip
        def write(row_count: int, row: Any) -> None:
            _write_values(
                builder, row_count, width, (dtype, operand, _LANES_OF[lanes]),
                builder.add(weights, builder.mul(row, weights_size)), weights_size, tiles, count, steps, size, column,
                builder.add(out, builder.mul(row, out_size)), out_size,
                *(builder.add(decay, builder.mul(index, LONG(4))) for index in (row, builder.add(row, rows))),
            )  # fmt: skip

        _by_rows(builder, rows, counts, write)

    return sum_values


@emitted(INT64, INT64, INT64, TAG)
def transpose_tile(builder: Any, source: Any, out: Any, blocks: Any, dtype: Any) -> None:
    """Write a tile of sixteen values, of `blocks` times sixteen dimensions, made of one of keys, by rounds of perfect
    shuffles. In bfloat16 pairs are transposed whole, and then the inner two numbers of every four are exchanged."""
    pairs = dtype == _HALF
    count = 8 if pairs else 16
    vector = ir.VectorType(LONG if pairs else WORD, count)
    interleaved = [index // 2 + index % 2 * count for index in range(2 * count)]
    halves = [ir.Constant(ir.VectorType(WORD, count), interleaved[first : first + count]) for first in (0, count)]
    sixteenths = ir.VectorType(ir.IntType(16), 32)
    inner = ir.Constant(ir.VectorType(WORD, 32), [index // 4 * 4 + (0, 2, 1, 3)[index % 4] for index in range(32)])
    with cgutils.for_range(builder, blocks) as loop:
        begin = builder.add(source, builder.mul(loop.index, LONG(count * vectors.LINE)))
        rows = [load(builder, builder.add(begin, LONG(row * vectors.LINE)), vector) for row in range(count)]
        for _ in range(count.bit_length() - 1):
            both = zip(rows[: count // 2], rows[count // 2 :], strict=True)
            rows = [builder.shuffle_vector(*pair, half) for pair in both for half in halves]
        if pairs:
            spread = [builder.bitcast(row, sixteenths) for row in rows]
            rows = [builder.shuffle_vector(row, row, inner) for row in spread]
        for index, row in enumerate(rows):
            target = vectors.at(builder, out, builder.mul(blocks, LONG(vectors.LINE)), index, LONG(0))
            store(builder, row, builder.add(target, builder.mul(loop.index, LONG(vectors.LINE))))


def _write_scores(
    builder: Any, rows: int, lanes: int, types: Any, query: Any, query_size: Any, tiles: Any, steps: Any, out: Any,
    out_size: Any,
) -> None:  # fmt: skip
    short = types[1] == _SHORT
    floats, size = ir.VectorType(FLOAT, lanes), (2 if short else 4) * lanes
    zero = vectors.constant(ir.VectorType(WORD, lanes) if short else floats, 0)
    bytes_of_step = 8 if types == (_HALF, _FLOAT32) else 4
    tiles_at_once = 2 if vectors.WIDE or rows <= 2 else 1  # of vectors of eight, more sums would not stay in registers
    addresses = [load(builder, builder.add(tiles, LONG(8 * tile)), LONG) for tile in range(2)]
    later = [load(builder, builder.add(tiles, LONG(8 * (tile + AHEAD))), LONG) for tile in range(2)]
    for first in range(0, 2, tiles_at_once):
        indices = range(first, first + tiles_at_once)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in indices] for _ in range(rows)]
        with cgutils.for_range(builder, steps) as loop:
            offset = builder.mul(loop.index, LONG(size))
            keys = [_operands(builder, builder.add(addresses[tile], offset), lanes, types) for tile in indices]
            for tile in indices:
                vectors.prefetch(builder, builder.add(later[tile], offset))
            for row in range(rows):
                address = vectors.at(builder, query, query_size, row, builder.mul(loop.index, LONG(bytes_of_step)))
                factors = _factors(builder, address, types, lanes)
                for total, key in zip(sums[row], keys, strict=True):
                    _accumulate(builder, total, factors, key, types)
        for row in range(rows):
            for tile, total in zip(indices, sums[row], strict=True):
                address, score = vectors.at(builder, out, out_size, row, LONG(4 * lanes * tile)), builder.load(total)
                if short:
                    scales = load(builder, builder.add(addresses[tile], builder.mul(steps, LONG(size))), floats)
                    score = builder.fmul(builder.sitofp(score, floats), scales)
                store(builder, score, address)


def _write_values(
    builder: Any, rows: int, width: int, types: Any, weights: Any, weights_size: Any, tiles: Any, count: Any,
    steps: Any, size: Any, column: Any, out: Any, out_size: Any, decay: Any, scale: Any,
) -> None:  # fmt: skip
    dtype, operand, lanes = types
    short, single = operand == _SHORT, dtype == _HALF and lanes == 1
    product_types = (_FLOAT32, _FLOAT32) if single else (dtype, operand)
    bytes_of_step = 8 if product_types == (_HALF, _FLOAT32) else 4
    sums: list[list[Any]] = []
    carried: list[list[Any]] = []
    for row in range(rows):
        factor = vectors.splat(builder, load(builder, builder.add(decay, LONG(4 * row)), FLOAT))
        addresses = [vectors.at(builder, out, out_size, row, LONG(64 * block)) for block in range(width)]
        carried.append([builder.fmul(load(builder, address, FLOATS), factor) for address in addresses])
        starts = [vectors.constant(vectors.WORDS, 0)] * width if short else carried[row]
        sums.append([cgutils.alloca_once_value(builder, start) for start in starts])
    span = 32 if short or single else 64
    with cgutils.for_range(builder, count) as outer:
        tile = load(builder, builder.add(tiles, builder.mul(outer.index, LONG(8))), LONG)
        ahead = load(builder, builder.add(tiles, builder.mul(builder.add(outer.index, LONG(AHEAD)), LONG(8))), LONG)
        tile, ahead = builder.add(tile, column), builder.add(ahead, column)
        first = builder.mul(outer.index, steps)
        with cgutils.for_range(builder, steps) as inner:
            base = builder.add(tile, builder.mul(inner.index, size))
            addresses = [builder.add(base, LONG(span * block)) for block in range(width)]
            if single:
                values = [[vectors.read(builder, address, _HALF)] for address in addresses]
            else:
                values = [_operands(builder, address, vectors.LANES, product_types) for address in addresses]
            later = builder.add(ahead, builder.mul(inner.index, size))
            for begin in range(0, span * width, 64):
                vectors.prefetch(builder, builder.add(later, LONG(begin)))
            offset = builder.mul(builder.add(first, inner.index), LONG(bytes_of_step))
            for row in range(rows):
                address = vectors.at(builder, weights, weights_size, row, offset)
                factors = _factors(builder, address, product_types, vectors.LANES)
                for total, value in zip(sums[row], values, strict=True):
                    _accumulate(builder, total, factors, value, product_types)
    for row in range(rows):
        for block in range(width):
            result = builder.load(sums[row][block])
            if short:
                factor = vectors.splat(builder, load(builder, builder.add(scale, LONG(4 * row)), FLOAT))
                result = vectors.multiply_add(builder, builder.sitofp(result, FLOATS), factor, carried[row][block])
            store(builder, result, vectors.at(builder, out, out_size, row, LONG(64 * block)))


def _operands(builder: Any, address: Any, lanes: int, types: Any) -> list[Any]:
    """A vector of words of memory as the operands of `_accumulate`: the words themselves, the one or two float32 in
    each word, or pairs of int16, which are bytes in memory."""
    dtype, operand = types
    if operand == _SHORT:
        numbers = load(builder, address, ir.VectorType(vectors.BYTE, 2 * lanes))
        return [builder.sext(numbers, ir.VectorType(vectors.HALF_WORD, 2 * lanes))]
    words = load(builder, address, ir.VectorType(WORD, lanes))
    return [words] if operand == _HALF else vectors.sides(builder, words, dtype)


def _factors(builder: Any, source: Any, types: Any, lanes: int) -> list[Any]:
    """The factors of one step, numbers of a query or of weights, each in all lanes."""
    dtype, operand = types
    if operand in (_HALF, _SHORT):
        pairs = vectors.splat(builder, load(builder, source, WORD), lanes)
        return [pairs if operand == _HALF else builder.bitcast(pairs, ir.VectorType(vectors.HALF_WORD, 2 * lanes))]
    count = 2 if dtype == _HALF else 1
    addresses = [builder.add(source, LONG(4 * index)) for index in range(count)]
    return [vectors.splat(builder, load(builder, address, FLOAT), lanes) for address in addresses]


def _accumulate(builder: Any, total: Any, factors: list[Any], operands: list[Any], types: Any) -> None:
    value = builder.load(total)
    for factor, vector in zip(factors, operands, strict=True):
        if types[1] == _HALF:
            value = vectors.call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [value, factor, vector])
        elif types[1] == _SHORT:
            value = vectors.add_pairs(builder, value, factor, vector)
        else:
            value = vectors.multiply_add(builder, factor, vector, value)
    builder.store(value, total)


sum_values16 = _make_sum_values(1, (4, 3, 2, 1) if vectors.WIDE else (6, 4, 2, 1))
sum_values64 = _make_sum_values(4, (4, 3, 2, 1))
sum_values128 = _make_sum_values(8, (2, 1))
