"""A layer of the gated delta rule between its projections: convolution, recurrence, gated norm, in one loop.

Work is shared out by rows and key heads: a piece takes some of a sequence's tokens at a time through everything, so
that they stay near, and passes a row's segments one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numba
import numpy as np
import torch
from numba.core import cgutils
from numpy.typing import NDArray

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.activation import exponential
from asyncengine.kernels.cpu.calls import call, team_kernel
from asyncengine.kernels.cpu.causal_conv import CHANNELS, StateKernel, convolve_tokens, segment_arrays
from asyncengine.kernels.cpu.intrinsics import INT64, TAG, emitted
from asyncengine.kernels.cpu.jit import allocates, array, inline, keep, narrow, pointer, serial_in_order, widen
from asyncengine.kernels.cpu.vectors import FLOAT, FLOATS, LANES, LONG, load, multiply_add, size_of, square_sum, store

_WHOLE, _SINGLE = np.int64(0), np.float32(0)

# The gated delta rule over a few tokens, for some columns of a head's state: the innermost part of `gated_delta`.

WHOLE, EACH = np.uint8(0), np.uint16(0)
"""Zeros by whose type a kernel knows whether the state forgets as a whole, or each dimension of the key by itself."""
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


def _write_tile(
    builder: Any, source: Any, target: Any, keys: Any, queries: Any, values: Any, gates: Any, out: Any, tokens: Any,
    key_dim: Any, row: Any, faded: Any, kept: Any, by_channel: Any, *, columns: int,
) -> None:  # fmt: skip
    """Do as `delta_rule` for `columns` vectors of columns, with the bytes of a row for the last size."""
    each = by_channel == numba.typeof(EACH)
    zero = vectors.constant(FLOATS, 0.0)
    known = [cgutils.alloca_once_value(builder, zero) for _ in range(columns)]
    found = [cgutils.alloca_once_value(builder, zero) for _ in range(columns)]
    length = builder.mul(key_dim, LONG(4))
    under = faded if each else keys

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
        keeps = builder.add(kept, move) if each else None
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


_eight, _two, _one = (emitted(*[INT64] * 12, TAG, columns=columns)(_write_tile) for columns in (_ROW, _TILE, 1))


Spec: TypeAlias = NDArray[np.int64]
"""The record of a `GatedDeltaKernel`."""

_TOKENS = 32
"""Most tokens that are taken at a time."""
_TINY = np.float32(1e-6)
# What is known of a layer: int64 by place. First the columns of its kinds of inputs: where those of key head 0 begin,
# and the step from one key head to the next ...
Q, Q_STEP, K, K_STEP, V, V_STEP, Z, Z_STEP, B, B_STEP, A, A_STEP = range(12)
# ... then sizes (GROUP: value heads of a key head; WIDTH: numbers of a row of projections), and addresses: the
# convolution's weight, rates of forgetting, biases of dt, the norm's weight and its epsilon.
HEADS, GROUP, KEY_DIM, VALUE_DIM, TAPS, WIDTH, CONV, RATE, DT_BIAS, NORM, EPSILON = range(12, 23)
# 1: each dimension of the key forgets by itself (A: as many columns for each head, DT_BIAS too), and what is read is
# multiplied by the sigmoid of z, not by silu(z): Kimi Delta Attention, whose value heads are the key heads
BY_CHANNEL = 23
MOST_RATE = 24  # the largest rate of learning
FIELDS = 25


class GatedDeltaKernel(StateKernel):
    """One layer, by address. All tensors are float32 and must stay where they are."""

    def __init__(
        self, columns: Sequence[int], sizes: Sequence[int], conv: torch.Tensor, rate: torch.Tensor,
        dt_bias: torch.Tensor, norm: torch.Tensor, epsilon: float, by_channel: bool = False,
        most_rate: int = 1,
    ) -> None:  # fmt: skip
        """`columns`: Q .. A_STEP; `sizes`: HEADS .. WIDTH. `conv` [taps, channels], `rate` is exp(A_log), `norm` the
        weight of the norm with that `epsilon`. `by_channel`: Kimi Delta Attention. `most_rate`: the largest rate of
        learning."""
        number = np.array([epsilon], dtype=np.float32)
        tensors = conv, rate, dt_bias, norm
        heads, group, _, value_dim, *_ = sizes
        where = [part.data_ptr() for part in tensors]
        record = (*columns, *sizes, *where, number.ctypes.data, by_channel, most_rate)
        super().__init__(advance_states, heads * group * value_dim, record, (tensors, number))


def _sizes(record: int, rows: int, tokens: int) -> tuple[int, int]:
    spec = array(pointer(record, _WHOLE), (FIELDS,))
    heads, state = spec[HEADS], spec[GROUP] * spec[KEY_DIM] * spec[VALUE_DIM] * 4
    # a state comes and goes once for each row; each token of a chunk passes it in the first cache
    return rows * heads, (2 * rows + tokens) * heads * state


@team_kernel(_sizes)
@serial_in_order
@allocates
def advance_states(
    first_unit: int, last_unit: int, record: int, states: int, windows: int, projected: int, out: int, rows: int,
    bounds: int, begins: int, ends: int, sources: int, targets: int, tokens: int, kind: np.generic,
) -> None:  # fmt: skip
    """A `GatedDeltaKernel` by address; the numbers of segments are `SegmentPlaces`."""
    spec = array(pointer(record, _WHOLE), (FIELDS,))
    bound, begin, end, source, target = segment_arrays(rows, bounds, begins, ends, sources, targets)
    heads, size = spec[HEADS], size_of(kind)
    state, window = heads * _state_bytes(spec), _channels(spec) * (spec[TAPS] - 1) * size
    numbers = 2 * spec[KEY_DIM] + spec[GROUP] * spec[VALUE_DIM]
    # of some tokens: inputs as the convolution leaves them; keys, queries, values, what is read; gates (and, by
    # channel, what dimensions keep, and keys times that)
    mixed = np.empty(_TOKENS * numbers * size, dtype=np.uint8)
    vectors = 4 if spec[BY_CHANNEL] else 2
    wide = np.empty(_TOKENS * (vectors * spec[KEY_DIM] + 2 * spec[VALUE_DIM] + 2), dtype=np.float32)
    sums = np.empty(CHANNELS, dtype=np.float32)
    for unit in range(first_unit, last_unit):
        head = unit % heads
        for index in range(bound[unit // heads], bound[unit // heads + 1]):
            if begin[index] == end[index] and source[index] == target[index]:
                continue
            held, to = states + source[index] * state, states + target[index] * state
            seen, then = windows + source[index] * window, windows + target[index] * window
            first = begin[index]
            while True:
                count = min(_TOKENS, end[index] - first)
                _convolve(spec, projected, first, count, head, seen, then, mixed.ctypes.data, sums, kind)
                if count == 0:
                    _copy(spec, head, held, to)
                else:
                    _advance(spec, projected, out, first, count, head, held, to, mixed.ctypes.data,
                             wide.ctypes.data, kind)  # fmt: skip
                held, seen, first = to, then, first + count
                if first >= end[index]:
                    break
    keep(mixed)
    keep(wide)


@serial_in_order
def _channels(spec: Spec) -> int:
    """Channels of the convolution."""
    return int(spec[HEADS] * (2 * spec[KEY_DIM] + spec[GROUP] * spec[VALUE_DIM]))


@serial_in_order
def _state_bytes(spec: Spec) -> int:
    """Bytes of one key head's share of a state."""
    return int(spec[GROUP] * spec[KEY_DIM] * spec[VALUE_DIM] * 4)


@serial_in_order
def _convolve(
    spec: Spec, projected: int, first: int, tokens: int, head: int, source: int, target: int, out: int,
    sums: NDArray[np.float32], kind: np.generic,
) -> None:  # fmt: skip
    """Queries, keys and values of one key head through the convolution, side by side, rows of as many numbers."""
    size, channels, dim = size_of(kind), _channels(spec), spec[KEY_DIM]
    group = spec[GROUP] * spec[VALUE_DIM]
    row = projected + first * spec[WIDTH] * size
    for part in range(3):
        column = spec[2 * part] + head * spec[2 * part + 1]  # Q, K, V
        lanes = dim if part < 2 else group
        channel = part * spec[HEADS] * dim + head * lanes
        convolve_tokens(
            row + column * size, spec[WIDTH], spec[CONV] + channel * 4, channels, 0, source + channel * size,
            target + channel * size, channels, out + part * dim * size, 2 * dim + group, tokens, lanes, spec[TAPS],
            True, sums, kind,
        )  # fmt: skip


@serial_in_order
def _copy(spec: Spec, head: int, source: int, target: int) -> None:
    count = _state_bytes(spec) // 4
    before = array(pointer(source + head * count * 4, _SINGLE), (count,))
    after = array(pointer(target + head * count * 4, _SINGLE), (count,))
    for index in range(count):
        after[index] = before[index]


@serial_in_order
def _advance(
    spec: Spec, projected: int, out: int, first: int, tokens: int, head: int, source: int, target: int, mixed: int,
    wide: int, kind: np.generic,
) -> None:  # fmt: skip
    """The value heads of one key head over some tokens; `mixed` is what `_convolve` wrote."""
    dim, value_dim, group, size = spec[KEY_DIM], spec[VALUE_DIM], spec[GROUP], size_of(kind)
    keys, queries = wide, wide + _TOKENS * dim * 4
    values = queries + _TOKENS * dim * 4
    read = values + _TOKENS * value_dim * 4
    gates = read + _TOKENS * value_dim * 4
    kept = gates + _TOKENS * 2 * 4
    faded = kept + _TOKENS * dim * 4
    row = (2 * dim + group * value_dim) * size
    for token in range(tokens):
        own = mixed + token * row
        _unit(own, queries + token * dim * 4, dim, np.float32(1) / np.sqrt(np.float32(dim)), kind)
        _unit(own + dim * size, keys + token * dim * 4, dim, np.float32(1), kind)
    for member in range(group):
        number = head * group + member
        for token in range(tokens):
            inputs = array(pointer(mixed + token * row + (2 * dim + member * value_dim) * size, kind), (value_dim,))
            wider = array(pointer(values + token * value_dim * 4, _SINGLE), (value_dim,))
            for index in range(value_dim):
                wider[index] = widen(inputs[index])
        _gates(spec, projected, first, tokens, head, member, gates, kind)
        place = number * dim * value_dim * 4
        known = source + place, target + place, keys, queries, values, gates, read, tokens, dim, value_dim, faded, kept
        if spec[BY_CHANNEL]:
            _fade(spec, projected, first, tokens, head, keys, kept, faded, kind)
            call(delta_rule, (*known, EACH))
        else:
            call(delta_rule, (*known, WHOLE))
        for token in range(tokens):
            column = spec[Z] + head * spec[Z_STEP] + member * value_dim
            z = projected + ((first + token) * spec[WIDTH] + column) * size
            result = out + ((first + token) * spec[HEADS] * group + number) * value_dim * size
            _norm_and_gate(read + token * value_dim * 4, z, result, spec, kind)


@serial_in_order
def _unit(source: int, out: int, dim: int, length: np.float32, kind: np.generic) -> None:
    """A vector, as float32, of that length."""
    values, results = array(pointer(source, kind), (dim,)), array(pointer(out, _SINGLE), (dim,))
    scale = length / np.sqrt(square_sum(source, dim, kind) + _TINY)
    for index in range(dim):
        results[index] = widen(values[index]) * scale


@serial_in_order
def _gates(
    spec: Spec, projected: int, first: int, tokens: int, head: int, member: int, out: int, kind: np.generic
) -> None:
    """[tokens, 2] of one value head: what its state is multiplied by, and the rate of learning. By channel, only the
    second says something."""
    number = head * spec[GROUP] + member
    rate = array(pointer(spec[RATE], _SINGLE), (number + 1,))[number]
    bias = array(pointer(spec[DT_BIAS], _SINGLE), (number + 1,))[number]
    results = array(pointer(out, _SINGLE), (tokens, 2))
    for token in range(tokens):
        row = array(pointer(projected + (first + token) * spec[WIDTH] * size_of(kind), kind), (spec[WIDTH],))
        x = widen(row[spec[A] + head * spec[A_STEP] + member]) + bias
        results[token, 0] = _kept(x, rate)
        learn = widen(row[spec[B] + head * spec[B_STEP] + member])
        results[token, 1] = np.float32(spec[MOST_RATE]) / (np.float32(1) + exponential(-learn))


@inline
def _kept(x: np.float32, rate: np.float32) -> np.float32:
    """exp(-rate softplus(x))."""
    soft = x if x > np.float32(20) else np.float32(np.log1p(exponential(x)))
    return exponential(-rate * soft)


@serial_in_order
def _fade(
    spec: Spec, projected: int, first: int, tokens: int, head: int, keys: int, kept: int, faded: int, kind: np.generic
) -> None:  # fmt: skip
    """[tokens, key dim] of one head: what its dimensions keep with each token, and keys times that."""
    dim = spec[KEY_DIM]
    rate = array(pointer(spec[RATE], _SINGLE), (head + 1,))[head]
    bias = array(pointer(spec[DT_BIAS] + head * dim * 4, _SINGLE), (dim,))
    key, keeps = array(pointer(keys, _SINGLE), (tokens, dim)), array(pointer(kept, _SINGLE), (tokens, dim))
    within = array(pointer(faded, _SINGLE), (tokens, dim))
    for token in range(tokens):
        column = (first + token) * spec[WIDTH] + spec[A] + head * spec[A_STEP]
        row = array(pointer(projected + column * size_of(kind), kind), (dim,))
        for index in range(dim):
            keeps[token, index] = _kept(widen(row[index]) + bias[index], rate)
            within[token, index] = key[token, index] * keeps[token, index]


@serial_in_order
def _norm_and_gate(read: int, z: int, out: int, spec: Spec, kind: np.generic) -> None:
    """Normalise the numbers that one head read, weight them, multiply by silu(z), and round once."""
    dim = spec[VALUE_DIM]
    values, weights = array(pointer(read, _SINGLE), (dim,)), array(pointer(spec[NORM], _SINGLE), (dim,))
    gates, results = array(pointer(z, kind), (dim,)), array(pointer(out, kind), (dim,))
    epsilon = array(pointer(spec[EPSILON], _SINGLE), (1,))[0]
    scale = np.float32(1) / np.sqrt(square_sum(read, dim, _SINGLE) / np.float32(dim) + epsilon)
    for index in range(dim):
        gate = widen(gates[index])
        gate = (np.float32(1) if spec[BY_CHANNEL] else gate) / (np.float32(1) + exponential(-gate))
        results[index] = narrow(values[index] * scale * weights[index] * gate, kind)
