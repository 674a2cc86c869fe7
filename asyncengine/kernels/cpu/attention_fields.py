"""Records of a step and of a layer for the attention kernels: arrays of int64, whose fields have these indices."""

from __future__ import annotations

from typing import Any

from asyncengine.kernels.cpu.attention_tiles import AHEAD, BLOCK, SCORES
from asyncengine.kernels.cpu.jit import serial_in_order

SPLIT = 512
"""Keys of a split; a multiple of `BLOCK`."""
TILES = SPLIT + AHEAD + 2
"""Most tiles of a split, and those that are prefetched behind its last one."""
SLACK = 512
"""Bytes that may be read behind the pool: a vector of values may reach beyond the last dimension."""

# A layer's record. POOL_KEYS, POOL_VALUES: addresses of [kv heads, pages, page] tiles (POOL_VALUES 0: values are the
# last VALUE_DIM numbers of the keys); SINKS: address of float32 [heads] or 0; NUMBERS: address of float32 scale and
# soft-cap (0: none); WINDOW: 0 for none; LATER: the number of positions after its own that a query sees.
POOL_KEYS, POOL_VALUES, PAGES, PAGE_SIZE, LANES, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, SINKS, NUMBERS, WINDOW, LATER = (
    range(13)
)
LAYER_FIELDS = 13
# Indices of the numbers at NUMBERS.
SCALE, SOFT_CAP = range(2)
# A step's record. ITEMS: address of [items, ITEM_FIELDS]; BOUNDS: [PIECES + 1] units of each piece, head by head;
# TABLE: int32 [rows, WIDTH] pages; SLOTS: [TOKENS] slots of new keys; JOINS: [joins, 3] token, first and number of
# partial results; PARTIALS: their memory; SCRATCH: SCRATCH_SIZE bytes for each worker.
ITEMS, NUM_ITEMS, BOUNDS, TABLE, WIDTH, SLOTS, TOKENS, JOINS, NUM_JOINS, PARTIALS, SCRATCH, SCRATCH_SIZE, PIECES = (
    range(13)
)
STEP_FIELDS = 13
# An item's record: its first token in the batch, the number of its tokens, the first one's position, its row of the
# table, its keys [BEGIN, END), the index of its partial result (-1: it makes the result itself), and the number of
# positions after its own that each query sees besides the layer's LATER.
TOKEN, COUNT, POSITION, ROW, BEGIN, END, PARTIAL, BEYOND = range(8)
ITEM_FIELDS = 8


# Buffers in a thread's scratch memory: queries, scores, weights, sums of a split and of all so far (JOINED), numbers of
# each row (STATE: maxima and sums of weights, factors by which sums shrink, the scale of its weights, the first two for
# all splits so far, the scale of its query), lists of tiles; and the size of all.
QUERY, SCORE_ROWS, WEIGHT_ROWS, SUMS, JOINED, STATE, TILE_LISTS, SIZE = range(8)


@serial_in_order
def padded(dim: int) -> int:
    """Floats of a row of sums."""
    return (dim + 63) // 64 * 64


def partial_size(group: int, value_dim: int) -> int:
    """Floats of a partial result of one kv head: maxima, sums of weights, sums of values (`padded`)."""
    return group * (2 + (value_dim + 63) // 64 * 64)


def tile_sizes(key_dim: int, value_dim: int, lanes: int, size: int) -> Any:
    """Bytes of a tile of keys and of one of values, of numbers of `size` bytes each. Behind numbers of one byte follow
    the scales of the tile's tokens, float32."""
    unit, scales = min(4, 2 * size), 4 * lanes if size == 1 else 0
    return (key_dim * size + unit - 1) // unit * unit * lanes + scales, value_dim * size * lanes + scales


def turned_size(value_dim: int) -> int:
    """Bytes behind a thread's scratch memory for a block's values in latent attention, taken from keys of any type."""
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


# before a step Python calls the functions above, not these: they are compiled for kernels alone
partial_floats = serial_in_order(partial_size)
scratch_offsets = serial_in_order(scratch_sizes)
bytes_of_tiles = serial_in_order(tile_sizes)
