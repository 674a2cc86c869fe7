"""The gated delta rule over a few tokens, for some columns of a head's state: the innermost part of `gated_delta`.

A state is [key dim, value dim] float32, and each of its columns lives by itself: what it knows under key k is the sum
of its numbers times k's, in the order of the key's dimensions; then it learns, and is read with q likewise. Columns are
lanes, so every sum is made in one order, whatever the columns beside it and whatever part of a sequence a step has.

While a column learns from one token, what it knows under the next token's key is summed up as well: the state passes
through registers once for each token.

A state may forget as a whole, or each dimension of the key by itself (Kimi Delta Attention). Then what it will know
under the next key is summed up under that key *faded*: multiplied by what the dimensions will have kept by then.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.intrinsics import INT64, KIND, emitted
from asyncengine.kernels.cpu.jit import array, pointer, serial_in_order
from asyncengine.kernels.cpu.vectors import FLOAT, FLOATS, LANES, LONG, load, multiply_add, size_of, store

WHOLE, EACH = np.uint8(0), np.uint16(0)
"""Zeros by whose type a kernel knows whether the state forgets as a whole, or each dimension of the key by itself."""
_SINGLE = np.float32(0)
_FEW = 2
"""Tokens up to which a state is read row by row, from memory; with more it stays near, a few columns at a time."""
_ROW, _TILE = 8, 2
"""Vectors of columns that are taken at once, then."""


@serial_in_order
def delta_rule(
    source: int, target: int, keys: int, queries: int, values: int, gates: int, out: int, tokens: int, key_dim: int,
    value_dim: int, faded: int, kept: int, by_channel: np.generic,
) -> None:  # fmt: skip
    """Move a head's state from `source` to `target` (perhaps the same) over some tokens, one at least.

    All float32 and contiguous: keys and queries [tokens, key dim], values and what is read, `out`, [tokens, value dim],
    gates [tokens, 2]: what the state is multiplied by, and the rate of learning. `by_channel` is `EACH` where
    `kept` [tokens, key dim] is in the place of the first of the gates: what each dimension of the key is multiplied by,
    and `faded` alike are keys times these; else it is `WHOLE`, and they are not looked at.
    """
    column, row = 0, value_dim * 4
    if tokens <= _FEW:
        while column + _ROW * LANES <= value_dim:
            move = column * 4
            _eight(source + move, target + move, keys, queries, values + move, gates, out + move, tokens, key_dim, row,
                   faded, kept, by_channel)  # fmt: skip
            column += _ROW * LANES
    while column + _TILE * LANES <= value_dim:
        move = column * 4
        _two(source + move, target + move, keys, queries, values + move, gates, out + move, tokens, key_dim, row,
             faded, kept, by_channel)  # fmt: skip
        column += _TILE * LANES
    while column + LANES <= value_dim:
        move = column * 4
        _one(source + move, target + move, keys, queries, values + move, gates, out + move, tokens, key_dim, row,
             faded, kept, by_channel)  # fmt: skip
        column += LANES
    if column < value_dim:
        _rest(source, target, keys, queries, values, gates, out, tokens, key_dim, value_dim, column, faded, kept,
              by_channel)  # fmt: skip


@serial_in_order
def _rest(
    source: int, target: int, keys: int, queries: int, values: int, gates: int, out: int, tokens: int, key_dim: int,
    value_dim: int, first: int, faded: int, kept: int, by_channel: np.generic,
) -> None:  # fmt: skip
    """Columns that fill no vector."""
    before = array(pointer(source, _SINGLE), (key_dim, value_dim))
    state = array(pointer(target, _SINGLE), (key_dim, value_dim))
    key, query = array(pointer(keys, _SINGLE), (tokens, key_dim)), array(pointer(queries, _SINGLE), (tokens, key_dim))
    value = array(pointer(values, _SINGLE), (tokens, value_dim))
    read = array(pointer(out, _SINGLE), (tokens, value_dim))
    gate = array(pointer(gates, _SINGLE), (tokens, 2))
    each = size_of(by_channel) == size_of(EACH)
    within = array(pointer(faded, _SINGLE), (tokens, key_dim))
    keeps = array(pointer(kept, _SINGLE), (tokens, key_dim))
    for token in range(tokens):
        held = before if token == 0 else state
        decay, rate = np.float32(1) if each else gate[token, 0], gate[token, 1]
        for column in range(first, value_dim):
            known, found = np.float32(0), np.float32(0)
            for index in range(key_dim):
                under = within[token, index] if each else key[token, index]
                known += held[index, column] * under
            delta = (value[token, column] - decay * known) * rate
            for index in range(key_dim):
                factor = keeps[token, index] if each else decay
                number = held[index, column] * factor + key[token, index] * delta
                state[index, column] = number
                found += number * query[token, index]
            read[token, column] = found


def _tile(columns: int) -> Any:
    """The intrinsic for `columns` vectors of columns: as `delta_rule`, with the bytes of a row for the last size."""

    @emitted(*[INT64] * 12, KIND)
    def tile(
        builder: Any, source: Any, target: Any, keys: Any, queries: Any, values: Any, gates: Any, out: Any, tokens: Any,
        key_dim: Any, row: Any, faded: Any, kept: Any, by_channel: Any,
    ) -> None:  # fmt: skip
        given = source, target, keys, queries, values, gates, out, tokens, key_dim, row
        _write_tile(builder, columns, *given, *((faded, kept) if by_channel == numba.typeof(EACH) else ()))

    return tile


_eight, _two, _one = (_tile(columns) for columns in (_ROW, _TILE, 1))


def _write_tile(
    builder: Any, columns: int, source: Any, target: Any, keys: Any, queries: Any, values: Any, gates: Any, out: Any,
    tokens: Any, key_dim: Any, row: Any, faded: Any = None, kept: Any = None,
) -> None:  # fmt: skip
    zero = vectors.constant(FLOATS, 0.0)
    known = [cgutils.alloca_once_value(builder, zero) for _ in range(columns)]
    found = [cgutils.alloca_once_value(builder, zero) for _ in range(columns)]
    length = builder.mul(key_dim, LONG(4))
    under = keys if faded is None else faded

    def places(base: Any) -> list[Any]:
        return [builder.add(base, LONG(64 * column)) for column in range(columns)]

    def number(base: Any, index: Any) -> Any:
        return vectors.splat(builder, load(builder, builder.add(base, builder.mul(index, LONG(4))), FLOAT))

    with cgutils.for_range(builder, key_dim) as loop:  # what is known under the first token's key
        key = number(under, loop.index)
        for place, total in zip(places(builder.add(source, builder.mul(loop.index, row))), known, strict=True):
            builder.store(multiply_add(builder, load(builder, place, FLOATS), key, builder.load(total)), total)
    with cgutils.for_range(builder, tokens) as turn:
        token = turn.index
        move = builder.mul(token, length)
        first = builder.icmp_unsigned("==", token, LONG(0))
        last = builder.icmp_unsigned("==", builder.add(token, LONG(1)), tokens)
        held = builder.select(first, source, target)
        own, asked = builder.add(keys, move), builder.add(queries, move)
        keeps = None if kept is None else builder.add(kept, move)
        here = builder.add(under, move)
        following = builder.select(last, here, builder.add(here, length))  # behind the last: not used
        gate = builder.add(gates, builder.mul(token, LONG(8)))
        decay, rate = number(gate, LONG(0)), number(gate, LONG(1))
        deltas = []
        for place, total in zip(places(builder.add(values, builder.mul(token, row))), known, strict=True):
            sum_known = builder.load(total) if keeps is not None else builder.fmul(decay, builder.load(total))
            deltas.append(builder.fmul(builder.fsub(load(builder, place, FLOATS), sum_known), rate))
            builder.store(zero, total)
        for total in found:
            builder.store(zero, total)
        with cgutils.for_range(builder, key_dim) as loop:
            key, after, query = (number(base, loop.index) for base in (own, following, asked))
            factor = decay if keeps is None else number(keeps, loop.index)
            move = builder.mul(loop.index, row)
            before, to = places(builder.add(held, move)), places(builder.add(target, move))
            for column in range(columns):
                numbers = builder.fmul(load(builder, before[column], FLOATS), factor)
                numbers = multiply_add(builder, key, deltas[column], numbers)
                store(builder, numbers, to[column])
                for totals, other in ((found, query), (known, after)):
                    total = totals[column]
                    builder.store(multiply_add(builder, numbers, other, builder.load(total)), total)
        for place, total in zip(places(builder.add(out, builder.mul(token, row))), found, strict=True):
            store(builder, builder.load(total), place)
