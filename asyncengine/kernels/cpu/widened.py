"""x W^T for many rows on CPUs with vectors of eight, or of four and twice as many: blocks of both in float32.

Such CPUs have no registers left to widen bfloat16 beside the sums of six rows by sixteen outputs, which keep their
arithmetic busy. So a block of x is widened once for some hundred outputs, and half a panel once for all rows of that
block: it stays in the first-level cache, x in the second (the order of loops: Goto and van de Geijn, 2008; six rows:
Van Zee and van de Geijn, "BLIS", 2015). Between two blocks of inputs sums are kept in memory, in float32: their order,
and so their bits, are those of `packed`'s tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.intrinsics import INT64, TAG, emitted
from asyncengine.kernels.cpu.jit import array, narrow, pointer, room, serial_in_order, widen
from asyncengine.kernels.cpu.vectors import EIGHT_FLOATS, FLOAT, LANES, LINE, LONG, WORDS, at, load

_TILE = 6
"""Rows of a tile."""
_ROWS = 16 * _TILE
"""Rows of a block of x."""
_DEPTH = 256
"""Inputs of a block: half a panel's are 16 KiB."""
PANELS = 8
"""Panels for which x is widened once, and whose sums are kept in memory."""
_WIDTH, _EIGHTS = 2 * LANES, LANES // 8
_ACROSS = PANELS * _WIDTH
_STRIDE = _DEPTH + LANES
"""Numbers from a row of a block of x to the next: no power of two, so that rows share no sets of the cache."""
_X_BLOCK, _HALF_PANEL, _SUMS = _ROWS * _STRIDE, _DEPTH * LANES, _ROWS * _ACROSS
"""Numbers of a block of x, of half a panel, and of sums: 218 KiB in all."""


@emitted(*[INT64] * 3, TAG)
def _widen_panel(builder: Any, panel: Any, lines: Any, out: Any, dtype: Any) -> None:
    """Widen `lines` lines of half a panel, 64 bytes of each 128, to float32 [inputs, 16]."""
    with cgutils.for_range(builder, lines) as loop:
        words = load(builder, builder.add(panel, builder.mul(loop.index, LONG(2 * LINE))), WORDS)
        halves = vectors.sides(builder, words, dtype)
        target = builder.add(out, builder.mul(loop.index, LONG(len(halves) * LINE)))
        for index, side in enumerate(halves):
            vectors.store(builder, side, builder.add(target, LONG(index * LINE)))


def write_tile(builder: Any, x: Any, weights: Any, depth: Any, sums: Any, ahead: Any, share: Any) -> None:
    cells = [(row, eight) for row in range(_TILE) for eight in range(_EIGHTS)]
    targets = {cell: builder.add(sums, LONG((cell[0] * _ACROSS + cell[1] * 8) * 4)) for cell in cells}
    totals = {cell: cgutils.alloca_once(builder, EIGHT_FLOATS) for cell in cells}
    for cell in cells:
        builder.store(load(builder, targets[cell], EIGHT_FLOATS), totals[cell])
    pairs = builder.lshr(depth, LONG(1))
    with cgutils.for_range(builder, pairs) as loop:
        vectors.prefetch(builder, builder.add(ahead, builder.mul(loop.index, share)))
        first = builder.shl(loop.index, LONG(1))
        for index in range(2):
            _add_input(builder, x, weights, builder.add(first, LONG(index)), totals)
    with builder.if_then(builder.trunc(depth, ir.IntType(1))):
        _add_input(builder, x, weights, builder.shl(pairs, LONG(1)), totals)
    for cell in cells:
        vectors.store(builder, builder.load(totals[cell]), targets[cell])


def _add_input(builder: Any, x: Any, weights: Any, index: Any, totals: dict[tuple[int, int], Any]) -> None:
    line, offset = builder.add(weights, builder.mul(index, LONG(LINE))), builder.mul(index, LONG(4))
    factors = [load(builder, builder.add(line, LONG(eight * 32)), EIGHT_FLOATS) for eight in range(_EIGHTS)]
    for row in range(_TILE):
        value = vectors.splat(builder, load(builder, at(builder, x, LONG(_STRIDE * 4), row, offset), FLOAT), 8)
        for eight, factor in enumerate(factors):
            cell = totals[row, eight]
            builder.store(vectors.multiply_add(builder, value, factor, builder.load(cell)), cell)


_add_tile = emitted(*[INT64] * 6)(write_tile)
"""_add_tile(x, weights, depth, sums, ahead, share): add products of six rows of a block of x and `depth` lines of half
a panel. For each two, memory is asked for: at `ahead`, and `share` bytes on each time."""


@serial_in_order
def multiply_widened(
    x: int, panels: int, bias: int, out: int, across: int, rows: int, size: int, first: int, last: int,
    dtype: np.generic, out_size: int,
) -> None:  # fmt: skip
    """Panels `first` to `last` for `rows` rows of x, of `size` bytes each, as `packed.multiply` has the rest."""
    widened_x, half_panel = room(_X_BLOCK, np.float32(0)), room(_HALF_PANEL, np.float32(0))
    sums = room(_SUMS, np.float32(0))
    for row in range(0, rows, _ROWS):
        count = min(_ROWS, rows - row)
        for begin in range(first, last, PANELS):
            end = min(begin + PANELS, last)
            _add_up(
                x + row * size, panels + begin * size * _WIDTH, count, size, 2 * (end - begin), widened_x.ctypes.data,
                half_panel.ctypes.data, sums.ctypes.data, dtype,
            )  # fmt: skip
            added = bias + begin * _WIDTH * 4 if bias != 0 else 0
            target = out + row * across + begin * _WIDTH * out_size
            _store_rows(sums.ctypes.data, added, target, across, count, (end - begin) * _WIDTH, out_size)


@serial_in_order
def _add_up(
    x: int, panels: int, rows: int, size: int, halves: int, wide_x: int, buffer: int, sums: int, dtype: np.generic
) -> None:
    """sums [rows, _ACROSS] of `halves` halves of panels, with room for the rows of whole tiles; `wide_x`,
    `buffer`: room for widened numbers of x and of half a panel."""
    number = vectors.size_of(dtype)
    inputs, tiles = size // number, (rows + _TILE - 1) // _TILE
    totals = array(pointer(sums, np.float32(0)), (tiles * _TILE, _ACROSS))
    for row in range(tiles * _TILE):
        for index in range(_ACROSS):
            totals[row, index] = np.float32(0)
    share = (LINE * number + tiles - 1) // tiles  # of the next half panel, for two inputs
    for begin in range(0, inputs, _DEPTH):
        depth = min(_DEPTH, inputs - begin)
        for row in range(tiles * _TILE):  # the last tile is filled up with copies of the last row
            values = array(pointer(x + min(row, rows - 1) * size + begin * number, dtype), (depth,))
            widened = array(pointer(wide_x + row * _STRIDE * 4, np.float32(0)), (depth,))
            for index in range(depth):
                widened[index] = widen(values[index])
        for half in range(halves):
            source = panels + half // 2 * size * _WIDTH + begin * number * _WIDTH + half % 2 * LINE
            ahead = source + (LINE if half % 2 == 0 else size * _WIDTH - LINE)
            _widen_panel(source, depth * number // 4, buffer, dtype)
            for tile in range(tiles):
                tile_sums = sums + (tile * _TILE * _ACROSS + half * LANES) * 4
                next_line = ahead + tile * (depth // 2) * share
                _add_tile(wide_x + tile * _TILE * _STRIDE * 4, buffer, depth, tile_sums, next_line, share)


@serial_in_order
def _store_rows(sums: int, bias: int, out: int, across: int, rows: int, count: int, out_size: int) -> None:
    """out [rows, count] = sums + bias."""
    totals, added = array(pointer(sums, np.float32(0)), (rows, _ACROSS)), array(pointer(bias, np.float32(0)), (count,))
    for row in range(rows):
        target = out + row * across
        wide, short = array(pointer(target, np.float32(0)), (count,)), array(pointer(target, np.uint16(0)), (count,))
        if bias != 0:
            for index in range(count):
                totals[row, index] += added[index]
        if out_size == 2:
            for index in range(count):
                short[index] = narrow(totals[row, index], np.uint16(0))
        else:
            for index in range(count):
                wide[index] = totals[row, index]
