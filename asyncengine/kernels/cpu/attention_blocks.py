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
    hadamard_lanes,
    magnitude,
    quantize_weights,
    softcap,
    softmax,
    store_scaled,
)
from asyncengine.kernels.cpu.attention_tiles import AHEAD, BLOCK, SCORES, stored_size
from asyncengine.kernels.cpu.calls import call_rare, call_where
from asyncengine.kernels.cpu.intrinsics import INT64, emitted
from asyncengine.kernels.cpu.jit import array, inline, narrow, pointer, room, serial_in_order, widen
from asyncengine.kernels.cpu.vectors import LANES, LINE, LONG, UNIT, WIDE, load, size_of

# The two products of attention by the CPU's matrix unit (Intel's AMX), for tiles of sixteen keys in bfloat16.

DIMENSIONS = 32
"""Dimensions of keys in one product of the matrix unit: 64 bytes of bfloat16."""
_KEYS = 16
_TOGETHER = 4
"""Tiles of sums that products are added to in turns, since a product waits for the one before it in its sum."""


def _prefetch(builder: Any, enabled: Any, address: Any, lines: int, stride: Any) -> None:
    """Prefetch `lines` cache lines, `stride` bytes apart, if `enabled` is not 0."""
    with builder.if_then(builder.icmp_signed("!=", enabled, LONG(0))):
        for line in range(lines):
            vectors.prefetch(builder, builder.add(address, builder.mul(stride, LONG(line))))


def _make_scores(count: int) -> Any:
    """scores(query, query_size, tiles, steps, out, out_size, prefetches): queries times `count` tiles of keys.

    `query`, `tiles` and `out` are addresses: `query_size` and `out_size` are bytes of a row, `tiles` lists those of the
    tiles, `out` is float32. A step is of `DIMENSIONS`. `prefetches`: 1 to prefetch the tiles that follow, else 0.
    """

    @emitted(*[INT64] * 7)
    def scores(
        builder: Any, query: Any, query_size: Any, tiles: Any, steps: Any, out: Any, out_size: Any, prefetches: Any
    ) -> None:
        key_tiles = [load(builder, builder.add(tiles, LONG(8 * index)), LONG) for index in range(count)]
        later_tiles = [load(builder, builder.add(tiles, LONG(8 * (index + AHEAD))), LONG) for index in range(count)]
        for index in range(count):
            matrix_unit.zero_tile(builder, index)
        with cgutils.for_range(builder, steps) as loop:
            matrix_unit.load_tile(
                builder,
                matrix_unit.X[0],
                builder.add(query, builder.mul(loop.index, LONG(matrix_unit.STEP))),
                query_size,
            )
            begin = builder.mul(loop.index, LONG(DIMENSIONS // 2 * LINE))
            for index, key_tile in enumerate(key_tiles):
                register = matrix_unit.WEIGHTS[index % 2]
                matrix_unit.load_tile(builder, register, builder.add(key_tile, begin), LONG(LINE))
                _prefetch(builder, prefetches, builder.add(later_tiles[index], begin), DIMENSIONS // 2, LONG(LINE))
                matrix_unit.multiply_tiles(builder, "bf16ps", index, matrix_unit.X[0], register)
        for index in range(count):
            matrix_unit.store_tile(builder, index, builder.add(out, LONG(index * LINE)), out_size)

    return scores


def _make_sum_values(blocks: int) -> Any:
    """sum_values(weights, weights_size, tiles, count, size, column, out, out_size, prefetches): out [rows, 16 * blocks]
    += weights times `count` tiles of values, `column` bytes into each step of `size` bytes."""

    @emitted(*[INT64] * 9)
    def sum_values(
        builder: Any, weights: Any, weights_size: Any, tiles: Any, count: Any, size: Any, column: Any, out: Any,
        out_size: Any, prefetches: Any,
    ) -> None:  # fmt: skip
        targets = [builder.add(out, LONG(index * LINE)) for index in range(blocks)]
        for index, address in enumerate(targets):
            matrix_unit.load_tile(builder, index, address, out_size)
        with cgutils.for_range(builder, count) as loop:
            entry = builder.add(tiles, builder.mul(loop.index, LONG(8)))
            address, ahead = load(builder, entry, LONG), load(builder, builder.add(entry, LONG(8 * AHEAD)), LONG)
            weight_rows = builder.add(weights, builder.mul(loop.index, LONG(_KEYS * 2)))
            matrix_unit.load_tile(builder, matrix_unit.X[0], weight_rows, weights_size)
            for index in range(blocks):
                register = matrix_unit.WEIGHTS[index % 2]
                begin = builder.add(column, LONG(index * LINE))
                matrix_unit.load_tile(builder, register, builder.add(address, begin), size)
                _prefetch(builder, prefetches, builder.add(ahead, begin), _KEYS // 2, size)
                matrix_unit.multiply_tiles(builder, "bf16ps", index, matrix_unit.X[0], register)
        for index, address in enumerate(targets):
            matrix_unit.store_tile(builder, index, address, out_size)

    return sum_values


_scores1, _scores4 = _make_scores(1), _make_scores(_TOGETHER)
_values1, _values4 = _make_sum_values(1), _make_sum_values(_TOGETHER)


@inline
def takes_unit(key_dim: int, value_dim: int) -> bool:
    """Whether keys and values of these sizes fill the matrix unit's tiles."""
    return key_dim % DIMENSIONS == 0 and value_dim % _KEYS == 0


@serial_in_order
def score_block_by_unit(rows: int, query: int, query_size: int, tiles: int, count: int, dim: int, out: int) -> None:
    """out [rows, SCORES] = query [rows, dim] times `count` tiles of keys."""
    height, steps, size = min(rows, matrix_unit.ROWS), dim // DIMENSIONS, SCORES * 4
    prefetches = 1 if rows <= matrix_unit.ROWS else 0  # a decode row waits for memory
    matrix_unit.configure_unit(height, height, matrix_unit.STEP)
    first = 0
    while first < count:
        for turn in range((rows + matrix_unit.ROWS - 1) // matrix_unit.ROWS):
            row = min(turn * matrix_unit.ROWS, rows - height)
            query_rows, entries, target = query + row * query_size, tiles + first * 8, out + row * size + first * LINE
            if count - first >= _TOGETHER:
                _scores4(query_rows, query_size, entries, steps, target, size, prefetches)
            else:
                _scores1(query_rows, query_size, entries, steps, target, size, prefetches)
        first += _TOGETHER if count - first >= _TOGETHER else 1
    matrix_unit.release_unit()


@serial_in_order
def sum_values_by_unit(
    rows: int, weights: int, stride: int, tiles: int, count: int, rest: int, dim: int, sums: int, decay: int
) -> None:
    """sums = sums * decay + weights times the values of `count` tiles, of which the last has `rest` keys."""
    size = fields.padded(dim) * 4
    factors = array(pointer(decay, np.float32(0)), (rows,))
    for row in range(rows):
        store_scaled(sums + row * size, factors[row], sums + row * size, dim, np.float32(0))
    full = count if rest == _KEYS else count - 1
    if full > 0:
        _add_values(rows, weights, stride, tiles, full, _KEYS * 2, dim, sums)
    if full < count:
        _add_values(rows, weights + full * _KEYS * 2, stride, tiles + full * 8, 1, (rest + 1) // 2 * 4, dim, sums)
    matrix_unit.release_unit()


@serial_in_order
def _add_values(
    rows: int, weights: int, stride: int, tiles: int, count: int, keys_size: int, dim: int, sums: int
) -> None:
    """`keys_size`: bytes of a row of weights for the keys of a tile. The last tile of rows is a smaller one: moved back
    to overlap the one before, as in `score_block_by_unit`, it would add to the rows in both twice."""
    height, size = min(rows, matrix_unit.ROWS), fields.padded(dim) * 4
    turns, prefetches = (rows + height - 1) // height, 1 if rows <= matrix_unit.ROWS else 0
    matrix_unit.configure_unit(height, height, keys_size)
    for turn in range(turns):
        row, column = turn * height, 0
        if row + height > rows:
            matrix_unit.configure_unit(rows - row, rows - row, keys_size)
        while column < dim:
            weight_rows, target = weights + row * stride, sums + row * size + column * 4
            if dim - column >= _KEYS * _TOGETHER:
                _values4(weight_rows, stride, tiles, count, dim * 4, column * 4, target, size, prefetches)
                column += _KEYS * _TOGETHER
            else:
                _values1(weight_rows, stride, tiles, count, dim * 4, column * 4, target, size, prefetches)
                column += _KEYS


MOST_DIM = 1024 + LANES
"""The most dimensions of a query or value where keys and values are bytes: room for them is on the stack."""
_I64, _F32, _I32, _I16 = np.int64(0), np.float32(0), np.int32(0), np.int16(0)


@serial_in_order
def gather(
    query: int, token_size: int, head_size: int, rows: int, group: int, dim: int, out: int, scales: int, dtype: Any,
    operand: Any,
) -> None:  # fmt: skip
    """Copy an item's queries [rows, dim] side by side, heads of the group innermost: as bits for `operand` uint16, as
    float32, or quantized for int16. Writes the scales, one float32 a row, 1 but for int16, to `scales`."""
    width = dim + dim % 2
    gathered = array(pointer(out, operand), (rows, width))
    for row in range(rows):
        source = query + row // group * token_size + row % group * head_size
        values, scale = array(pointer(source, dtype), (dim,)), array(pointer(scales + row * 4, _F32), (1,))
        scale[0] = np.float32(1)
        if stored_size(dtype, operand) == 1:
            arguments = source, out + row * width * 2, dim, scales + row * 4, dtype
            call_where(_gather_quantized, arguments, operand, _I16)
        elif size_of(operand) == size_of(dtype):
            for index in range(dim):
                gathered[row, index] = values[index]
        else:
            for index in range(dim):
                gathered[row, index] = narrow(widen(values[index]), operand)
        if width > dim:
            gathered[row, dim] = operand


@serial_in_order
def _gather_quantized(source: int, out: int, dim: int, scale_address: int, dtype: Any) -> None:
    """Quantize a query, for keys in bytes, to int16; its scale, float32, goes to `scale_address`."""
    values, scale = room(MOST_DIM, _F32), array(pointer(scale_address, _F32), (1,))
    quantized = array(pointer(out, np.int16(0)), (dim,))
    scale[0] = apply_hadamard(source, values, dim, True, dtype)
    scale[0] *= quantize_vector(values, dim, np.float32(min(32767, 2**31 // 128 // dim)))  # sums must fit int32
    for index in range(dim):
        quantized[index] = np.int16(values[index])


@serial_in_order
def apply_hadamard(source: int, out: Any, dim: int, transform: bool, dtype: Any) -> np.float32:
    """out = a query, key or value, float32; if `transform`, times a Hadamard matrix in blocks of a power of two from 16
    on. Returns the inverse of the block's size, by which products of two such vectors must be multiplied. An outlier in
    one dimension is spread over its block, so that steps of eight bits become smaller (S. Ashkboos: QuaRot, 2024)."""
    values, half = array(pointer(source, dtype), (dim,)), 1
    if transform and dim % LANES == 0:
        half = LANES
        for first in range(0, dim, LANES):
            hadamard_lanes(source + first * size_of(dtype), out.ctypes.data + first * 4, dtype)
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
def quantize_vector(values: Any, dim: int, limit: np.float32) -> np.float32:
    """Round float32 `values` in place to whole numbers, the largest of them `limit`. Returns their scale, which is not
    finite if one of them is not. The array must have sixteen numbers more, which become 0."""
    for index in range(dim, dim + LANES):
        values[index] = np.float32(0)
    largest = magnitude(values.ctypes.data, dim + LANES - 1)
    factor = limit / largest if largest > np.float32(1e-30) else np.float32(0)
    for index in range(dim):
        values[index] = np.rint(values[index] * factor)
    return largest / limit


@serial_in_order
def attend_block(
    item: int, head: int, block: int, last: int, keys: int, values: int, rows: int, group: int, layer: int,
    scratch: int, dtype: Any, lanes: Any, operand: Any,
) -> None:  # fmt: skip
    """Attend to keys from the item's first, or `block`, up to `last` or the end of the block. `keys` and `values`:
    addresses of the lists of their tiles (`list_tiles`)."""
    spec = array(pointer(layer, _I64), (fields.LAYER_FIELDS,))
    entry = array(pointer(item, _I64), (fields.ITEM_FIELDS,))
    offsets = fields.scratch_offsets(rows, spec[fields.KEY_DIM], spec[fields.VALUE_DIM])
    scores, weights = scratch + offsets[fields.SCORE_ROWS], scratch + offsets[fields.WEIGHT_ROWS]
    sums, state = scratch + offsets[fields.SUMS], scratch + offsets[fields.STATE]
    span = spec[fields.LANES]
    begin, end = (max(entry[fields.BEGIN], block) - block) // span, (min(last, block + BLOCK) - block - 1) // span + 1
    stored = stored_size(dtype, operand)
    steps = (spec[fields.KEY_DIM] * max(stored, 2) + 3) // 4
    query_size = (spec[fields.KEY_DIM] + spec[fields.KEY_DIM] % 2) * size_of(operand)
    target = scores + begin * span * 4
    by_unit = UNIT and size_of(operand) == stored == 2 and takes_unit(spec[fields.KEY_DIM], spec[fields.VALUE_DIM])
    if by_unit:
        score_block_by_unit(rows, scratch, query_size, keys, end - begin, spec[fields.KEY_DIM], target)
    else:
        _score_block(rows, scratch, query_size, keys, end - begin, steps, target, span, dtype, lanes, operand)
    constants = array(pointer(spec[fields.NUMBERS], _F32), (2,))
    stride = BLOCK * 2 if size_of(operand) == 2 else SCORES * 4
    target = weights if size_of(operand) == 2 else scores
    key_count = min(last, block + BLOCK) - block
    query_scales = array(pointer(state + rows * 6 * 4, _F32), (rows,))
    for row in range(rows):
        score_row = scores + row * (SCORES * 4)
        scale = constants[fields.SCALE] * query_scales[row] * np.float32(LOG2E)
        if constants[fields.SOFT_CAP] > 0:
            softcap(score_row, constants[fields.SCALE] * query_scales[row], constants[fields.SOFT_CAP])
            scale = np.float32(1)
        position = entry[fields.POSITION] + row // group - block
        low = max(entry[fields.BEGIN] - block, 0)
        if spec[fields.WINDOW] > 0:
            low = max(low, position - spec[fields.WINDOW] + 1)
        high = min(position + spec[fields.LATER] + entry[fields.BEYOND], min(entry[fields.END] - block, BLOCK) - 1) + 1
        at = state + row * 4
        weight_row = score_row if stored == 1 else target + row * stride
        softmax(key_count, score_row, weight_row, low, high, scale, at, at + rows * 4, at + rows * 8, operand)
        if stored == 1:
            scales_offset, first = spec[fields.VALUE_DIM] * span, begin * span
            out = target + row * stride + first * 2
            quantize_weights(score_row + first * 4, values, scales_offset, end - begin, out, at + rows * 12)
    target += begin * span * size_of(operand)
    rest, count, dim, decay = key_count - (end - 1) * span, end - begin, spec[fields.VALUE_DIM], state + rows * 8
    if spec[fields.POOL_VALUES] == 0:
        call_rare(_transpose_values, (keys, values, count, rest, layer, scratch + offsets[fields.SIZE], dtype))
    if by_unit:
        sum_values_by_unit(rows, target, stride, values, count, rest, dim, sums, decay)
    else:
        _sum_values(rows, target, stride, values, count, rest, span, dim, sums, decay, dtype, lanes, operand)


@serial_in_order
def _transpose_values(keys: int, values: int, count: int, rest: int, layer: int, target: int, dtype: Any) -> None:
    """Write tiles of values, the last numbers of the keys in `count` tiles, from `target` on, and their addresses to
    `values`. The last tile has `rest` keys. For latent attention, whose pool has no values of its own."""
    spec = array(pointer(layer, _I64), (fields.LAYER_FIELDS,))
    lanes, dim, size = spec[fields.LANES], spec[fields.VALUE_DIM], size_of(dtype)
    key_tiles, tiles = array(pointer(keys, _I64), (count,)), array(pointer(values, _I64), (count + AHEAD,))
    for index in range(count + AHEAD):  # entries behind the last one are read for prefetches
        tiles[index] = target + index % count * lanes * dim * size
    for index in range(count):
        begin = key_tiles[index] + (spec[fields.KEY_DIM] - dim) * size * lanes
        if lanes == 1:
            tiles[index] = begin
        elif lanes == LANES and dim % LANES == 0:
            tile.transpose_tile(begin, tiles[index], dim // LANES, dtype)
        else:
            _transpose_numbers(begin, tiles[index], dim, lanes, 2 if size == 2 else 1, dtype)
    if size == 2 and lanes > 1 and rest % 2 == 1:  # the last word's other key is not of this sequence: perhaps a NaN
        words = array(pointer(tiles[count - 1] + rest // 2 * dim * 4, np.uint32(0)), (dim,))
        for index in range(dim):
            words[index] = words[index] & np.uint32(0xFFFF)


@serial_in_order
def _transpose_numbers(source: int, out: int, dim: int, lanes: int, step: int, dtype: Any) -> None:
    """`transpose_tile` for any sizes. `step`: neighbours in a word, 2 in bfloat16, else 1."""
    key_tile = array(pointer(source, dtype), (dim // step, lanes, step))
    value_tile = array(pointer(out, dtype), (lanes // step, dim, step))
    for key in range(lanes):
        for dimension in range(dim):
            value_tile[key // step, dimension, key % step] = key_tile[dimension // step, key, dimension % step]


@serial_in_order
def list_tiles(
    row: int, head: int, begin: int, end: int, layer: int, step: int, keys: int, values: int, size: int
) -> int:
    """List the addresses of the tiles, of numbers of `size` bytes, that hold keys [begin, end) of a row of the page
    table and their values, at `keys` and `values`, and return their number."""
    spec = array(pointer(layer, _I64), (fields.LAYER_FIELDS,))
    steps = array(pointer(step, _I64), (fields.STEP_FIELDS,))
    table = array(pointer(steps[fields.TABLE] + row * steps[fields.WIDTH] * 4, _I32), (steps[fields.WIDTH],))
    lanes, page_size = spec[fields.LANES], spec[fields.PAGE_SIZE]
    first, count = begin // lanes, (end - 1) // lanes - begin // lanes + 1
    key_tiles, value_tiles = array(pointer(keys, _I64), (count,)), array(pointer(values, _I64), (count,))
    key_size, value_size = fields.bytes_of_tiles(spec[fields.KEY_DIM], spec[fields.VALUE_DIM], lanes, size)
    for index in range(count):
        position = (first + index) * lanes
        page = head * spec[fields.PAGES] + table[position // page_size]
        tile_index = page * (page_size // lanes) + position % page_size // lanes
        key_tiles[index] = spec[fields.POOL_KEYS] + tile_index * key_size
        value_tiles[index] = spec[fields.POOL_VALUES] + tile_index * value_size
    return int(count)


@serial_in_order
def _score_block(
    rows: int, query: int, query_size: int, tiles: int, count: int, steps: int, out: int, span: int, dtype: Any,
    lanes: Any, operand: Any,
) -> None:  # fmt: skip
    for first in range(0, count, 2):
        target = out + first * span * 4
        tile.scores(rows, query, query_size, tiles + first * 8, steps, target, SCORES * 4, dtype, lanes, operand)


@serial_in_order
def _sum_values(
    rows: int, weights: int, stride: int, tiles: int, count: int, rest: int, span: int, dim: int, sums: int, decay: int,
    dtype: Any, lanes: Any, operand: Any,
) -> None:  # fmt: skip
    """sums = sums * decay + weights times the values of `count` tiles, of which the last has `rest` keys."""
    stored = stored_size(dtype, operand)
    packed = 2 if stored < 4 and span > 1 else 1
    size, vector = dim * stored * packed, 16 * stored * packed
    steps, out_size = span // packed, fields.padded(dim) * 4
    # keys beyond `rest` may be NaN, and 0 times NaN is NaN, so the last tile is summed apart. Bytes are always finite.
    full = count if rest == span or stored == 1 else count - 1
    for partial in range(2):
        entries, first = tiles, weights
        number, length, factors = full, steps, decay
        if partial == 1:
            entries, first = tiles + full * 8, weights + full * span * size_of(operand)
            number, length, factors = count - full, (rest + packed - 1) // packed, decay + rows * 4
        if partial == 1 and number == 0:
            break
        column = 0
        while column < dim:
            offset, target = column // 16 * vector, sums + column * 4
            arguments = (
                rows, first, stride, entries, number, length, size, offset, target, out_size, factors, dtype, lanes,
                operand,
            )  # fmt: skip
            if dim - column > 112 and rows <= 2:  # a decode row waits for memory, which is then read in its order
                _sum_columns128(arguments)
                column += 128
            elif dim - column > 48 and (WIDE or rows <= 2):
                _sum_columns64(arguments)
                column += 64
            else:
                _sum_columns16(arguments)
                column += 16


# Functions of their own, so that their sums stay in registers: inlined into `_sum_values`, they make a decode row's
# attention take 4 % longer.


@serial_in_order
def _sum_columns128(arguments: Any) -> None:
    tile.sum_values128(*arguments)


@serial_in_order
def _sum_columns64(arguments: Any) -> None:
    tile.sum_values64(*arguments)


@serial_in_order
def _sum_columns16(arguments: Any) -> None:
    tile.sum_values16(*arguments)
