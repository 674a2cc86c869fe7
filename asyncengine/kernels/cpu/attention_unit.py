"""The two products of attention by the CPU's matrix unit (Intel's AMX), for tiles of sixteen keys in bfloat16.

Tiles of keys and values lie as `attention_tiles` has them, which is as the unit takes them: pairs of dimensions of
sixteen keys, and pairs of keys of sixteen dimensions. Up to sixteen rows of queries go together. Each row is computed
by itself, and its sums are made in one order: of scores, 32 dimensions after 32; of values, key tile after key tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.attention_fields import padded
from asyncengine.kernels.cpu.attention_softmax import store_scaled
from asyncengine.kernels.cpu.attention_tiles import AHEAD, SCORES
from asyncengine.kernels.cpu.intrinsics import INT64, emitted
from asyncengine.kernels.cpu.jit import array, inline, pointer, serial_in_order
from asyncengine.kernels.cpu.matrix_unit import (
    ROWS,
    STEP,
    WEIGHTS,
    X,
    configure_unit,
    load_tile,
    multiply_tiles,
    release_unit,
    store_tile,
    zero_tile,
)
from asyncengine.kernels.cpu.vectors import LINE, LONG, load

DIMENSIONS = 32
"""Dimensions of keys that are multiplied at once."""
_KEYS = 16
_TOGETHER = 4
"""Tiles of sums that are added to in turns: a product waits for the one before it in its sum."""


def _ask(builder: Any, asks: Any, address: Any, lines: int, stride: Any) -> None:
    """Have so many lines of memory brought near, if `asks` is not 0."""
    with builder.if_then(builder.icmp_signed("!=", asks, LONG(0))):
        for line in range(lines):
            vectors.prefetch(builder, builder.add(address, builder.mul(stride, LONG(line))))


def _make_scores(together: int) -> Any:
    """scores(query, query_size, tiles, steps, out, out_size, asks): queries times `together` tiles of keys.

    Addresses, and the bytes of a row of `query` and of `out`, float32. `tiles`: so many addresses. A step is of
    `DIMENSIONS`. `asks`: 1 to have memory brought near that is read later, else 0.
    """

    @emitted(*[INT64] * 7)
    def scores(
        builder: Any, query: Any, query_size: Any, tiles: Any, steps: Any, out: Any, out_size: Any, asks: Any
    ) -> None:
        places = [load(builder, builder.add(tiles, LONG(8 * index)), LONG) for index in range(together)]
        ahead = [load(builder, builder.add(tiles, LONG(8 * (index + AHEAD))), LONG) for index in range(together)]
        for index in range(together):
            zero_tile(builder, index)
        with cgutils.for_range(builder, steps) as loop:
            load_tile(builder, X[0], builder.add(query, builder.mul(loop.index, LONG(STEP))), query_size)
            begin = builder.mul(loop.index, LONG(DIMENSIONS // 2 * LINE))
            for index, place in enumerate(places):
                keys = WEIGHTS[index % 2]
                load_tile(builder, keys, builder.add(place, begin), LONG(LINE))
                _ask(builder, asks, builder.add(ahead[index], begin), DIMENSIONS // 2, LONG(LINE))
                multiply_tiles(builder, "bf16ps", index, X[0], keys)
        for index in range(together):
            store_tile(builder, index, builder.add(out, LONG(index * LINE)), out_size)

    return scores


def _make_values(together: int) -> Any:
    """sum_values(weights, weights_size, tiles, count, size, column, out, out_size, asks): out [rows, 16 * together]
    += weights times `count` tiles of values, `column` bytes into each step of `size` bytes."""

    @emitted(*[INT64] * 9)
    def sum_values(
        builder: Any, weights: Any, weights_size: Any, tiles: Any, count: Any, size: Any, column: Any, out: Any,
        out_size: Any, asks: Any,
    ) -> None:  # fmt: skip
        sums = [builder.add(out, LONG(index * LINE)) for index in range(together)]
        for index, place in enumerate(sums):
            load_tile(builder, index, place, out_size)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(tiles, builder.mul(loop.index, LONG(8)))
            place, ahead = load(builder, at, LONG), load(builder, builder.add(at, LONG(8 * AHEAD)), LONG)
            own = builder.add(weights, builder.mul(loop.index, LONG(_KEYS * 2)))
            load_tile(builder, X[0], own, weights_size)
            for index in range(together):
                values = WEIGHTS[index % 2]
                begin = builder.add(column, LONG(index * LINE))
                load_tile(builder, values, builder.add(place, begin), size)
                _ask(builder, asks, builder.add(ahead, begin), _KEYS // 2, size)
                multiply_tiles(builder, "bf16ps", index, X[0], values)
        for index, place in enumerate(sums):
            store_tile(builder, index, place, out_size)

    return sum_values


_scores1, _scores4 = _make_scores(1), _make_scores(_TOGETHER)
_values1, _values4 = _make_values(1), _make_values(_TOGETHER)


@inline
def takes_unit(key_dim: int, value_dim: int) -> bool:
    """Whether heads of these sizes fill tiles."""
    return key_dim % DIMENSIONS == 0 and value_dim % _KEYS == 0


@serial_in_order
def score_block_by_unit(rows: int, query: int, query_size: int, tiles: int, count: int, dim: int, out: int) -> None:
    """out [rows, SCORES] = query [rows, dim] times `count` tiles of keys."""
    together, steps, size = min(rows, ROWS), dim // DIMENSIONS, SCORES * 4
    asks = 1 if rows <= ROWS else 0  # a decode row waits for memory
    configure_unit(together, together, STEP)
    first = 0
    while first < count:
        for turn in range((rows + ROWS - 1) // ROWS):
            row = min(turn * ROWS, rows - together)
            own, at, to = query + row * query_size, tiles + first * 8, out + row * size + first * LINE
            if count - first >= _TOGETHER:
                _scores4(own, query_size, at, steps, to, size, asks)
            else:
                _scores1(own, query_size, at, steps, to, size, asks)
        first += _TOGETHER if count - first >= _TOGETHER else 1
    release_unit()


@serial_in_order
def sum_values_by_unit(
    rows: int, weights: int, width: int, tiles: int, count: int, rest: int, dim: int, sums: int, decay: int
) -> None:
    """sums = sums * decay + weights times the values of `count` tiles, of which the last has `rest` keys."""
    size = padded(dim) * 4
    factors = array(pointer(decay, np.float32(0)), (rows,))
    for row in range(rows):
        store_scaled(sums + row * size, factors[row], sums + row * size, dim, np.float32(0))
    whole = count if rest == _KEYS else count - 1
    if whole > 0:
        _add_values(rows, weights, width, tiles, whole, _KEYS * 2, dim, sums)
    if whole < count:
        _add_values(rows, weights + whole * _KEYS * 2, width, tiles + whole * 8, 1, (rest + 1) // 2 * 4, dim, sums)
    release_unit()


@serial_in_order
def _add_values(
    rows: int, weights: int, width: int, tiles: int, count: int, keys_size: int, dim: int, sums: int
) -> None:
    """`keys_size`: bytes of a row of weights for the keys of a tile. No row is in two tiles of rows, as it would be
    added to twice: the last tile is a smaller one."""
    together, size = min(rows, ROWS), padded(dim) * 4
    turns, asks = (rows + together - 1) // together, 1 if rows <= ROWS else 0
    configure_unit(together, together, keys_size)
    for turn in range(turns):
        row, column = turn * together, 0
        if row + together > rows:
            configure_unit(rows - row, rows - row, keys_size)
        while column < dim:
            at, to = weights + row * width, sums + row * size + column * 4
            if dim - column >= _KEYS * _TOGETHER:
                _values4(at, width, tiles, count, dim * 4, column * 4, to, size, asks)
                column += _KEYS * _TOGETHER
            else:
                _values1(at, width, tiles, count, dim * 4, column * 4, to, size, asks)
                column += _KEYS
