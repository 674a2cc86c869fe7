"""Attention over a paged pool: who does which part of it, and the blocks of keys each part goes through.

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

from typing import Any

import numba
import numpy as np

from asyncengine.kernels.cpu import attention_fields as fields
from asyncengine.kernels.cpu.attention_blocks import attend_block, find_tiles, gather
from asyncengine.kernels.cpu.attention_softmax import LOG2E, store_scaled
from asyncengine.kernels.cpu.attention_tiles import AHEAD, BLOCK, FLOOR, stored_size
from asyncengine.kernels.cpu.calls import address_of, call, call_rare, name_of, parallel_for
from asyncengine.kernels.cpu.jit import array, narrow, pointer, serial_in_order
from asyncengine.kernels.cpu.vectors import size_of

_WHOLE, _SINGLE = np.int64(0), np.float32(0)


@serial_in_order
def attend(
    query: int, token_size: int, head_size: int, out: int, layer: int, step: int, kind: Any, lanes: Any, operand: Any,
    team: int,
) -> None:  # fmt: skip
    """out [tokens, heads, value dim] of query [tokens, heads, key dim], whose steps are given in bytes. Addresses.

    Results of long rows are those of their splits, joined.
    """
    known = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
    parallel_for(
        _attend_units,
        team,
        known[fields.PIECES],
        (query, token_size, head_size, out, layer, step, kind, lanes, operand),
    )
    if known[fields.NUM_JOINS] > 0:
        call_rare(join, (out, layer, step, kind, known[fields.NUM_JOINS], team))


def compile_join(kind: Any) -> None:
    """Compile what only long contexts need. `kind`: that of the layer's numbers."""
    whole = numba.types.int64
    address_of(name_of(join, (whole, whole, whole, numba.typeof(kind), whole, whole)))


@serial_in_order
def join(out: int, layer: int, step: int, kind: Any, pieces: int, team: int) -> None:
    """Make the results of long rows of those of their splits. No pieces: do nothing."""
    parallel_for(_join_units, team, pieces, (out, layer, step, kind))


@serial_in_order
def _attend_units(
    piece: int, pieces: int, worker: int,
    query: int, token_size: int, head_size: int, out: int, layer: int, step: int, kind: Any,
    lanes: Any, operand: Any,
) -> None:  # fmt: skip
    steps = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
    bounds = array(pointer(steps[fields.BOUNDS], _WHOLE), (piece + 2,))
    items, heads = steps[fields.NUM_ITEMS], array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))[fields.KV_HEADS]
    scratch = steps[fields.SCRATCH] + worker * steps[fields.SCRATCH_SIZE]
    for unit in range(bounds[piece], bounds[piece + 1]):
        head, place = unit // items, unit % items
        item, following = steps[fields.ITEMS] + place * (fields.ITEM_FIELDS * 8), steps[fields.ITEMS]
        if place + 1 < items:
            following = item + fields.ITEM_FIELDS * 8
        after = min((unit + 1) // items, heads - 1)
        _attend_unit(
            item, head, following, after, query, token_size, head_size, out, layer, step, scratch, kind, lanes, operand
        )


@serial_in_order
def _attend_unit(
    item: int, head: int, following: int, after: int, query: int, token_size: int, head_size: int, out: int,
    layer: int, step: int, scratch: int, kind: Any, lanes: Any, operand: Any,
) -> None:  # fmt: skip
    """One item and kv head. `following`, `after`: the item and kv head that this thread turns to next."""
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    own = array(pointer(item, _WHOLE), (fields.ITEM_FIELDS,))
    group = spec[fields.HEADS] // spec[fields.KV_HEADS]
    rows = own[fields.COUNT] * group
    value_dim = spec[fields.VALUE_DIM]
    places = fields.scratch_places(rows, spec[fields.KEY_DIM], value_dim)
    sums, joined, state = scratch + places[fields.SUMS], scratch + places[fields.JOINED], scratch + places[fields.STATE]
    size, stored = size_of(kind), stored_size(kind, operand)
    first = query + own[fields.TOKEN] * token_size + head * group * head_size
    units = state + rows * 6 * 4
    gather(first, token_size, head_size, rows, group, spec[fields.KEY_DIM], scratch, units, kind, operand)
    begin, end = own[fields.BEGIN] // fields.SPLIT, (own[fields.END] - 1) // fields.SPLIT + 1
    total = state + rows * 4 * 4
    keys, values = scratch + places[fields.TILE_LISTS], scratch + places[fields.TILE_LISTS] + fields.TILES * 8
    array(pointer(state + rows * 3 * 4, _SINGLE), (rows,))[:] = np.float32(1)
    if end - begin > 1:
        _clear(joined, total, rows, value_dim)
    for split in range(begin, end):
        _clear(sums, state, rows, value_dim)
        last = min(own[fields.END], (split + 1) * fields.SPLIT)
        first = max(own[fields.BEGIN], split * fields.SPLIT)
        find_tiles(own[fields.ROW], head, first, last, layer, step, keys, values, stored)
        _look_ahead(item, head, following, after, first, last, layer, step, keys, values, stored)
        for block in range(first // BLOCK * BLOCK, last, BLOCK):
            at = (max(block, first) // spec[fields.LANES] - first // spec[fields.LANES]) * 8
            call(
                attend_block,
                (item, head, block, last, keys + at, values + at, rows, group, layer, scratch, kind, lanes, operand),
            )
        if end - begin > 1:
            _join(total, joined, state, sums, rows, value_dim)
    if end - begin > 1:
        sums, state = joined, total
    if own[fields.PARTIAL] < 0:
        to = out + (own[fields.TOKEN] * spec[fields.HEADS] + head * group) * value_dim * size
        _finish(to, state, sums, rows, group, head, layer, kind)
    else:
        steps = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
        part = fields.partial_floats(group, value_dim)
        to = steps[fields.PARTIALS] + (own[fields.PARTIAL] * spec[fields.KV_HEADS] + head) * part * 4
        _clear(to + 8 * rows, to, rows, value_dim)
        _join(to, to + 8 * rows, state, sums, rows, value_dim)


@serial_in_order
def _look_ahead(
    item: int, head: int, following: int, after: int, first: int, last: int, layer: int, step: int, keys: int,
    values: int, stored: int,
) -> None:  # fmt: skip
    """Behind the tiles of keys [first, last), write down those that will be wanted next: `AHEAD` of them at least."""
    lanes = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))[fields.LANES]
    own, other = (
        array(pointer(item, _WHOLE), (fields.ITEM_FIELDS,)),
        array(pointer(following, _WHOLE), (fields.ITEM_FIELDS,)),
    )
    count = (last - 1) // lanes - first // lanes + 1
    at, wanted = count * 8, AHEAD * lanes
    if last < own[fields.END]:
        end = min(own[fields.END], last + wanted)
        found = find_tiles(own[fields.ROW], head, last, end, layer, step, keys + at, values + at, stored)
    else:
        begin = other[fields.BEGIN]
        end = min(other[fields.END], begin // lanes * lanes + wanted)
        found = find_tiles(other[fields.ROW], after, begin, end, layer, step, keys + at, values + at, stored)
    every_key = array(pointer(keys, _WHOLE), (fields.TILES,))
    every_value = array(pointer(values, _WHOLE), (fields.TILES,))
    for index in range(count + found, count + AHEAD + 1):
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
    to, values = array(pointer(joined, _SINGLE), (rows, width)), array(pointer(sums, _SINGLE), (rows, width))
    for row in range(rows):
        maximum = before[0, row]
        maximum = max(maximum, added[0, row])
        old, new = np.exp2(before[0, row] - maximum), np.exp2(added[0, row] - maximum)
        before[0, row] = maximum
        before[1, row] = before[1, row] * old + added[1, row] * new
        for index in range(width):
            to[row, index] = to[row, index] * old + values[row, index] * new


@serial_in_order
def _finish(out: int, state: int, sums: int, rows: int, group: int, head: int, layer: int, kind: Any) -> None:
    """Divide by the sums of weights, to which a sink adds its own. `out`: the first query's first head of the group."""
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    dim = spec[fields.VALUE_DIM]
    width = fields.padded(dim)
    numbers, values = array(pointer(state, _SINGLE), (2, rows)), array(pointer(sums, _SINGLE), (rows, width))
    for row in range(rows):
        place = row // group * spec[fields.HEADS] + row % group
        results = array(pointer(out + place * dim * size_of(kind), kind), (dim,))
        factor = np.float32(1) / numbers[1, row]
        if spec[fields.SINKS] != 0:
            sinks = array(pointer(spec[fields.SINKS], _SINGLE), (spec[fields.HEADS],))
            sink = sinks[head * group + row % group] * np.float32(LOG2E)
            maximum = max(sink, numbers[0, row])
            shrink = np.exp2(numbers[0, row] - maximum)
            factor = shrink / (numbers[1, row] * shrink + np.exp2(sink - maximum))
        if dim % 16 == 0:
            store_scaled(sums + row * width * 4, factor, out + place * dim * size_of(kind), dim, kind)
        else:
            for index in range(dim):
                results[index] = narrow(values[row, index] * factor, kind)


@serial_in_order
def _join_units(
    piece: int, pieces: int, worker: int,
    out: int, layer: int, step: int, kind: Any,
) -> None:  # fmt: skip
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    steps = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
    heads, dim = spec[fields.KV_HEADS], spec[fields.VALUE_DIM]
    group = spec[fields.HEADS] // heads
    joins = array(pointer(steps[fields.JOINS], _WHOLE), (steps[fields.NUM_JOINS], 3))
    units = steps[fields.NUM_JOINS] * heads
    size = fields.partial_floats(group, dim) * 4
    for unit in range(units * piece // pieces, units * (piece + 1) // pieces):
        place, head = unit // heads, unit % heads
        first = steps[fields.PARTIALS] + (joins[place, 1] * heads + head) * size
        for index in range(1, joins[place, 2]):
            other = first + index * heads * size
            _join(first, first + group * 8, other, other + group * 8, group, dim)
        to = out + (joins[place, 0] * spec[fields.HEADS] + head * group) * dim * size_of(kind)
        _finish(to, first, first + group * 8, group, group, head, layer, kind)
