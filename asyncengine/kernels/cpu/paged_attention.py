"""Paged attention by compiled kernels, for one dtype and one size of pages: the forms that serve these are chosen here.

Layers and steps are addresses of the records that `attention_fields` describes; sizes of steps in memory are in bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from asyncengine.kernels.cpu import attention
from asyncengine.kernels.cpu import attention_fields as fields
from asyncengine.kernels.cpu.attention_blocks import MOST_DIM, spread_out, whole_numbers
from asyncengine.kernels.cpu.attention_tiles import LANES, stored_size
from asyncengine.kernels.cpu.calls import call_rare, parallel_for
from asyncengine.kernels.cpu.jit import array, kind_of, pointer, room, serial, serial_in_order
from asyncengine.kernels.cpu.qk_norm_rope import prepare_head
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of
from asyncengine.kernels.cpu.vectors import cpu_has, size_of


class PagedAttention:
    """The calls of one backend, by the team of the calling thread."""

    def __init__(self, dtype: torch.dtype, page_size: int, kept: torch.dtype) -> None:
        """`kept`: what the pool holds, `dtype` or int8; the latter in pages of whole tiles (`max(LANES)` tokens)."""
        self.lanes = math.gcd(page_size, max(LANES))
        """Tokens of a page that lie side by side."""
        pairs = dtype == torch.bfloat16 and self.lanes == max(LANES) and cpu_has("avx512bf16")
        self._kind: Any = kind_of(dtype)
        self._form: Any = LANES[self.lanes]
        self._operand: Any = np.int16(0) if kept == torch.int8 else np.uint16(0) if pairs else np.float32(0)

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: int, step: int) -> None:
        """Put key [tokens, kv heads, key dim] and value alike, heads contiguous, into their pages."""
        size = key.element_size()
        write(
            key.data_ptr(), key.stride(0) * size, key.stride(1) * size, value.data_ptr(), value.stride(0) * size,
            value.stride(1) * size, layer, step, self._kind, self._operand, use_team(),
        )  # fmt: skip

    def prepare_and_write(
        self, qkv: torch.Tensor, query: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
        epsilon: float, cos: torch.Tensor, sin: torch.Tensor, layer: int, step: int,
    ) -> None:  # fmt: skip
        """Norms and rotation of a merged projection; queries to `query`, keys and values into their pages."""
        prepare_and_write(
            qkv.data_ptr(), query.data_ptr(), 0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(), epsilon, cos.data_ptr(), sin.data_ptr(), cos.shape[-1], layer,
            step, self._kind, self._operand, use_team(),
        )  # fmt: skip

    def attend(
        self, query: torch.Tensor, token_size: int, head_size: int, out: torch.Tensor, layer: int, step: int
    ) -> None:
        """out [tokens, heads, value dim] of queries whose tokens and heads lie so many bytes apart."""
        attention.attend(
            query.data_ptr(), token_size, head_size, out.data_ptr(), layer, step, self._kind, self._form, self._operand,
            use_team(),
        )  # fmt: skip

    def compile_join(self) -> None:
        """Compile what only steps with long contexts call."""
        attention.compile_join(self._kind)


# Preparation of queries, keys and values for attention: norms per head, rotation, and writing into the pool.

_WHOLE, _WORD, _HALF, _BYTE, _SINGLE = np.int64(0), np.uint32(0), np.uint16(0), np.int8(0), np.float32(0)
_MANY = 16
"""Tokens of a piece from which on they are shared out by tokens, not by heads."""
_WORK = 16
"""Bytes that could be read while a number is normalised, rotated and put in its place."""


@serial
def write(
    key: int, key_token: int, key_head: int, value: int, value_token: int, value_head: int, layer: int, step: int,
    kind: Any, operand: Any, team: int,
) -> None:  # fmt: skip
    """Put key [tokens, kv heads, key dim] and value alike where they belong; their steps are given in bytes."""
    pieces = _pieces(layer, step, team)
    given = (key, key_token, key_head, value, value_token, value_head, layer, step, kind, operand)
    parallel_for(_write_units, team, pieces, given)


@serial
def _write_units(
    piece: int, pieces: int, worker: int,
    key: int, key_token: int, key_head: int, value: int, value_token: int, value_head: int,
    layer: int, step: int, kind: Any, operand: Any,
) -> None:  # fmt: skip
    first, last, begin, end = share(piece, pieces, layer, step)
    for token in range(first, last):
        for head in range(begin, end):
            own, other = key + token * key_token + head * key_head, value + token * value_token + head * value_head
            store(own, other, token, head, layer, step, kind, operand)


@serial
def _pieces(layer: int, step: int, team: int) -> int:
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    tokens, heads = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))[fields.TOKENS], spec[fields.KV_HEADS]
    work = tokens * (spec[fields.HEADS] + heads) * spec[fields.KEY_DIM] * _WORK
    return pieces_of(work, max(heads, tokens // _MANY), team)


@serial
def share(piece: int, pieces: int, layer: int, step: int) -> Any:
    """New keys that a piece puts in their places: (first token, last token, first kv head, last kv head).

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
def store(key: int, value: int, token: int, head: int, layer: int, step: int, kind: Any, operand: Any) -> None:
    """One token's key and value of one head into its tiles. The layout: see `attention_tiles`."""
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    slot = array(pointer(array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))[fields.SLOTS], _WHOLE), (token + 1,))[
        token
    ]
    lanes, size = spec[fields.LANES], size_of(kind)
    place = head * (spec[fields.PAGES] * spec[fields.PAGE_SIZE] // lanes) + slot // lanes
    lane = slot % lanes
    if stored_size(kind, operand) == 1:
        key_dim, value_dim = spec[fields.KEY_DIM], spec[fields.VALUE_DIM]
        sizes = fields.bytes_of_tiles(key_dim, value_dim, lanes, 1)
        call_rare(_store_bytes, (key, key_dim, spec[fields.POOL_KEYS] + place * sizes[0], lane, True, kind))
        call_rare(_store_bytes, (value, value_dim, spec[fields.POOL_VALUES] + place * sizes[1], lane, False, kind))
        return
    words = (spec[fields.KEY_DIM] * size + 3) // 4
    tile = array(pointer(spec[fields.POOL_KEYS] + place * words * lanes * 4, _WORD), (words, lanes))
    whole = array(pointer(key, _WORD), (words,))
    for index in range(spec[fields.KEY_DIM] * size // 4):
        tile[index, lane] = whole[index]
    if spec[fields.KEY_DIM] * size % 4 != 0:  # an odd number of halves
        tile[words - 1, lane] = np.uint32(array(pointer(key, _HALF), (spec[fields.KEY_DIM],))[spec[fields.KEY_DIM] - 1])
    if spec[fields.POOL_VALUES] == 0:
        return
    dim = spec[fields.VALUE_DIM]
    to = spec[fields.POOL_VALUES] + place * dim * size * lanes
    numbers = array(pointer(value, kind), (dim,))
    if size == 2 and lanes > 1:
        pairs = array(pointer(to + lane // 2 * dim * 4, _WORD), (dim,))
        if lane % 2 == 0:  # the neighbour is not written yet: whatever its place held must not enter a sum
            for index in range(dim):
                pairs[index] = np.uint32(numbers[index])
        else:
            for index in range(dim):
                pairs[index] = (pairs[index] & np.uint32(0xFFFF)) | np.uint32(numbers[index]) << np.uint32(16)
    else:
        row = array(pointer(to + lane * dim * size, kind), (dim,))
        for index in range(dim):
            row[index] = numbers[index]


@serial_in_order
def _store_bytes(source: int, dim: int, tile: int, lane: int, keys: bool, kind: Any) -> None:
    """One token's key or value of one head into a tile of bytes: whole multiples of its scale."""
    values, lanes = room(MOST_DIM, _SINGLE), 16
    spread_out(source, values, dim, keys, kind)
    rows, columns = ((dim + 1) // 2, lanes) if keys else (lanes // 2, dim)
    to = array(pointer(tile, _BYTE), (rows, columns, 2))
    scale = whole_numbers(values, dim, np.float32(127))
    for index in range(dim):
        number = np.int8(values[index])
        if keys:
            to[index // 2, lane, index % 2] = number
        else:
            to[lane // 2, index, lane % 2] = number
    if keys and dim % 2 == 1:
        to[rows - 1, lane, 1] = np.int8(0)
    array(pointer(tile + rows * columns * 2, _SINGLE), (lanes,))[lane] = scale


@serial
def prepare_and_write(
    qkv: int, query: int, q_norm: int, k_norm: int, epsilon: float, cos: int, sin: int, rotary: int, layer: int,
    step: int, kind: Any, operand: Any, team: int,
) -> None:  # fmt: skip
    """Norms and rotation of a merged projection; queries to `query` [tokens, heads, key dim], the rest to the pool."""
    small = np.float32(epsilon)
    pieces = _pieces(layer, step, team)
    given = (qkv, query, q_norm, k_norm, small, cos, sin, rotary, layer, step, kind, operand)
    parallel_for(_prepare_units, team, pieces, given)


@serial
def _prepare_units(
    piece: int, pieces: int, worker: int,
    qkv: int, query: int, q_norm: int, k_norm: int, epsilon: np.float32, cos: int, sin: int,
    rotary: int, layer: int, step: int, kind: Any, operand: Any,
) -> None:  # fmt: skip
    spec = array(pointer(layer, _WHOLE), (fields.LAYER_FIELDS,))
    steps = array(pointer(step, _WHOLE), (fields.STEP_FIELDS,))
    heads, kv_heads = spec[fields.HEADS], spec[fields.KV_HEADS]
    group, size = heads // kv_heads, size_of(kind)
    key_size, value_size = spec[fields.KEY_DIM] * size, spec[fields.VALUE_DIM] * size
    row = (heads + kv_heads) * key_size + kv_heads * value_size
    key = steps[fields.SCRATCH] + worker * steps[fields.SCRATCH_SIZE]
    first, last, begin, end = share(piece, pieces, layer, step)
    for token in range(first, last):
        cosines, sines = cos + token * rotary * size, sin + token * rotary * size
        for head in range(begin, end):
            for index in range(head * group, (head + 1) * group):
                own, to = qkv + token * row + index * key_size, query + (token * heads + index) * key_size
                prepare_head(own, to, spec[fields.KEY_DIM], q_norm, epsilon, cosines, sines, rotary, kind)
            own = qkv + token * row + (heads + head) * key_size
            prepare_head(own, key, spec[fields.KEY_DIM], k_norm, epsilon, cosines, sines, rotary, kind)
            value = qkv + token * row + (heads + kv_heads) * key_size + head * value_size
            store(key, value, token, head, layer, step, kind, operand)
