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

_I64, _F32 = np.int64(0), np.float32(0)

# The gated delta rule over a few tokens, for some columns of a head's state: the innermost part of `gated_delta`.

PER_HEAD, PER_CHANNEL = np.uint8(0), np.uint16(0)
"""Tags by which a kernel knows whether a state decays as a whole, or by a factor for each dimension of the key."""
_FEW = 2
"""Up to this many tokens, a state is read in long rows, as it lies in memory; with more, a few columns stay cached."""
_ROW, _TILE = 8, 2
"""Vectors of columns that are computed at once: with few tokens, and with more."""


@serial_in_order
def delta_rule(
    source: int, target: int, keys: int, queries: int, values: int, gates: int, out: int, tokens: int, key_dim: int,
    value_dim: int, faded: int, decays: int, by_channel: np.generic,
) -> None:  # fmt: skip
    """Advance a head's state from `source` to `target` (perhaps the same) over some tokens, one at least.

    All float32 and contiguous: keys and queries [tokens, key dim], values and the results, `out`, [tokens, value dim],
    gates [tokens, 2]: the decay of the state, and the rate of learning (beta). `by_channel` is `PER_CHANNEL` where
    `decays` [tokens, key dim], a factor for each dimension of the key, replaces the first gate; `faded` [tokens, key
    dim] are keys times these. Else it is `PER_HEAD`, and both are ignored.
    """
    column, rest = 0, (tokens, key_dim, value_dim * 4, faded, decays, by_channel)
    if tokens <= _FEW:
        while column + _ROW * LANES <= value_dim:
            move = column * 4
            _eight(source + move, target + move, keys, queries, values + move, gates, out + move, *rest)
            column += _ROW * LANES
    while column + _TILE * LANES <= value_dim:
        move = column * 4
        _two(source + move, target + move, keys, queries, values + move, gates, out + move, *rest)
        column += _TILE * LANES
    while column + LANES <= value_dim:
        move = column * 4
        _one(source + move, target + move, keys, queries, values + move, gates, out + move, *rest)
        column += LANES
    if column < value_dim:
        _rest(source, target, keys, queries, values, gates, out, tokens, key_dim, value_dim, column, faded, decays,
              by_channel)  # fmt: skip


@serial_in_order
def _rest(
    source: int, target: int, keys: int, queries: int, values: int, gates: int, out: int, tokens: int, key_dim: int,
    value_dim: int, first: int, faded: int, decays: int, by_channel: np.generic,
) -> None:  # fmt: skip
    """`delta_rule` for the last columns, which fill no vector, from `first` on."""
    before = array(pointer(source, _F32), (key_dim, value_dim))
    state = array(pointer(target, _F32), (key_dim, value_dim))
    key, query = array(pointer(keys, _F32), (tokens, key_dim)), array(pointer(queries, _F32), (tokens, key_dim))
    value = array(pointer(values, _F32), (tokens, value_dim))
    read = array(pointer(out, _F32), (tokens, value_dim))
    gate = array(pointer(gates, _F32), (tokens, 2))
    per_channel = size_of(by_channel) == size_of(PER_CHANNEL)
    faded_key = array(pointer(faded, _F32), (tokens, key_dim))
    channel_decay = array(pointer(decays, _F32), (tokens, key_dim))
    for token in range(tokens):
        previous = before if token == 0 else state
        decay, rate = np.float32(1) if per_channel else gate[token, 0], gate[token, 1]
        for column in range(first, value_dim):
            recalled, output = np.float32(0), np.float32(0)
            for index in range(key_dim):
                read_key = faded_key[token, index] if per_channel else key[token, index]
                recalled += previous[index, column] * read_key
            delta = (value[token, column] - decay * recalled) * rate
            for index in range(key_dim):
                factor = channel_decay[token, index] if per_channel else decay
                updated = previous[index, column] * factor + key[token, index] * delta
                state[index, column] = updated
                output += updated * query[token, index]
            read[token, column] = output


def _write_tile(
    builder: Any, source: Any, target: Any, keys: Any, queries: Any, values: Any, gates: Any, out: Any, tokens: Any,
    key_dim: Any, row: Any, faded: Any, decays: Any, by_channel: Any, *, columns: int,
) -> None:  # fmt: skip
    """Write `delta_rule` for `columns` vectors of columns; `row`: bytes of a row of the state, of values and of `out`.

    The state is read and written once a token: with the update for one token, the product with the next one's key is
    summed too, so that its delta is known before the next pass.
    """
    per_channel = by_channel == numba.typeof(PER_CHANNEL)
    zero = vectors.constant(FLOATS, 0.0)
    recalled = [cgutils.alloca_once_value(builder, zero) for _ in range(columns)]
    outputs = [cgutils.alloca_once_value(builder, zero) for _ in range(columns)]
    length = builder.mul(key_dim, LONG(4))
    read_keys = faded if per_channel else keys

    def columns_at(base: Any) -> list[Any]:
        return [builder.add(base, LONG(64 * column)) for column in range(columns)]

    def broadcast(base: Any, index: Any) -> Any:
        return vectors.splat(builder, load(builder, builder.add(base, builder.mul(index, LONG(4))), FLOAT))

    with cgutils.for_range(builder, key_dim) as loop:  # the state's value for the first token's key
        key = broadcast(read_keys, loop.index)
        for address, total in zip(columns_at(builder.add(source, builder.mul(loop.index, row))), recalled, strict=True):
            builder.store(multiply_add(builder, load(builder, address, FLOATS), key, builder.load(total)), total)
    with cgutils.for_range(builder, tokens) as turn:
        token = turn.index
        offset = builder.mul(token, length)
        first = builder.icmp_unsigned("==", token, LONG(0))
        last = builder.icmp_unsigned("==", builder.add(token, LONG(1)), tokens)
        previous = builder.select(first, source, target)
        key_row, query_row = builder.add(keys, offset), builder.add(queries, offset)
        decay_row = builder.add(decays, offset) if per_channel else None
        read_row = builder.add(read_keys, offset)
        next_row = builder.select(last, read_row, builder.add(read_row, length))  # behind the last there is no memory
        gate = builder.add(gates, builder.mul(token, LONG(8)))
        decay, rate = broadcast(gate, LONG(0)), broadcast(gate, LONG(1))
        deltas = []
        for address, total in zip(columns_at(builder.add(values, builder.mul(token, row))), recalled, strict=True):
            predicted = builder.load(total) if decay_row is not None else builder.fmul(decay, builder.load(total))
            deltas.append(builder.fmul(builder.fsub(load(builder, address, FLOATS), predicted), rate))
            builder.store(zero, total)
        for total in outputs:
            builder.store(zero, total)
        with cgutils.for_range(builder, key_dim) as loop:
            key, next_key, query = (broadcast(base, loop.index) for base in (key_row, next_row, query_row))
            factor = decay if decay_row is None else broadcast(decay_row, loop.index)
            offset = builder.mul(loop.index, row)
            sources, targets = columns_at(builder.add(previous, offset)), columns_at(builder.add(target, offset))
            for column in range(columns):
                numbers = builder.fmul(load(builder, sources[column], FLOATS), factor)
                numbers = multiply_add(builder, key, deltas[column], numbers)
                store(builder, numbers, targets[column])
                for totals, multiplier in ((outputs, query), (recalled, next_key)):
                    total = totals[column]
                    builder.store(multiply_add(builder, numbers, multiplier, builder.load(total)), total)
        for address, total in zip(columns_at(builder.add(out, builder.mul(token, row))), outputs, strict=True):
            store(builder, builder.load(total), address)


_eight, _two, _one = (emitted(*[INT64] * 12, TAG, columns=columns)(_write_tile) for columns in (_ROW, _TILE, 1))


Spec: TypeAlias = NDArray[np.int64]
"""The record of a `GatedDeltaKernel`."""

_TOKENS = 32
"""The most tokens that are computed at a time."""
_TINY = np.float32(1e-6)
# Indices of a layer's record of int64. First the columns of its inputs in a row of projections: where those of key head
# 0 begin, and the step from one key head to the next ...
Q, Q_STEP, K, K_STEP, V, V_STEP, Z, Z_STEP, B, B_STEP, A, A_STEP = range(12)
# ... then sizes (GROUP: value heads of a key head; WIDTH: numbers of a row of projections), and addresses: the
# convolution's weight, rates of forgetting, biases of dt, the norm's weight and its epsilon.
HEADS, GROUP, KEY_DIM, VALUE_DIM, TAPS, WIDTH, CONV, RATE, DT_BIAS, NORM, EPSILON = range(12, 23)
# 1: each dimension of the key decays by itself (A: as many columns for each head, DT_BIAS too), and results are
# multiplied by the sigmoid of z, not by silu(z): Kimi Delta Attention, whose value heads are the key heads
BY_CHANNEL = 23
MOST_RATE = 24  # the largest rate of learning
FIELDS = 25


class GatedDeltaKernel(StateKernel):
    """One layer of the gated delta rule, by address. All tensors are float32 and must not be moved."""

    def __init__(
        self, columns: Sequence[int], sizes: Sequence[int], conv: torch.Tensor, rate: torch.Tensor,
        dt_bias: torch.Tensor, norm: torch.Tensor, epsilon: float, by_channel: bool = False,
        most_rate: int = 1,
    ) -> None:  # fmt: skip
        """`columns`: Q .. A_STEP; `sizes`: HEADS .. WIDTH. `conv` [taps, channels], `rate` is exp(A_log), `norm` the
        weight of the norm with that `epsilon`. `by_channel`: Kimi Delta Attention. `most_rate`: the largest rate of
        learning."""
        epsilon_value = np.array([epsilon], dtype=np.float32)
        tensors = conv, rate, dt_bias, norm
        heads, group, _, value_dim, *_ = sizes
        addresses = [tensor.data_ptr() for tensor in tensors]
        record = (*columns, *sizes, *addresses, epsilon_value.ctypes.data, by_channel, most_rate)
        super().__init__(advance_states, heads * group * value_dim, record, (tensors, epsilon_value))


def _sizes(record: int, rows: int, tokens: int) -> tuple[int, int]:
    spec = array(pointer(record, _I64), (FIELDS,))
    heads, state = spec[HEADS], spec[GROUP] * spec[KEY_DIM] * spec[VALUE_DIM] * 4
    # a state comes and goes once for each row; each token of a chunk passes it in the first cache
    return rows * heads, (2 * rows + tokens) * heads * state


@team_kernel(_sizes)
@serial_in_order
@allocates
def advance_states(
    first_unit: int, last_unit: int, record: int, states: int, windows: int, projected: int, out: int, rows: int,
    bounds: int, begins: int, ends: int, sources: int, targets: int, tokens: int, dtype: np.generic,
) -> None:  # fmt: skip
    """A `GatedDeltaKernel` by address; the numbers of segments are `SegmentAddresses`."""
    spec = array(pointer(record, _I64), (FIELDS,))
    bound, begin, end, source, target = segment_arrays(rows, bounds, begins, ends, sources, targets)
    heads, size = spec[HEADS], size_of(dtype)
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
            state_from, state_to = states + source[index] * state, states + target[index] * state
            window_from, window_to = windows + source[index] * window, windows + target[index] * window
            first = begin[index]
            while True:
                count = min(_TOKENS, end[index] - first)
                _convolve(spec, projected, first, count, head, window_from, window_to, mixed.ctypes.data, sums, dtype)
                if count == 0:
                    _copy(spec, head, state_from, state_to)
                else:
                    _advance(spec, projected, out, first, count, head, state_from, state_to, mixed.ctypes.data,
                             wide.ctypes.data, dtype)  # fmt: skip
                state_from, window_from, first = state_to, window_to, first + count
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
    sums: NDArray[np.float32], dtype: np.generic,
) -> None:  # fmt: skip
    """Convolve queries, keys and values of one key head; a token's are written side by side."""
    size, channels, dim = size_of(dtype), _channels(spec), spec[KEY_DIM]
    group = spec[GROUP] * spec[VALUE_DIM]
    row = projected + first * spec[WIDTH] * size
    for projection in range(3):
        column = spec[2 * projection] + head * spec[2 * projection + 1]  # Q, K, V
        lanes = dim if projection < 2 else group
        channel = projection * spec[HEADS] * dim + head * lanes
        convolve_tokens(
            row + column * size, spec[WIDTH], spec[CONV] + channel * 4, channels, 0, source + channel * size,
            target + channel * size, channels, out + projection * dim * size, 2 * dim + group, tokens, lanes,
            spec[TAPS], True, sums, dtype,
        )  # fmt: skip


@serial_in_order
def _copy(spec: Spec, head: int, source: int, target: int) -> None:
    count = _state_bytes(spec) // 4
    before = array(pointer(source + head * count * 4, _F32), (count,))
    after = array(pointer(target + head * count * 4, _F32), (count,))
    for index in range(count):
        after[index] = before[index]


@serial_in_order
def _advance(
    spec: Spec, projected: int, out: int, first: int, tokens: int, head: int, source: int, target: int, mixed: int,
    wide: int, dtype: np.generic,
) -> None:  # fmt: skip
    """Advance the value heads of one key head over some tokens; `mixed`: the results of `_convolve`."""
    dim, value_dim, group, size = spec[KEY_DIM], spec[VALUE_DIM], spec[GROUP], size_of(dtype)
    keys, queries = wide, wide + _TOKENS * dim * 4
    values = queries + _TOKENS * dim * 4
    read = values + _TOKENS * value_dim * 4
    gates = read + _TOKENS * value_dim * 4
    decays = gates + _TOKENS * 2 * 4
    faded = decays + _TOKENS * dim * 4
    row = (2 * dim + group * value_dim) * size
    for token in range(tokens):
        row_of_token = mixed + token * row
        _normalize(row_of_token, queries + token * dim * 4, dim, np.float32(1) / np.sqrt(np.float32(dim)), dtype)
        _normalize(row_of_token + dim * size, keys + token * dim * 4, dim, np.float32(1), dtype)
    for member in range(group):
        value_head = head * group + member
        for token in range(tokens):
            inputs = array(pointer(mixed + token * row + (2 * dim + member * value_dim) * size, dtype), (value_dim,))
            wider = array(pointer(values + token * value_dim * 4, _F32), (value_dim,))
            for index in range(value_dim):
                wider[index] = widen(inputs[index])
        _gates(spec, projected, first, tokens, head, member, gates, dtype)
        offset = value_head * dim * value_dim * 4
        before, after = source + offset, target + offset
        arguments = before, after, keys, queries, values, gates, read, tokens, dim, value_dim, faded, decays
        if spec[BY_CHANNEL]:
            _channel_decays(spec, projected, first, tokens, head, keys, decays, faded, dtype)
            call(delta_rule, (*arguments, PER_CHANNEL))
        else:
            call(delta_rule, (*arguments, PER_HEAD))
        for token in range(tokens):
            column = spec[Z] + head * spec[Z_STEP] + member * value_dim
            z = projected + ((first + token) * spec[WIDTH] + column) * size
            result = out + ((first + token) * spec[HEADS] * group + value_head) * value_dim * size
            _norm_and_gate(read + token * value_dim * 4, z, result, spec, dtype)


@serial_in_order
def _normalize(source: int, out: int, dim: int, length: np.float32, dtype: np.generic) -> None:
    """Write a vector, as float32, scaled to that length."""
    values, results = array(pointer(source, dtype), (dim,)), array(pointer(out, _F32), (dim,))
    scale = length / np.sqrt(square_sum(source, dim, dtype) + _TINY)
    for index in range(dim):
        results[index] = widen(values[index]) * scale


@serial_in_order
def _gates(
    spec: Spec, projected: int, first: int, tokens: int, head: int, member: int, out: int, dtype: np.generic
) -> None:
    """Write the gates [tokens, 2] of one value head: the decay of its state, and the rate of learning. With decays by
    channel, only the second is used."""
    value_head = head * spec[GROUP] + member
    rate = array(pointer(spec[RATE], _F32), (value_head + 1,))[value_head]
    bias = array(pointer(spec[DT_BIAS], _F32), (value_head + 1,))[value_head]
    results = array(pointer(out, _F32), (tokens, 2))
    for token in range(tokens):
        row = array(pointer(projected + (first + token) * spec[WIDTH] * size_of(dtype), dtype), (spec[WIDTH],))
        x = widen(row[spec[A] + head * spec[A_STEP] + member]) + bias
        results[token, 0] = _decay(x, rate)
        learn = widen(row[spec[B] + head * spec[B_STEP] + member])
        results[token, 1] = np.float32(spec[MOST_RATE]) / (np.float32(1) + exponential(-learn))


@inline
def _decay(x: np.float32, rate: np.float32) -> np.float32:
    """exp(-rate softplus(x))."""
    soft = x if x > np.float32(20) else np.float32(np.log1p(exponential(x)))
    return exponential(-rate * soft)


@serial_in_order
def _channel_decays(
    spec: Spec, projected: int, first: int, tokens: int, head: int, keys: int, decays: int, faded: int,
    dtype: np.generic,
) -> None:  # fmt: skip
    """Write the decays [tokens, key dim] of one head, a factor for each dimension of the key, and keys times these."""
    dim = spec[KEY_DIM]
    rate = array(pointer(spec[RATE], _F32), (head + 1,))[head]
    bias = array(pointer(spec[DT_BIAS] + head * dim * 4, _F32), (dim,))
    key, decay = array(pointer(keys, _F32), (tokens, dim)), array(pointer(decays, _F32), (tokens, dim))
    faded_rows = array(pointer(faded, _F32), (tokens, dim))
    for token in range(tokens):
        column = (first + token) * spec[WIDTH] + spec[A] + head * spec[A_STEP]
        row = array(pointer(projected + column * size_of(dtype), dtype), (dim,))
        for index in range(dim):
            decay[token, index] = _decay(widen(row[index]) + bias[index], rate)
            faded_rows[token, index] = key[token, index] * decay[token, index]


@serial_in_order
def _norm_and_gate(read: int, z: int, out: int, spec: Spec, dtype: np.generic) -> None:
    """Normalise one head's results, weight them, multiply by silu(z), or by channel by the sigmoid, and round once."""
    dim = spec[VALUE_DIM]
    values, weights = array(pointer(read, _F32), (dim,)), array(pointer(spec[NORM], _F32), (dim,))
    gates, results = array(pointer(z, dtype), (dim,)), array(pointer(out, dtype), (dim,))
    epsilon = array(pointer(spec[EPSILON], _F32), (1,))[0]
    scale = np.float32(1) / np.sqrt(square_sum(read, dim, _F32) / np.float32(dim) + epsilon)
    for index in range(dim):
        gate = widen(gates[index])
        gate = (np.float32(1) if spec[BY_CHANNEL] else gate) / (np.float32(1) + exponential(-gate))
        results[index] = narrow(values[index] * scale * weights[index] * gate, dtype)
