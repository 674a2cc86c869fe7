"""Paged attention by compiled kernels, for one dtype and one size of pages: the forms that serve these are chosen here.

Layers and steps are addresses of the records that `attention_fields` describes; sizes of steps in memory are in bytes.

The work is a list of items: queries of one row of the batch that follow each other, with a range of keys. A decode row
is one item, or several if it is long; a prompt chunk is cut into items of some queries each. An item times a kv head
is a unit: it is computed by one thread, all query heads of the kv head together, so that a key is loaded once for all.

Keys are taken in splits of `SPLIT` positions, each with its own softmax, which are then joined in order; both the
splits and the blocks in them begin at fixed positions. So a query's result depends on its own keys alone: not on the
batch, on the number of threads, on the chunk it came in, or on whether its splits were one item or several
(the idea of splitting: T. Dao et al., Flash-Decoding, 2023).

Nothing is read beyond a row's own keys but the rest of their tile, and that never enters a sum.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch

from asyncengine.kernels.cpu import attention_fields as fields
from asyncengine.kernels.cpu.attention_blocks import (
    MOST_DIM,
    apply_hadamard,
    attend_block,
    gather,
    list_tiles,
    quantize_vector,
)
from asyncengine.kernels.cpu.attention_softmax import LOG2E, store_scaled
from asyncengine.kernels.cpu.attention_tiles import AHEAD, BLOCK, FLOOR, LANES, stored_size
from asyncengine.kernels.cpu.calls import address_of, call, call_rare, call_where, name_of, parallel_for
from asyncengine.kernels.cpu.jit import array, narrow, pointer, room, serial, serial_in_order, tag_of
from asyncengine.kernels.cpu.qk_norm_rope import prepare_head
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of
from asyncengine.kernels.cpu.vectors import cpu_has, size_of

_WHOLE, _WORD, _SINGLE = np.int64(0), np.uint32(0), np.float32(0)
_HALF, _SHORT, _BYTE = np.uint16(0), np.int16(0), np.int8(0)


@serial_in_order
def attend(
    query: int, token_size: int, head_size: int, out: int, layer: int, step: int, dtype: Any, lanes: Any, operand: Any,
    team: int,
) -> None:  # fmt: skip
    """out [tokens, heads, value dim] of query [tokens, heads, key dim], whose steps are given in bytes. Addresses.

    Results of long rows are those of their splits, joined.
    """
    step_fields = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
    arguments = (query, token_size, head_size, out, layer, step, dtype, lanes, operand)
    parallel_for(_attend_units, team, step_fields[fields.PIECES], arguments)
    if step_fields[fields.NUM_JOINS] > 0:
        call_rare(join, (out, layer, step, dtype, step_fields[fields.NUM_JOINS], team))


@serial_in_order
def join(out: int, layer: int, step: int, dtype: Any, pieces: int, team: int) -> None:
    """Join the results of a long row's splits, for each long row. Without pieces, do nothing."""
    parallel_for(_join_units, team, pieces, (out, layer, step, dtype))


@serial_in_order
def _attend_units(
    piece: int, pieces: int, worker: int,
    query: int, token_size: int, head_size: int, out: int, layer: int, step: int, dtype: Any,
    lanes: Any, operand: Any,
) -> None:  # fmt: skip
    steps = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
    bounds = array(pointer(steps[fields.BOUNDS], _WHOLE), (piece + 2,))
    items, heads = steps[fields.NUM_ITEMS], array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))[fields.KV_HEADS]
    scratch = steps[fields.SCRATCH] + worker * steps[fields.SCRATCH_SIZE]
    for unit in range(bounds[piece], bounds[piece + 1]):
        head, index = unit // items, unit % items
        item, following = steps[fields.ITEMS] + index * (fields.ITEM_FIELDS * 8), steps[fields.ITEMS]
        if index + 1 < items:
            following = item + fields.ITEM_FIELDS * 8
        after = min((unit + 1) // items, heads - 1)
        _attend_unit(
            item, head, following, after, query, token_size, head_size, out, layer, step, scratch, dtype, lanes, operand
        )


@serial_in_order
def _attend_unit(
    item: int, head: int, following: int, after: int, query: int, token_size: int, head_size: int, out: int,
    layer: int, step: int, scratch: int, dtype: Any, lanes: Any, operand: Any,
) -> None:  # fmt: skip
    """One item and kv head. `following`, `after`: the item and kv head that this thread turns to next."""
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    entry = array(pointer(item, _WHOLE), (fields.ITEM_FIELDS,))
    group = spec[fields.HEADS] // spec[fields.KV_HEADS]
    rows = entry[fields.COUNT] * group
    value_dim = spec[fields.VALUE_DIM]
    begins = fields.scratch_offsets(rows, spec[fields.KEY_DIM], value_dim)
    sums, joined, state = scratch + begins[fields.SUMS], scratch + begins[fields.JOINED], scratch + begins[fields.STATE]
    size, stored = size_of(dtype), stored_size(dtype, operand)
    first = query + entry[fields.TOKEN] * token_size + head * group * head_size
    units = state + rows * 6 * 4
    gather(first, token_size, head_size, rows, group, spec[fields.KEY_DIM], scratch, units, dtype, operand)
    begin, end = entry[fields.BEGIN] // fields.SPLIT, (entry[fields.END] - 1) // fields.SPLIT + 1
    total = state + rows * 4 * 4
    keys, values = scratch + begins[fields.TILE_LISTS], scratch + begins[fields.TILE_LISTS] + fields.TILES * 8
    array(pointer(state + rows * 3 * 4, _SINGLE), (rows,))[:] = np.float32(1)
    if end - begin > 1:
        _clear(joined, total, rows, value_dim)
    for split in range(begin, end):
        _clear(sums, state, rows, value_dim)
        last = min(entry[fields.END], (split + 1) * fields.SPLIT)
        first = max(entry[fields.BEGIN], split * fields.SPLIT)
        list_tiles(entry[fields.ROW], head, first, last, layer, step, keys, values, stored)
        _look_ahead(item, head, following, after, first, last, layer, step, keys, values, stored)
        for block in range(first // BLOCK * BLOCK, last, BLOCK):
            at = (max(block, first) // spec[fields.LANES] - first // spec[fields.LANES]) * 8
            call(
                attend_block,
                (item, head, block, last, keys + at, values + at, rows, group, layer, scratch, dtype, lanes, operand),
            )
        if end - begin > 1:
            _join(total, joined, state, sums, rows, value_dim)
    if end - begin > 1:
        sums, state = joined, total
    if entry[fields.PARTIAL] < 0:
        target = out + (entry[fields.TOKEN] * spec[fields.HEADS] + head * group) * value_dim * size
        _finish(target, state, sums, rows, group, head, layer, dtype)
    else:
        steps = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
        partial_size = fields.partial_floats(group, value_dim)
        target = steps[fields.PARTIALS] + (entry[fields.PARTIAL] * spec[fields.KV_HEADS] + head) * partial_size * 4
        _clear(target + 8 * rows, target, rows, value_dim)
        _join(target, target + 8 * rows, state, sums, rows, value_dim)


@serial_in_order
def _look_ahead(
    item: int, head: int, following: int, after: int, first: int, last: int, layer: int, step: int, keys: int,
    values: int, stored: int,
) -> None:  # fmt: skip
    """List the tiles to prefetch behind those of keys [first, last): `AHEAD` of them at least."""
    lanes = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))[fields.LANES]
    entry = array(pointer(item, _WHOLE), (fields.ITEM_FIELDS,))
    other = array(pointer(following, _WHOLE), (fields.ITEM_FIELDS,))
    count = (last - 1) // lanes - first // lanes + 1
    behind, distance = count * 8, AHEAD * lanes
    if last < entry[fields.END]:
        end = min(entry[fields.END], last + distance)
        listed = list_tiles(entry[fields.ROW], head, last, end, layer, step, keys + behind, values + behind, stored)
    else:
        begin = other[fields.BEGIN]
        end = min(other[fields.END], begin // lanes * lanes + distance)
        listed = list_tiles(other[fields.ROW], after, begin, end, layer, step, keys + behind, values + behind, stored)
    every_key = array(pointer(keys, _WHOLE), (fields.TILES,))
    every_value = array(pointer(values, _WHOLE), (fields.TILES,))
    # the end of the list is filled up, so that a prefetch behind the last tile finds an address
    for index in range(count + listed, count + AHEAD + 1):
        every_key[index], every_value[index] = every_key[index - 1], every_value[index - 1]


@serial_in_order
def _clear(sums: int, state: int, rows: int, dim: int) -> None:
    array(pointer(sums, _SINGLE), (rows * fields.padded(dim),))[:] = np.float32(0)
    numbers = array(pointer(state, _SINGLE), (2, rows))
    numbers[0] = np.float32(FLOOR)
    numbers[1] = np.float32(0)


@serial_in_order
def _join(total: int, joined: int, state: int, sums: int, rows: int, dim: int) -> None:
    """Add the result of a split to that of the splits before it. `total`, `state`: float32 maxima, sums of weights."""
    before, added = array(pointer(total, _SINGLE), (2, rows)), array(pointer(state, _SINGLE), (2, rows))
    width = fields.padded(dim)
    target, values = array(pointer(joined, _SINGLE), (rows, width)), array(pointer(sums, _SINGLE), (rows, width))
    for row in range(rows):
        maximum = before[0, row]
        maximum = max(maximum, added[0, row])
        old, new = np.exp2(before[0, row] - maximum), np.exp2(added[0, row] - maximum)
        before[0, row] = maximum
        before[1, row] = before[1, row] * old + added[1, row] * new
        for index in range(width):
            target[row, index] = target[row, index] * old + values[row, index] * new


@serial_in_order
def _finish(out: int, state: int, sums: int, rows: int, group: int, head: int, layer: int, dtype: Any) -> None:
    """Divide by the sums of weights, to which a sink adds its own. `out`: the first query's first head of the group."""
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    dim = spec[fields.VALUE_DIM]
    width = fields.padded(dim)
    numbers, values = array(pointer(state, _SINGLE), (2, rows)), array(pointer(sums, _SINGLE), (rows, width))
    for row in range(rows):
        head_row = row // group * spec[fields.HEADS] + row % group
        results = array(pointer(out + head_row * dim * size_of(dtype), dtype), (dim,))
        factor = np.float32(1) / numbers[1, row]
        # a sink is one more weight of the softmax, without a value; scores are exponents of two
        if spec[fields.SINKS] != 0:
            sinks = array(pointer(spec[fields.SINKS], _SINGLE), (spec[fields.HEADS],))
            sink = sinks[head * group + row % group] * np.float32(LOG2E)
            maximum = max(sink, numbers[0, row])
            shrink = np.exp2(numbers[0, row] - maximum)
            factor = shrink / (numbers[1, row] * shrink + np.exp2(sink - maximum))
        if dim % 16 == 0:
            store_scaled(sums + row * width * 4, factor, out + head_row * dim * size_of(dtype), dim, dtype)
        else:
            for index in range(dim):
                results[index] = narrow(values[row, index] * factor, dtype)


@serial_in_order
def _join_units(
    piece: int, pieces: int, worker: int,
    out: int, layer: int, step: int, dtype: Any,
) -> None:  # fmt: skip
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    steps = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
    heads, dim = spec[fields.KV_HEADS], spec[fields.VALUE_DIM]
    group = spec[fields.HEADS] // heads
    joins = array(pointer(steps[fields.JOINS], _WHOLE), (steps[fields.NUM_JOINS], 3))
    units = steps[fields.NUM_JOINS] * heads
    size = fields.partial_floats(group, dim) * 4
    for unit in range(units * piece // pieces, units * (piece + 1) // pieces):
        row, head = unit // heads, unit % heads
        first = steps[fields.PARTIALS] + (joins[row, 1] * heads + head) * size
        for index in range(1, joins[row, 2]):
            other = first + index * heads * size
            _join(first, first + group * 8, other, other + group * 8, group, dim)
        target = out + (joins[row, 0] * spec[fields.HEADS] + head * group) * dim * size_of(dtype)
        _finish(target, first, first + group * 8, group, group, head, layer, dtype)


class PagedAttention:
    """The calls of one backend, by the team of the calling thread."""

    def __init__(self, dtype: torch.dtype, page_size: int, stored: torch.dtype) -> None:
        """`stored`: the pool's dtype, `dtype` or int8; the latter in pages of whole tiles (`max(LANES)` tokens)."""
        self.lanes = math.gcd(page_size, max(LANES))
        """Tokens of a page that lie side by side."""
        pairs = dtype == torch.bfloat16 and self.lanes == max(LANES) and cpu_has("avx512bf16")
        self._tag: Any = tag_of(dtype)
        self._lanes_tag: Any = LANES[self.lanes]
        self._operand: Any = np.int16(0) if stored == torch.int8 else np.uint16(0) if pairs else np.float32(0)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int, step: int) -> None:
        """Put key [tokens, kv heads, key dim] and value alike, heads contiguous, into their pages."""
        size = key.element_size()
        write(
            key.data_ptr(), key.stride(0) * size, key.stride(1) * size, value.data_ptr(), value.stride(0) * size,
            value.stride(1) * size, layer, step, self._tag, self._operand, use_team(),
        )  # fmt: skip

    def prepare_and_write(
        self, qkv: torch.Tensor, query: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
        epsilon: float, cos: torch.Tensor, sin: torch.Tensor, layer: int, step: int,
    ) -> None:  # fmt: skip
        """Norms and rotation of a merged projection; queries to `query`, keys and values into their pages."""
        prepare_and_write(
            qkv.data_ptr(), query.data_ptr(), 0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(), epsilon, cos.data_ptr(), sin.data_ptr(), cos.shape[-1], layer,
            step, self._tag, self._operand, use_team(),
        )  # fmt: skip

    def attend(
        self, query: torch.Tensor, token_size: int, head_size: int, out: torch.Tensor, layer: int, step: int
    ) -> None:
        """out [tokens, heads, value dim] of queries whose tokens are `token_size` bytes apart, heads `head_size`."""
        attend(
            query.data_ptr(), token_size, head_size, out.data_ptr(), layer, step, self._tag, self._lanes_tag,
            self._operand, use_team(),
        )  # fmt: skip

    def compile_join(self) -> None:
        """Compile the kernels that only steps with long contexts call."""
        int64 = numba.types.int64
        address_of(name_of(join, (int64, int64, int64, numba.typeof(self._tag), int64, int64)))


# Preparation of queries, keys and values for attention: norms per head, rotation, and writing into the pool.

_MANY = 16
"""Tokens of a piece from which on they are shared out by tokens, not by heads."""
_WORK = 16
"""Bytes that could be read while a number is normalised, rotated and stored."""


@serial
def write(
    key: int, key_token: int, key_head: int, value: int, value_token: int, value_head: int, layer: int, step: int,
    dtype: Any, operand: Any, team: int,
) -> None:  # fmt: skip
    """Write key [tokens, kv heads, key dim] and value alike into their pages; their strides are given in bytes."""
    pieces = _pieces(layer, step, team)
    arguments = (key, key_token, key_head, value, value_token, value_head, layer, step, dtype, operand)
    parallel_for(_write_units, team, pieces, arguments)


@serial
def _write_units(
    piece: int, pieces: int, worker: int,
    key: int, key_token: int, key_head: int, value: int, value_token: int, value_head: int,
    layer: int, step: int, dtype: Any, operand: Any,
) -> None:  # fmt: skip
    first, last, begin, end = share(piece, pieces, layer, step)
    for token in range(first, last):
        for head in range(begin, end):
            head_key, head_value = token * key_token + head * key_head, token * value_token + head * value_head
            store(key + head_key, value + head_value, token, head, layer, step, dtype, operand)


@serial
def _pieces(layer: int, step: int, team: int) -> int:
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    tokens, heads = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))[fields.TOKENS], spec[fields.KV_HEADS]
    work = tokens * (spec[fields.HEADS] + heads) * spec[fields.KEY_DIM] * _WORK
    return pieces_of(work, max(heads, tokens // _MANY), team)


@serial
def share(piece: int, pieces: int, layer: int, step: int) -> Any:
    """New keys that a piece writes: (first token, last token, first kv head, last kv head).

    Many tokens are shared out by tokens, so that one reads whole rows. Never between two keys whose values share
    words: writing the first of them clears its neighbour.
    """
    steps = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
    tokens, heads = steps[fields.TOKENS], array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))[fields.KV_HEADS]
    if tokens < pieces * _MANY:
        return 0, tokens, heads * piece // pieces, heads * (piece + 1) // pieces
    slots = array(pointer(steps[fields.SLOTS], _WHOLE), (tokens,))
    first, last = tokens * piece // pieces, tokens * (piece + 1) // pieces
    if piece > 0:
        first += slots[first] % 2
    if piece + 1 < pieces:
        last += slots[last] % 2
    return first, last, 0, heads


@serial
def store(key: int, value: int, token: int, head: int, layer: int, step: int, dtype: Any, operand: Any) -> None:
    """One token's key and value of one head into its tiles. The layout: see `attention_tiles`."""
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    slots = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))[fields.SLOTS]
    slot = array(pointer(slots, _WHOLE), (token + 1,))[token]
    lanes, size = spec[fields.LANES], size_of(dtype)
    tile_id = head * (spec[fields.PAGES] * spec[fields.PAGE_SIZE] // lanes) + slot // lanes
    lane = slot % lanes
    if stored_size(dtype, operand) == 1:
        key_dim, value_dim = spec[fields.KEY_DIM], spec[fields.VALUE_DIM]
        sizes = fields.bytes_of_tiles(key_dim, value_dim, lanes, 1)
        keys, values = spec[fields.POOL_KEYS] + tile_id * sizes[0], spec[fields.POOL_VALUES] + tile_id * sizes[1]
        call_where(_store_bytes, (key, key_dim, keys, lane, True, dtype), operand, _SHORT)
        call_where(_store_bytes, (value, value_dim, values, lane, False, dtype), operand, _SHORT)
        return
    words = (spec[fields.KEY_DIM] * size + 3) // 4
    tile = array(pointer(spec[fields.POOL_KEYS] + tile_id * words * lanes * 4, _WORD), (words, lanes))
    whole = array(pointer(key, _WORD), (words,))
    for index in range(spec[fields.KEY_DIM] * size // 4):
        tile[index, lane] = whole[index]
    if spec[fields.KEY_DIM] * size % 4 != 0:  # an odd number of halves
        tile[words - 1, lane] = np.uint32(array(pointer(key, _HALF), (spec[fields.KEY_DIM],))[spec[fields.KEY_DIM] - 1])
    if spec[fields.POOL_VALUES] == 0:
        return
    dim = spec[fields.VALUE_DIM]
    values = spec[fields.POOL_VALUES] + tile_id * dim * size * lanes
    numbers = array(pointer(value, dtype), (dim,))
    if size == 2 and lanes > 1:
        pairs = array(pointer(values + lane // 2 * dim * 4, _WORD), (dim,))
        if lane % 2 == 0:  # the other token of these words is not written yet: its old half must not enter a sum
            for index in range(dim):
                pairs[index] = np.uint32(numbers[index])
        else:
            for index in range(dim):
                pairs[index] = (pairs[index] & np.uint32(0xFFFF)) | np.uint32(numbers[index]) << np.uint32(16)
    else:
        row = array(pointer(values + lane * dim * size, dtype), (dim,))
        for index in range(dim):
            row[index] = numbers[index]


@serial_in_order
def _store_bytes(source: int, dim: int, tile: int, lane: int, keys: bool, dtype: Any) -> None:
    """One token's key or value of one head into a tile of bytes: whole multiples of its scale."""
    values, lanes = room(MOST_DIM, _SINGLE), 16
    apply_hadamard(source, values, dim, keys, dtype)
    rows, columns = ((dim + 1) // 2, lanes) if keys else (lanes // 2, dim)
    target = array(pointer(tile, _BYTE), (rows, columns, 2))
    scale = quantize_vector(values, dim, np.float32(127))
    for index in range(dim):
        number = np.int8(values[index])
        if keys:
            target[index // 2, lane, index % 2] = number
        else:
            target[lane // 2, index, lane % 2] = number
    if keys and dim % 2 == 1:
        target[rows - 1, lane, 1] = np.int8(0)
    array(pointer(tile + rows * columns * 2, _SINGLE), (lanes,))[lane] = scale


@serial
def prepare_and_write(
    qkv: int, query: int, q_norm: int, k_norm: int, epsilon: float, cos: int, sin: int, rotary: int, layer: int,
    step: int, dtype: Any, operand: Any, team: int,
) -> None:  # fmt: skip
    """Norms and rotation of a merged projection; queries to `query` [tokens, heads, key dim], the rest to the pool."""
    epsilon32 = np.float32(epsilon)
    pieces = _pieces(layer, step, team)
    arguments = (qkv, query, q_norm, k_norm, epsilon32, cos, sin, rotary, layer, step, dtype, operand)
    parallel_for(_prepare_units, team, pieces, arguments)


@serial
def _prepare_units(
    piece: int, pieces: int, worker: int,
    qkv: int, query: int, q_norm: int, k_norm: int, epsilon: np.float32, cos: int, sin: int,
    rotary: int, layer: int, step: int, dtype: Any, operand: Any,
) -> None:  # fmt: skip
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    steps = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
    heads, kv_heads = spec[fields.HEADS], spec[fields.KV_HEADS]
    group, size = heads // kv_heads, size_of(dtype)
    key_size, value_size = spec[fields.KEY_DIM] * size, spec[fields.VALUE_DIM] * size
    row = (heads + kv_heads) * key_size + kv_heads * value_size
    key = steps[fields.SCRATCH] + worker * steps[fields.SCRATCH_SIZE]
    first, last, begin, end = share(piece, pieces, layer, step)
    for token in range(first, last):
        cosines, sines = cos + token * rotary * size, sin + token * rotary * size
        for head in range(begin, end):
            for index in range(head * group, (head + 1) * group):
                source, target = qkv + token * row + index * key_size, query + (token * heads + index) * key_size
                prepare_head(source, target, spec[fields.KEY_DIM], q_norm, epsilon, cosines, sines, rotary, dtype)
            source = qkv + token * row + (heads + head) * key_size
            prepare_head(source, key, spec[fields.KEY_DIM], k_norm, epsilon, cosines, sines, rotary, dtype)
            value = qkv + token * row + (heads + kv_heads) * key_size + head * value_size
            store(key, value, token, head, layer, step, dtype, operand)
