"""Descriptions of a step and of a layer for the attention kernels: plain numbers at fixed places."""

from __future__ import annotations

from typing import Any

from asyncengine.kernels.cpu.attention_tiles import AHEAD, BLOCK, SCORES
from asyncengine.kernels.cpu.jit import serial_in_order

SPLIT = 512
"""Keys of a split; a multiple of `BLOCK`."""
TILES = SPLIT + AHEAD + 2
"""Most tiles of a split, and those that are asked for meanwhile."""
SLACK = 512
"""Bytes that may be read behind the pool: a vector of values may reach beyond the last dimension."""

# What is known of a layer: int64 by place. POOL_KEYS, POOL_VALUES: addresses of [kv heads, pages, page] tiles (0 of
# values: they are the last VALUE_DIM numbers of the keys); SINKS: address of float32 [heads] or 0; NUMBERS: address of
# float32 scale and soft-cap (0: none); WINDOW: 0 for none; LATER: how many positions after its own one sees.
POOL_KEYS, POOL_VALUES, PAGES, PAGE_SIZE, LANES, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, SINKS, NUMBERS, WINDOW, LATER = (
    range(13)
)
LAYER_FIELDS = 13
# What NUMBERS points to.
SCALE, SOFT_CAP = range(2)
# What is known of a step. ITEMS: address of [items, ITEM_FIELDS]; BOUNDS: [PIECES + 1] units of each piece, head by
# head; TABLE: int32 [rows, WIDTH] pages; SLOTS: [TOKENS] where new keys go; JOINS: [joins, 3] token, first and number
# of partial results; PARTIALS: their memory; SCRATCH: SCRATCH_SIZE bytes for each worker.
ITEMS, NUM_ITEMS, BOUNDS, TABLE, WIDTH, SLOTS, TOKENS, JOINS, NUM_JOINS, PARTIALS, SCRATCH, SCRATCH_SIZE, PIECES = (
    range(13)
)
STEP_FIELDS = 13
# An item: its first token in the batch, how many, the first one's position, its row of the table, the keys
# [BEGIN, END), the partial result it makes (-1: the result itself), and how many positions after its own each query
# sees besides the layer's LATER.
TOKEN, COUNT, POSITION, ROW, BEGIN, END, PARTIAL, BEYOND = range(8)
ITEM_FIELDS = 8


# Parts of a thread's scratch memory: queries, scores, weights, sums of a split and of all so far (JOINED), numbers of
# each row (STATE: maxima and sums of weights, factors by which sums shrink, 1 or what 1 of its weights stands for, the
# first two of all splits so far, what 1 of its query stands for), lists of tiles; and its size.
QUERY, SCORE_ROWS, WEIGHT_ROWS, SUMS, JOINED, STATE, TILE_LISTS, SIZE = range(8)


@serial_in_order
def padded(dim: int) -> int:
    """Floats of a row of sums."""
    return (dim + 63) // 64 * 64


def partial_size(group: int, value_dim: int) -> int:
    """Floats of a partial result of one kv head: maxima, sums of weights, sums of values (`padded`)."""
    return group * (2 + (value_dim + 63) // 64 * 64)


def tile_sizes(key_dim: int, value_dim: int, lanes: int, size: int) -> Any:
    """Bytes of a tile of keys and of one of values, of numbers of so many bytes. Of numbers of one byte, the scale of
    each token, float32, follows them."""
    unit, scales = min(4, 2 * size), 4 * lanes if size == 1 else 0
    return (key_dim * size + unit - 1) // unit * unit * lanes + scales, value_dim * size * lanes + scales


def turned_size(value_dim: int) -> int:
    """Bytes behind a thread's scratch memory for the values of a block that are taken from keys, for any type."""
    return SCORES * value_dim * 4 + SLACK


def scratch_sizes(rows: int, key_dim: int, value_dim: int) -> Any:
    """Offsets of QUERY .. TILE_LISTS in a thread's scratch memory, then SIZE. `rows`: queries x heads of a group."""
    query = 0
    scores = query + rows * (key_dim + 16) * 4
    weights = scores + rows * SCORES * 4
    sums = weights + rows * BLOCK * 4
    joined = sums + rows * ((value_dim + 63) // 64 * 64) * 4
    state = joined + rows * ((value_dim + 63) // 64 * 64) * 4
    tiles = state + (rows * 7 * 4 + 63) // 64 * 64
    return query, scores, weights, sums, joined, state, tiles, tiles + 2 * TILES * 8


# Python computes a few sizes before each step: it does so by itself, and nothing has to be compiled for that
partial_floats = serial_in_order(partial_size)
scratch_places = serial_in_order(scratch_sizes)
bytes_of_tiles = serial_in_order(tile_sizes)
