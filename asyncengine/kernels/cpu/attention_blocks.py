"""One block of keys: which tiles it lies in, the scores, the softmax, and the weighted values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import cgutils

from asyncengine.kernels.cpu import attention_fields as fields
from asyncengine.kernels.cpu import attention_tiles as tile
from asyncengine.kernels.cpu import matrix_unit, vectors
from asyncengine.kernels.cpu.attention_softmax import (
    LOG2E,
    magnitude,
    softcap,
    softmax,
    spread_lanes,
    store_scaled,
    whole_weights,
)
from asyncengine.kernels.cpu.attention_tiles import AHEAD, BLOCK, SCORES, stored_size
from asyncengine.kernels.cpu.calls import call_rare, call_where
from asyncengine.kernels.cpu.intrinsics import INT64, emitted
from asyncengine.kernels.cpu.jit import array, inline, narrow, pointer, room, serial_in_order, widen
from asyncengine.kernels.cpu.vectors import LANES, LINE, LONG, UNIT, WIDE, load, size_of

# The two products of attention by the CPU's matrix unit (Intel's AMX), for tiles of sixteen keys in bfloat16.

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
            matrix_unit.zero_tile(builder, index)
        with cgutils.for_range(builder, steps) as loop:
            matrix_unit.load_tile(
                builder,
                matrix_unit.X[0],
                builder.add(query, builder.mul(loop.index, LONG(matrix_unit.STEP))),
                query_size,
            )
            begin = builder.mul(loop.index, LONG(DIMENSIONS // 2 * LINE))
            for index, place in enumerate(places):
                keys = matrix_unit.WEIGHTS[index % 2]
                matrix_unit.load_tile(builder, keys, builder.add(place, begin), LONG(LINE))
                _ask(builder, asks, builder.add(ahead[index], begin), DIMENSIONS // 2, LONG(LINE))
                matrix_unit.multiply_tiles(builder, "bf16ps", index, matrix_unit.X[0], keys)
        for index in range(together):
            matrix_unit.store_tile(builder, index, builder.add(out, LONG(index * LINE)), out_size)

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
            matrix_unit.load_tile(builder, index, place, out_size)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(tiles, builder.mul(loop.index, LONG(8)))
            place, ahead = load(builder, at, LONG), load(builder, builder.add(at, LONG(8 * AHEAD)), LONG)
            own = builder.add(weights, builder.mul(loop.index, LONG(_KEYS * 2)))
            matrix_unit.load_tile(builder, matrix_unit.X[0], own, weights_size)
            for index in range(together):
                values = matrix_unit.WEIGHTS[index % 2]
                begin = builder.add(column, LONG(index * LINE))
                matrix_unit.load_tile(builder, values, builder.add(place, begin), size)
                _ask(builder, asks, builder.add(ahead, begin), _KEYS // 2, size)
                matrix_unit.multiply_tiles(builder, "bf16ps", index, matrix_unit.X[0], values)
        for index, place in enumerate(sums):
            matrix_unit.store_tile(builder, index, place, out_size)

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
    together, steps, size = min(rows, matrix_unit.ROWS), dim // DIMENSIONS, SCORES * 4
    asks = 1 if rows <= matrix_unit.ROWS else 0  # a decode row waits for memory
    matrix_unit.configure_unit(together, together, matrix_unit.STEP)
    first = 0
    while first < count:
        for turn in range((rows + matrix_unit.ROWS - 1) // matrix_unit.ROWS):
            row = min(turn * matrix_unit.ROWS, rows - together)
            own, at, to = query + row * query_size, tiles + first * 8, out + row * size + first * LINE
            if count - first >= _TOGETHER:
                _scores4(own, query_size, at, steps, to, size, asks)
            else:
                _scores1(own, query_size, at, steps, to, size, asks)
        first += _TOGETHER if count - first >= _TOGETHER else 1
    matrix_unit.release_unit()


@serial_in_order
def sum_values_by_unit(
    rows: int, weights: int, width: int, tiles: int, count: int, rest: int, dim: int, sums: int, decay: int
) -> None:
    """sums = sums * decay + weights times the values of `count` tiles, of which the last has `rest` keys."""
    size = fields.padded(dim) * 4
    factors = array(pointer(decay, np.float32(0)), (rows,))
    for row in range(rows):
        store_scaled(sums + row * size, factors[row], sums + row * size, dim, np.float32(0))
    whole = count if rest == _KEYS else count - 1
    if whole > 0:
        _add_values(rows, weights, width, tiles, whole, _KEYS * 2, dim, sums)
    if whole < count:
        _add_values(rows, weights + whole * _KEYS * 2, width, tiles + whole * 8, 1, (rest + 1) // 2 * 4, dim, sums)
    matrix_unit.release_unit()


@serial_in_order
def _add_values(
    rows: int, weights: int, width: int, tiles: int, count: int, keys_size: int, dim: int, sums: int
) -> None:
    """`keys_size`: bytes of a row of weights for the keys of a tile. No row is in two tiles of rows, as it would be
    added to twice: the last tile is a smaller one."""
    together, size = min(rows, matrix_unit.ROWS), fields.padded(dim) * 4
    turns, asks = (rows + together - 1) // together, 1 if rows <= matrix_unit.ROWS else 0
    matrix_unit.configure_unit(together, together, keys_size)
    for turn in range(turns):
        row, column = turn * together, 0
        if row + together > rows:
            matrix_unit.configure_unit(rows - row, rows - row, keys_size)
        while column < dim:
            at, to = weights + row * width, sums + row * size + column * 4
            if dim - column >= _KEYS * _TOGETHER:
                _values4(at, width, tiles, count, dim * 4, column * 4, to, size, asks)
                column += _KEYS * _TOGETHER
            else:
                _values1(at, width, tiles, count, dim * 4, column * 4, to, size, asks)
                column += _KEYS


MOST_DIM = 1024 + LANES
"""Dimensions of a query or value beside keys and values in bytes, at most."""
_WHOLE, _SINGLE, _PAGE, _SHORT = np.int64(0), np.float32(0), np.int32(0), np.int16(0)


@serial_in_order
def gather(
    query: int, token_size: int, head_size: int, rows: int, group: int, dim: int, out: int, units: int, kind: Any,
    operand: Any,
) -> None:  # fmt: skip
    """An item's queries, heads of the group innermost, side by side: as bits for `operand` uint16, as float32, or for
    int16 as multiples of what is written to `units`, one float32 a row."""
    width = dim + dim % 2
    held = array(pointer(out, operand), (rows, width))
    for row in range(rows):
        place = query + row // group * token_size + row % group * head_size
        values, one = array(pointer(place, kind), (dim,)), array(pointer(units + row * 4, _SINGLE), (1,))
        one[0] = np.float32(1)
        if stored_size(kind, operand) == 1:
            given = place, out + row * width * 2, dim, units + row * 4, kind
            call_where(_gather_whole, given, operand, _SHORT)
        elif size_of(operand) == size_of(kind):
            for index in range(dim):
                held[row, index] = values[index]
        else:
            for index in range(dim):
                held[row, index] = narrow(widen(values[index]), operand)
        if width > dim:
            held[row, dim] = operand


@serial_in_order
def _gather_whole(source: int, out: int, dim: int, unit: int, kind: Any) -> None:
    """A query beside keys in bytes: int16, what 1 of them stands for to `unit`."""
    spread, one = room(MOST_DIM, _SINGLE), array(pointer(unit, _SINGLE), (1,))
    held = array(pointer(out, np.int16(0)), (dim,))
    one[0] = spread_out(source, spread, dim, True, kind)
    one[0] *= whole_numbers(spread, dim, np.float32(min(32767, 2**31 // 128 // dim)))  # no sum is above 2 ** 31
    for index in range(dim):
        held[index] = np.int16(spread[index])


@serial_in_order
def spread_out(source: int, out: Any, dim: int, spread: bool, kind: Any) -> np.float32:
    """out = a query, key or value; to `spread`, times Hadamard's matrix in blocks of a power of two from sixteen on, by
    the inverse of whose size, returned, products of two such vectors are to be multiplied. What is large in one
    dimension is then a part of all of its block, and steps of eight bits become smaller (S. Ashkboos: QuaRot, 2024)."""
    values, half = array(pointer(source, kind), (dim,)), 1
    if spread and dim % LANES == 0:
        half = LANES
        for first in range(0, dim, LANES):
            spread_lanes(source + first * size_of(kind), out.ctypes.data + first * 4, kind)
    else:
        for index in range(dim):
            out[index] = widen(values[index])
    while half > 1 and dim % (2 * half) == 0:
        for begin in range(0, dim, 2 * half):
            for index in range(begin, begin + half):
                low, high = out[index], out[index + half]
                out[index], out[index + half] = low + high, low - high
        half *= 2
    return np.float32(1) / np.float32(half)


@serial_in_order
def whole_numbers(values: Any, dim: int, most: np.float32) -> np.float32:
    """Make whole numbers of float32 `values`, the largest of them `most`; returns what 1 of these stands for, which
    is not finite if one of them is not. There is room for sixteen more."""
    for index in range(dim, dim + LANES):
        values[index] = np.float32(0)
    largest = magnitude(values.ctypes.data, dim + LANES - 1)
    factor = most / largest if largest > np.float32(1e-30) else np.float32(0)
    for index in range(dim):
        values[index] = np.rint(values[index] * factor)
    return largest / most


@serial_in_order
def attend_block(
    item: int, head: int, block: int, last: int, keys: int, values: int, rows: int, group: int, layer: int,
    scratch: int, kind: Any, lanes: Any, operand: Any,
) -> None:  # fmt: skip
    """Keys from the item's first, or `block`, up to `last` or the end of the block; `keys`, `values`: their tiles."""
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    own = array(pointer(item, _WHOLE), (fields.ITEM_FIELDS,))
    places = fields.scratch_places(rows, spec[fields.KEY_DIM], spec[fields.VALUE_DIM])
    scores, weights = scratch + places[fields.SCORE_ROWS], scratch + places[fields.WEIGHT_ROWS]
    sums, state = scratch + places[fields.SUMS], scratch + places[fields.STATE]
    wide = spec[fields.LANES]
    begin, end = (max(own[fields.BEGIN], block) - block) // wide, (min(last, block + BLOCK) - block - 1) // wide + 1
    stored = stored_size(kind, operand)
    steps = (spec[fields.KEY_DIM] * max(stored, 2) + 3) // 4
    query_size = (spec[fields.KEY_DIM] + spec[fields.KEY_DIM] % 2) * size_of(operand)
    to = scores + begin * wide * 4
    by_unit = UNIT and size_of(operand) == stored == 2 and takes_unit(spec[fields.KEY_DIM], spec[fields.VALUE_DIM])
    if by_unit:
        score_block_by_unit(rows, scratch, query_size, keys, end - begin, spec[fields.KEY_DIM], to)
    else:
        _score_block(rows, scratch, query_size, keys, end - begin, steps, to, wide, kind, lanes, operand)
    numbers = array(pointer(spec[fields.NUMBERS], _SINGLE), (2,))
    width = BLOCK * 2 if size_of(operand) == 2 else SCORES * 4
    to = weights if size_of(operand) == 2 else scores
    there = min(last, block + BLOCK) - block
    units = array(pointer(state + rows * 6 * 4, _SINGLE), (rows,))
    for row in range(rows):
        place = scores + row * (SCORES * 4)
        scale = numbers[fields.SCALE] * units[row] * np.float32(LOG2E)
        if numbers[fields.SOFT_CAP] > 0:
            softcap(place, numbers[fields.SCALE] * units[row], numbers[fields.SOFT_CAP])
            scale = np.float32(1)
        position = own[fields.POSITION] + row // group - block
        low = max(own[fields.BEGIN] - block, 0)
        if spec[fields.WINDOW] > 0:
            low = max(low, position - spec[fields.WINDOW] + 1)
        high = min(position + spec[fields.LATER] + own[fields.BEYOND], min(own[fields.END] - block, BLOCK) - 1) + 1
        at = state + row * 4
        made = place if stored == 1 else to + row * width
        softmax(there, place, made, low, high, scale, at, at + rows * 4, at + rows * 8, operand)
        if stored == 1:
            of_tile, first = spec[fields.VALUE_DIM] * wide, begin * wide
            whole_weights(place + first * 4, values, of_tile, end - begin, to + row * width + first * 2, at + rows * 12)
    to += begin * wide * size_of(operand)
    rest, count, dim, decay = there - (end - 1) * wide, end - begin, spec[fields.VALUE_DIM], state + rows * 8
    if spec[fields.POOL_VALUES] == 0:
        call_rare(_turn_values, (keys, values, count, rest, layer, scratch + places[fields.SIZE], kind))
    if by_unit:
        sum_values_by_unit(rows, to, width, values, count, rest, dim, sums, decay)
    else:
        _sum_values(rows, to, width, values, count, rest, wide, dim, sums, decay, kind, lanes, operand)


@serial_in_order
def _turn_values(keys: int, values: int, count: int, rest: int, layer: int, to: int, kind: Any) -> None:
    """Write tiles of values, the last numbers of the keys in `count` tiles, from `to` on, and their addresses to
    `values`. The last tile has `rest` keys."""
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    lanes, dim, size = spec[fields.LANES], spec[fields.VALUE_DIM], size_of(kind)
    key_tiles, tiles = array(pointer(keys, _WHOLE), (count,)), array(pointer(values, _WHOLE), (count + AHEAD,))
    for index in range(count + AHEAD):  # those behind the last one are asked for ahead
        tiles[index] = to + index % count * lanes * dim * size
    for index in range(count):
        begin = key_tiles[index] + (spec[fields.KEY_DIM] - dim) * size * lanes
        if lanes == 1:
            tiles[index] = begin
        elif lanes == LANES and dim % LANES == 0:
            tile.turn_tile(begin, tiles[index], dim // LANES, kind)
        else:
            _turn_numbers(begin, tiles[index], dim, lanes, 2 if size == 2 else 1, kind)
    if size == 2 and lanes > 1 and rest % 2 == 1:  # what lies in the place of another key must not enter a sum
        words = array(pointer(tiles[count - 1] + rest // 2 * dim * 4, np.uint32(0)), (dim,))
        for index in range(dim):
            words[index] = words[index] & np.uint32(0xFFFF)


@serial_in_order
def _turn_numbers(source: int, out: int, dim: int, lanes: int, step: int, kind: Any) -> None:
    """`turn_tile` of any sizes. `step`: neighbours in a word, 2 in bfloat16, else 1."""
    given = array(pointer(source, kind), (dim // step, lanes, step))
    made = array(pointer(out, kind), (lanes // step, dim, step))
    for key in range(lanes):
        for place in range(dim):
            made[key // step, place, key % step] = given[place // step, key, place % step]


@serial_in_order
def find_tiles(
    row: int, head: int, begin: int, end: int, layer: int, step: int, keys: int, values: int, size: int
) -> int:
    """Write down the addresses of the tiles, of numbers of `size` bytes, in which keys [begin, end) of a row lie, and
    say how many there are."""
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    steps = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
    table = array(pointer(steps[fields.TABLE] + row * steps[fields.WIDTH] * 4, _PAGE), (steps[fields.WIDTH],))
    lanes, page_size = spec[fields.LANES], spec[fields.PAGE_SIZE]
    first, count = begin // lanes, (end - 1) // lanes - begin // lanes + 1
    key_tiles, value_tiles = array(pointer(keys, _WHOLE), (count,)), array(pointer(values, _WHOLE), (count,))
    key_size, value_size = fields.bytes_of_tiles(spec[fields.KEY_DIM], spec[fields.VALUE_DIM], lanes, size)
    for index in range(count):
        position = (first + index) * lanes
        page = head * spec[fields.PAGES] + table[position // page_size]
        place = page * (page_size // lanes) + position % page_size // lanes
        key_tiles[index] = spec[fields.POOL_KEYS] + place * key_size
        value_tiles[index] = spec[fields.POOL_VALUES] + place * value_size
    return int(count)


@serial_in_order
def _score_block(
    rows: int, query: int, query_size: int, tiles: int, count: int, steps: int, out: int, wide: int, kind: Any,
    lanes: Any, operand: Any,
) -> None:  # fmt: skip
    for first in range(0, count, 2):
        to = out + first * wide * 4
        tile.scores(rows, query, query_size, tiles + first * 8, steps, to, SCORES * 4, kind, lanes, operand)


@serial_in_order
def _sum_values(
    rows: int, weights: int, width: int, tiles: int, count: int, rest: int, wide: int, dim: int, sums: int, decay: int,
    kind: Any, lanes: Any, operand: Any,
) -> None:  # fmt: skip
    """sums = sums * decay + weights times the values of `count` tiles, of which the last has `rest` keys."""
    stored = stored_size(kind, operand)
    words = 2 if stored < 4 and wide > 1 else 1
    size, vector = dim * stored * words, 16 * stored * words
    steps, out_size = wide // words, fields.padded(dim) * 4
    whole = count if rest == wide or stored == 1 else count - 1  # bytes are finite, whosoever they are
    for part in range(2):
        at, first = tiles, weights
        number, length, shrink = whole, steps, decay
        if part == 1:
            at, first = tiles + whole * 8, weights + whole * wide * size_of(operand)
            number, length, shrink = count - whole, (rest + words - 1) // words, decay + rows * 4
        if part == 1 and number == 0:
            break
        column = 0
        while column < dim:
            place, to = column // 16 * vector, sums + column * 4
            given = (
                rows, first, width, at, number, length, size, place, to, out_size, shrink, kind, lanes, operand
            )  # fmt: skip
            if dim - column > 112 and rows <= 2:  # a decode row: memory is read in its own order
                _sum_columns128(given)
                column += 128
            elif dim - column > 48 and (WIDE or rows <= 2):
                _sum_columns64(given)
                column += 64
            else:
                _sum_columns16(given)
                column += 16


# Functions of their own, so that their sums stay in registers: as part of `_sum_values` a decode row's attention takes
# 4 % longer.


@serial_in_order
def _sum_columns128(given: Any) -> None:
    tile.sum_values128(*given)


@serial_in_order
def _sum_columns64(given: Any) -> None:
    tile.sum_values64(*given)


@serial_in_order
def _sum_columns16(given: Any) -> None:
    tile.sum_values16(*given)
