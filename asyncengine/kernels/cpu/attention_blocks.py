"""One block of keys: which tiles it lies in, the scores, the softmax, and the weighted values."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncengine.kernels.cpu import attention_tiles as tile
from asyncengine.kernels.cpu.attention_fields import (
    BEGIN,
    BEYOND,
    END,
    ITEM_FIELDS,
    KEY_DIM,
    LANES,
    LATER,
    LAYER_FIELDS,
    NUMBERS,
    PAGE_SIZE,
    PAGES,
    POOL_KEYS,
    POOL_VALUES,
    POSITION,
    SCALE,
    SCORE_ROWS,
    SOFT_CAP,
    STATE,
    STEP_FIELDS,
    SUMS,
    TABLE,
    VALUE_DIM,
    WEIGHT_ROWS,
    WIDTH,
    WINDOW,
    padded,
    scratch_places,
)  # fmt: skip
from asyncengine.kernels.cpu.attention_softmax import LOG2E, softcap, softmax
from asyncengine.kernels.cpu.attention_tiles import BLOCK, SCORES
from asyncengine.kernels.cpu.attention_unit import score_block_by_unit, sum_values_by_unit, takes_unit
from asyncengine.kernels.cpu.jit import array, narrow, pointer, serial_in_order, widen
from asyncengine.kernels.cpu.vectors import UNIT, WIDE, size_of

_WHOLE, _SINGLE, _PAGE = np.int64(0), np.float32(0), np.int32(0)


@serial_in_order
def gather(
    query: int, token_size: int, head_size: int, rows: int, group: int, dim: int, out: int, kind: Any, operand: Any
) -> None:
    """An item's queries, heads of the group innermost, side by side: as bits for `operand` uint16, else as float32."""
    width = dim + dim % 2
    held = array(pointer(out, operand), (rows, width))
    for row in range(rows):
        place = query + row // group * token_size + row % group * head_size
        values = array(pointer(place, kind), (dim,))
        if size_of(operand) == size_of(kind):
            for index in range(dim):
                held[row, index] = values[index]
        else:
            for index in range(dim):
                held[row, index] = narrow(widen(values[index]), operand)
        if width > dim:
            held[row, dim] = operand


@serial_in_order
def attend_block(
    item: int, head: int, block: int, last: int, keys: int, values: int, rows: int, group: int, layer: int,
    scratch: int, kind: Any, lanes: Any, operand: Any,
) -> None:  # fmt: skip
    """Keys from the item's first, or `block`, up to `last` or the end of the block; `keys`, `values`: their tiles."""
    spec = array(pointer(layer, _WHOLE), (LAYER_FIELDS,))
    own = array(pointer(item, _WHOLE), (ITEM_FIELDS,))
    places = scratch_places(rows, spec[KEY_DIM], spec[VALUE_DIM])
    scores, weights = scratch + places[SCORE_ROWS], scratch + places[WEIGHT_ROWS]
    sums, state = scratch + places[SUMS], scratch + places[STATE]
    wide = spec[LANES]
    begin, end = (max(own[BEGIN], block) - block) // wide, (min(last, block + BLOCK) - block - 1) // wide + 1
    steps = (spec[KEY_DIM] * size_of(kind) + 3) // 4
    query_size = (spec[KEY_DIM] + spec[KEY_DIM] % 2) * size_of(operand)
    to = scores + begin * wide * 4
    by_unit = UNIT and size_of(operand) == 2 and takes_unit(spec[KEY_DIM], spec[VALUE_DIM])
    if by_unit:
        score_block_by_unit(rows, scratch, query_size, keys, end - begin, spec[KEY_DIM], to)
    else:
        _score_block(rows, scratch, query_size, keys, end - begin, steps, to, wide, kind, lanes, operand)
    numbers = array(pointer(spec[NUMBERS], _SINGLE), (2,))
    width = BLOCK * 2 if size_of(operand) == 2 else SCORES * 4
    to = weights if size_of(operand) == 2 else scores
    there = min(last, block + BLOCK) - block
    for row in range(rows):
        place = scores + row * (SCORES * 4)
        scale = numbers[SCALE] * np.float32(LOG2E)
        if numbers[SOFT_CAP] > 0:
            softcap(place, numbers[SCALE], numbers[SOFT_CAP])
            scale = np.float32(1)
        position = own[POSITION] + row // group - block
        low = max(own[BEGIN] - block, 0)
        if spec[WINDOW] > 0:
            low = max(low, position - spec[WINDOW] + 1)
        high = min(position + spec[LATER] + own[BEYOND], min(own[END] - block, BLOCK) - 1) + 1
        at = state + row * 4
        softmax(there, place, to + row * width, low, high, scale, at, at + rows * 4, at + rows * 8, operand)
    to += begin * wide * size_of(operand)
    rest, count, dim, decay = there - (end - 1) * wide, end - begin, spec[VALUE_DIM], state + rows * 8
    if by_unit:
        sum_values_by_unit(rows, to, width, values, count, rest, dim, sums, decay)
    else:
        _sum_values(rows, to, width, values, count, rest, wide, dim, sums, decay, kind, lanes, operand)


@serial_in_order
def find_tiles(
    row: int, head: int, begin: int, end: int, layer: int, step: int, keys: int, values: int, kind: Any
) -> int:
    """Write down the addresses of the tiles in which keys [begin, end) of a row lie, and say how many there are."""
    spec = array(pointer(layer, _WHOLE), (LAYER_FIELDS,))
    steps = array(pointer(step, _WHOLE), (STEP_FIELDS,))
    table = array(pointer(steps[TABLE] + row * steps[WIDTH] * 4, _PAGE), (steps[WIDTH],))
    lanes, page_size = spec[LANES], spec[PAGE_SIZE]
    first, count = begin // lanes, (end - 1) // lanes - begin // lanes + 1
    key_tiles, value_tiles = array(pointer(keys, _WHOLE), (count,)), array(pointer(values, _WHOLE), (count,))
    size = size_of(kind)
    key_size = (spec[KEY_DIM] * size + 3) // 4 * 4 * lanes
    value_size = spec[VALUE_DIM] * size * lanes
    for index in range(count):
        position = (first + index) * lanes
        page = head * spec[PAGES] + table[position // page_size]
        place = page * (page_size // lanes) + position % page_size // lanes
        key_tiles[index] = spec[POOL_KEYS] + place * key_size
        value_tiles[index] = spec[POOL_VALUES] + place * value_size
    return int(count)


@serial_in_order
def _score_block(
    rows: int, query: int, query_size: int, tiles: int, count: int, steps: int, out: int, wide: int, kind: Any,
    lanes: Any, operand: Any,
) -> None:  # fmt: skip
    size = SCORES * 4
    for first in range(0, count, 2):
        at, to = tiles + first * 8, out + first * wide * 4
        row = 0
        while rows - row >= tile.MOST:
            own = query + row * query_size
            tile.scores_most(own, query_size, at, steps, to + row * size, size, kind, lanes, operand)
            row += tile.MOST
        if rows - row >= 4:
            tile.scores4(query + row * query_size, query_size, at, steps, to + row * size, size, kind, lanes, operand)
            row += 4
        if rows - row >= 2:
            tile.scores2(query + row * query_size, query_size, at, steps, to + row * size, size, kind, lanes, operand)
            row += 2
        if rows > row:
            tile.scores1(query + row * query_size, query_size, at, steps, to + row * size, size, kind, lanes, operand)


@serial_in_order
def _sum_values(
    rows: int, weights: int, width: int, tiles: int, count: int, rest: int, wide: int, dim: int, sums: int, decay: int,
    kind: Any, lanes: Any, operand: Any,
) -> None:  # fmt: skip
    """sums = sums * decay + weights times the values of `count` tiles, of which the last has `rest` keys."""
    words = 2 if size_of(kind) == 2 and wide > 1 else 1
    size, vector = dim * size_of(kind) * words, 16 * size_of(kind) * words
    steps, out_size = wide // words, padded(dim) * 4
    whole = count if rest == wide else count - 1
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
            if dim - column > 112 and rows <= 2:  # a decode row: memory is read in its own order
                _sum_columns128(
                    rows, first, width, at, number, length, size, place, to, out_size, shrink, kind, lanes, operand
                )
                column += 128
            elif dim - column > 48 and (WIDE or rows <= 2):
                _sum_columns64(
                    rows, first, width, at, number, length, size, place, to, out_size, shrink, kind, lanes, operand
                )
                column += 64
            else:
                _sum_columns16(
                    rows, first, width, at, number, length, size, place, to, out_size, shrink, kind, lanes, operand
                )
                column += 16


# Functions of their own, so that their sums stay in registers: as part of `_sum_values` a decode row's attention takes
# 4 % longer.


@serial_in_order
def _sum_columns128(
    rows: int, weights: int, width: int, tiles: int, count: int, steps: int, size: int, column: int, out: int,
    out_size: int, decay: int, kind: Any, lanes: Any, operand: Any,
) -> None:  # fmt: skip
    tile.sum_values128(
        rows, weights, width, tiles, count, steps, size, column, out, out_size, decay, kind, lanes, operand
    )


@serial_in_order
def _sum_columns64(
    rows: int, weights: int, width: int, tiles: int, count: int, steps: int, size: int, column: int, out: int,
    out_size: int, decay: int, kind: Any, lanes: Any, operand: Any,
) -> None:  # fmt: skip
    tile.sum_values64(
        rows, weights, width, tiles, count, steps, size, column, out, out_size, decay, kind, lanes, operand
    )


@serial_in_order
def _sum_columns16(
    rows: int, weights: int, width: int, tiles: int, count: int, steps: int, size: int, column: int, out: int,
    out_size: int, decay: int, kind: Any, lanes: Any, operand: Any,
) -> None:  # fmt: skip
    tile.sum_values16(
        rows, weights, width, tiles, count, steps, size, column, out, out_size, decay, kind, lanes, operand
    )
