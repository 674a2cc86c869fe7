"""x W^T with a weight as checkpoints store it, row by row: for the output layer, whose weight is often the embedding.

A tile is the product of up to six rows of x and four rows of the weight. All its sums stay in registers, so a weight
is loaded once for all rows of the tile; a few tiles are taken together so that it comes from memory once for all rows
of x, and the lines of the next few are asked for meanwhile. Every sum is made in one order whatever the tile's size:
a row's result depends neither on the rows beside it nor on the number of threads.

bfloat16 goes through the CPU's own instruction for pairs (AVX512-BF16) where it has one: then this is as fast as
oneDNN with a packed weight at any number of rows. Elsewhere values are widened, which torch does number by number.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba.core import cgutils
from numba.extending import intrinsic

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.jit import kind_of, serial_in_order
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of, reads_worth
from asyncengine.kernels.cpu.vectors import FLOATS, LINE, LONG, WORDS, at, cpu_has, load

COLUMNS = 4
"""Rows of the weight, so columns of the result, in a tile."""
_BLOCK = 3 * COLUMNS
"""Columns that are done for all rows of x before the next: their weights must fit in the first-level cache."""
_EVEN = 16
"""Rows whose arithmetic takes as long as reading the weight."""
_MOST = 6 if cpu_has("avx512f") else 2
"""Rows of x in the largest tile whose sums fit in the registers."""


def gemm_fits(dtype: torch.dtype, features: int, outputs: int) -> bool:
    """True if `gemm` takes a weight [outputs, features] of this type: whole vectors of 64 bytes, and one tile."""
    return dtype in (torch.bfloat16, torch.float32) and features * dtype.itemsize % LINE == 0 and outputs >= COLUMNS


def gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out = x weight^T; x [..., features] and a contiguous weight [outputs, features] of one type, out float32.

    `out` [..., outputs] is contiguous.
    """
    x = x.contiguous()
    outputs, features = weight.shape
    rows, size = x.numel() // features, features * x.element_size()
    _product(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, outputs, size, kind_of(x.dtype), use_team())


@serial_in_order
def _product(x: int, weight: int, out: int, rows: int, outputs: int, size: int, kind: np.generic, team: int) -> None:
    tiles = -(-outputs // COLUMNS)
    pieces = pieces_of(outputs * size * reads_worth(rows, _EVEN), -(-tiles * COLUMNS // _BLOCK), team)
    parallel_for(_gemm_part, team, pieces, (x, weight, out, rows, outputs, size, kind))


@serial_in_order
def _gemm_part(
    piece: int,
    pieces: int,
    worker: int,
    x: int,
    weight: int,
    out: int,
    rows: int,
    outputs: int,
    size: int,
    kind: np.generic,
) -> None:
    """`size` is the bytes of a row. The last tile is moved back to end with the weight."""
    tiles = -(-outputs // COLUMNS)
    first, last = tiles * piece // pieces * COLUMNS, tiles * (piece + 1) // pieces * COLUMNS
    turns = -(-rows // _MOST)
    for begin in range(first, last, _BLOCK):
        for turn in range(turns):
            row, end = rows * turn // turns, rows * (turn + 1) // turns
            for place in range(begin, min(begin + _BLOCK, last), COLUMNS):
                column = min(place, outputs - COLUMNS)
                own = weight + column * size
                ahead = own + _BLOCK * size if place // COLUMNS % turns == turn else own
                _tile(
                    end - row, x + row * size, own, ahead, size, out + (row * outputs + column) * 4, outputs * 4, kind
                )


@serial_in_order
def _tile(rows: int, x: int, weight: int, ahead: int, size: int, out: int, out_size: int, kind: np.generic) -> None:
    if rows == 1:
        _tile1(x, weight, ahead, size, out, out_size, kind)
    elif rows == 2:
        _tile2(x, weight, ahead, size, out, out_size, kind)
    elif rows == 3:
        _tile3(x, weight, ahead, size, out, out_size, kind)
    elif rows == 4:
        _tile4(x, weight, ahead, size, out, out_size, kind)
    elif rows == 5:
        _tile5(x, weight, ahead, size, out, out_size, kind)
    elif rows == 6:
        _tile6(x, weight, ahead, size, out, out_size, kind)


def _make_tile(rows: int) -> Any:
    """tile(x, weight, ahead, size, out, out_size, kind): out float32 [rows, 4] = x [rows, :] weight [4, :]^T.

    Addresses, and the bytes of a row of x and of the weight, and of `out`. `ahead` is the address of four rows of a
    weight that will be wanted soon.
    """

    def typed(_: Any, x: Any, weight: Any, ahead: Any, size: Any, out: Any, out_size: Any, kind: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _write_tile(builder, rows, vectors.ACCUMULATE[kind], *arguments[:6])
            return context.get_dummy_value()

        return numba.types.void(*[numba.types.int64] * 6, kind), generate

    return intrinsic(typed)


def _write_tile(
    builder: Any, rows: int, accumulate: Any, x: Any, weight: Any, ahead: Any, size: Any, out: Any, out_size: Any
) -> None:
    zero = vectors.constant(FLOATS, 0.0)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(COLUMNS)] for _ in range(rows)]
    with cgutils.for_range(builder, builder.udiv(size, LONG(LINE))) as loop:
        offset = builder.mul(loop.index, LONG(LINE))
        weights = [load(builder, at(builder, weight, size, column, offset), WORDS) for column in range(COLUMNS)]
        for column in range(COLUMNS):
            vectors.prefetch(builder, at(builder, ahead, size, column, offset))
        for row in range(rows):
            values = load(builder, at(builder, x, size, row, offset), WORDS)
            for total, chosen in zip(sums[row], weights, strict=True):
                builder.store(accumulate(builder, values, chosen, builder.load(total)), total)
    for row in range(rows):
        four = vectors.sum_lanes(builder, [builder.load(total) for total in sums[row]])
        vectors.store(builder, four, at(builder, out, out_size, row, LONG(0)))


_tile1, _tile2, _tile3, _tile4, _tile5, _tile6 = map(_make_tile, range(1, 7))
