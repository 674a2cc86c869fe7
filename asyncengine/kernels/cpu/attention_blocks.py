"""One block of keys: which tiles it lies in, the scores, the softmax, and the weighted values."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncengine.kernels.cpu import attention_tiles as tile
from asyncengine.kernels.cpu.attention_fields import (
    BEGIN,
    ITEM_FIELDS,
    KEY_DIM,
    LANES,
    LAYER_FIELDS,
    NUMBERS,
    PAGE_SIZE,
    PAGES,
    POOL_KEYS,
    POOL_VALUES,
    POSITION,
    STEP_FIELDS,
    TABLE,
    VALUE_DIM,
    WIDTH,
    WINDOW,
    padded,
    scratch_places,
)  # fmt: skip
from asyncengine.kernels.cpu.attention_softmax import LOG2E, soften, weigh
from asyncengine.kernels.cpu.attention_tiles import BLOCK, SCORES
from asyncengine.kernels.cpu.jit import array, narrow, pointer, serial_in_order, widen
from asyncengine.kernels.cpu.vectors import size_of

_WHOLE, _SINGLE, _PAGE = np.int64(0), np.float32(0), np.int32(0)


@serial_in_order
def gather(
    query: int, token_size: int, head_size: int, rows: int, group: int, dim: int, out: int, kind: Any, form: Any
) -> None:
    """An item's queries, heads of the group innermost, side by side: as bits for `form` uint16, else as float32."""
    width = dim + dim % 2
    held = array(pointer(out, form), (rows, width))
    for row in range(rows):
        place = query + row // group * token_size + row % group * head_size
        values = array(pointer(place, kind), (dim,))
        if size_of(form) == size_of(kind):
            for index in range(dim):
                held[row, index] = values[index]
        else:
            for index in range(dim):
                held[row, index] = narrow(widen(values[index]), form)
        if width > dim:
            held[row, dim] = form


@serial_in_order
def attend_block(
    item: int, head: int, block: int, last: int, keys: int, values: int, rows: int, group: int, layer: int,
    scratch: int, kind: Any, lanes: Any, form: Any,
) -> None:  # fmt: skip
    """Keys from the item's first, or `block`, up to `last` or the end of the block; `keys`, `values`: their tiles."""
    known = array(pointer(layer, _WHOLE), (LAYER_FIELDS,))
    own = array(pointer(item, _WHOLE), (ITEM_FIELDS,))
    places = scratch_places(rows, known[KEY_DIM], known[VALUE_DIM])
    scores, weights, sums, state = scratch + places[1], scratch + places[2], scratch + places[3], scratch + places[5]
    wide = known[LANES]
    begin, end = (max(own[BEGIN], block) - block) // wide, (min(last, block + BLOCK) - block - 1) // wide + 1
    steps = (known[KEY_DIM] * size_of(kind) + 3) // 4
    query_size = (known[KEY_DIM] + known[KEY_DIM] % 2) * size_of(form)
    to = scores + begin * wide * 4
    _score_block(rows, scratch, query_size, keys, end - begin, steps, to, wide, kind, lanes, form)
    numbers = array(pointer(known[NUMBERS], _SINGLE), (2,))
    width = BLOCK * 2 if size_of(form) == 2 else SCORES * 4
    to = weights if size_of(form) == 2 else scores
    for row in range(rows):
        place = scores + row * (SCORES * 4)
        scale = numbers[0] * np.float32(LOG2E)
        if numbers[1] > 0:
            soften(place, numbers[0], numbers[1])
            scale = np.float32(1)
        position = own[POSITION] + row // group - block
        low = max(own[BEGIN] - block, 0)
        if known[WINDOW] > 0:
            low = max(low, position - known[WINDOW] + 1)
        high = min(position, BLOCK - 1) + 1
        at = state + row * 4
        weigh(place, to + row * width, low, high, scale, at, at + rows * 4, at + rows * 8, form)
    to += begin * wide * size_of(form)
    rest = min(last, block + BLOCK) - block - (end - 1) * wide
    _sum_values(
        rows, to, width, values, end - begin, rest, wide, known[VALUE_DIM], sums, state + rows * 8, kind, lanes, form
    )


@serial_in_order
def find_tiles(
    row: int, head: int, begin: int, end: int, layer: int, step: int, keys: int, values: int, kind: Any
) -> int:
    """Write down the addresses of the tiles in which keys [begin, end) of a row lie, and say how many there are."""
    known = array(pointer(layer, _WHOLE), (LAYER_FIELDS,))
    steps = array(pointer(step, _WHOLE), (STEP_FIELDS,))
    table = array(pointer(steps[TABLE] + row * steps[WIDTH] * 4, _PAGE), (steps[WIDTH],))
    lanes, page_size = known[LANES], known[PAGE_SIZE]
    first, count = begin // lanes, (end - 1) // lanes - begin // lanes + 1
    key_tiles, value_tiles = array(pointer(keys, _WHOLE), (count,)), array(pointer(values, _WHOLE), (count,))
    size = size_of(kind)
    key_size = (known[KEY_DIM] * size + 3) // 4 * 4 * lanes
    value_size = known[VALUE_DIM] * size * lanes
    for index in range(count):
        position = (first + index) * lanes
        page = head * known[PAGES] + table[position // page_size]
        place = page * (page_size // lanes) + position % page_size // lanes
        key_tiles[index] = known[POOL_KEYS] + place * key_size
        value_tiles[index] = known[POOL_VALUES] + place * value_size
    return int(count)


@serial_in_order
def _score_block(
    rows: int, query: int, query_size: int, tiles: int, count: int, steps: int, out: int, wide: int, kind: Any,
    lanes: Any, form: Any,
) -> None:  # fmt: skip
    size = SCORES * 4
    for first in range(0, count, 2):
        at, to = tiles + first * 8, out + first * wide * 4
        row = 0
        while rows - row >= 8:
            tile.scores8(query + row * query_size, query_size, at, steps, to + row * size, size, kind, lanes, form)
            row += 8
        if rows - row >= 4:
            tile.scores4(query + row * query_size, query_size, at, steps, to + row * size, size, kind, lanes, form)
            row += 4
        if rows - row >= 2:
            tile.scores2(query + row * query_size, query_size, at, steps, to + row * size, size, kind, lanes, form)
            row += 2
        if rows > row:
            tile.scores1(query + row * query_size, query_size, at, steps, to + row * size, size, kind, lanes, form)


@serial_in_order
def _sum_values(
    rows: int, weights: int, width: int, tiles: int, count: int, rest: int, wide: int, dim: int, sums: int, decay: int,
    kind: Any, lanes: Any, form: Any,
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
            at, first = tiles + whole * 8, weights + whole * wide * size_of(form)
            number, length, shrink = count - whole, (rest + words - 1) // words, decay + rows * 4
        if part == 1 and number == 0:
            break
        column = 0
        while column < dim:
            place, to = column // 16 * vector, sums + column * 4
            if dim - column > 112 and rows <= 2:  # a decode row: memory is read in its own order
                _whole(rows, first, width, at, number, length, size, place, to, out_size, shrink, kind, lanes, form)
                column += 128
            elif dim - column > 48:
                _wide(rows, first, width, at, number, length, size, place, to, out_size, shrink, kind, lanes, form)
                column += 64
            else:
                _thin(rows, first, width, at, number, length, size, place, to, out_size, shrink, kind, lanes, form)
                column += 16


@serial_in_order
def _wide(
    rows: int, weights: int, width: int, tiles: int, count: int, steps: int, size: int, column: int, out: int,
    out_size: int, decay: int, kind: Any, lanes: Any, form: Any,
) -> None:  # fmt: skip
    row = 0
    while rows - row >= 4:
        at, to, shrink = weights + row * width, out + row * out_size, decay + row * 4
        tile.wide_values4(at, width, tiles, count, steps, size, column, to, out_size, shrink, kind, lanes, form)
        row += 4
    if rows - row >= 2:
        at, to, shrink = weights + row * width, out + row * out_size, decay + row * 4
        tile.wide_values2(at, width, tiles, count, steps, size, column, to, out_size, shrink, kind, lanes, form)
        row += 2
    if rows - row >= 1:
        at, to, shrink = weights + row * width, out + row * out_size, decay + row * 4
        tile.wide_values1(at, width, tiles, count, steps, size, column, to, out_size, shrink, kind, lanes, form)
        row += 1


@serial_in_order
def _thin(
    rows: int, weights: int, width: int, tiles: int, count: int, steps: int, size: int, column: int, out: int,
    out_size: int, decay: int, kind: Any, lanes: Any, form: Any,
) -> None:  # fmt: skip
    row = 0
    while rows - row >= 4:
        at, to, shrink = weights + row * width, out + row * out_size, decay + row * 4
        tile.values4(at, width, tiles, count, steps, size, column, to, out_size, shrink, kind, lanes, form)
        row += 4
    if rows - row >= 2:
        at, to, shrink = weights + row * width, out + row * out_size, decay + row * 4
        tile.values2(at, width, tiles, count, steps, size, column, to, out_size, shrink, kind, lanes, form)
        row += 2
    if rows - row >= 1:
        at, to, shrink = weights + row * width, out + row * out_size, decay + row * 4
        tile.values1(at, width, tiles, count, steps, size, column, to, out_size, shrink, kind, lanes, form)
        row += 1


@serial_in_order
def _whole(
    rows: int, weights: int, width: int, tiles: int, count: int, steps: int, size: int, column: int, out: int,
    out_size: int, decay: int, kind: Any, lanes: Any, form: Any,
) -> None:  # fmt: skip
    if rows == 2:
        tile.whole_values2(weights, width, tiles, count, steps, size, column, out, out_size, decay, kind, lanes, form)
    else:
        tile.whole_values1(weights, width, tiles, count, steps, size, column, out, out_size, decay, kind, lanes, form)
