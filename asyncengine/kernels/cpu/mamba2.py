"""Mamba-2 between its projections: convolution, the state moved over a step's tokens, gate and norm, in one call.

A head's state [state size, dimensions] is cut into tiles of sixteen dimensions, one vector, by a few of the state size.
A tile stays in registers while a block's tokens of one sequence pass by, one after the other: a token's result is the
same sum whatever chunk it came in, and never crosses lanes.

    S <- S * exp(A dt) + B (dt x),   y = D x + sum of S C

Work is shared out by rows and heads; blocks of tokens go one after the other, so that what lies between state and norm
stays in the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba.core import cgutils
from numpy.typing import NDArray

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.activation import exponential, silu
from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.causal_conv import CHANNELS, StateKernel, convolve_tokens, segment_arrays
from asyncengine.kernels.cpu.intrinsics import INT64, emitted
from asyncengine.kernels.cpu.jit import allocates, array, inline, keep, narrow, pointer, serial_in_order, widen
from asyncengine.kernels.cpu.team_loops import pieces_of
from asyncengine.kernels.cpu.vectors import FLOAT, FLOATS, LANES, LONG, load, size_of, square_sum, store

TILE = 16 if vectors.WIDE else 4
"""Rows of a state in a tile, a vector each: as many as leave registers for a token's numbers."""
BLOCK = 128
"""The most tokens that pass through all three loops together, so that what is between these stays in the cache."""
AHEAD = 2**13
"""Bytes of a state that are prefetched ahead of reading: the heads' states follow each other."""
GATED, BEFORE_GATE, GATE_ALONE = range(3)
"""Forms of the norm: of the gated result; of the result before its gate; none."""
_STATE_WORK, _TOKEN_WORK, _NORM_WORK, _CONV_WORK = 8, 1, 16, 16
"""Bytes that could be read while a number of a state is moved, while a token passes it, while a result is gated, and
while one of the convolution is made."""
_I64, _F32 = np.int64(0), np.float32(0)

# Indices of a layer's record of int64: sizes, then addresses.
HEADS, DIM, STATES, GROUPS, NORM, NORM_GROUPS, WIDTH, TAPS = range(8)
DECAY, SKIP, STEP_BIAS, WEIGHT, CONV, CONV_BIAS, NUMBERS = range(8, 15)
_FIELDS = 15
LEAST, MOST, EPSILON, SCALE = range(4)
"""Indices of the float32 at NUMBERS: bounds of dt, the norm's epsilon, and the factor of the results."""


class Mamba2Form(NamedTuple):
    """Sizes of a layer, and how its norm is made."""

    heads: int
    dim: int
    states: int
    groups: int
    norm: int
    """`GATED`, `BEFORE_GATE` or `GATE_ALONE`."""
    norm_groups: int
    epsilon: float
    limits: tuple[float, float]
    """Bounds of dt."""
    width: int
    """Numbers of a row of projections: z, x, B, C, dt, and perhaps others."""
    taps: int
    scale: float = 1.0
    """A factor of the results."""

    @property
    def fits(self) -> bool:
        """True if the kernel takes such a layer."""
        return self.dim % LANES == 0 and self.states % TILE == 0


class Mamba2Kernel(StateKernel):
    """One Mamba-2 layer, by address. `parameters` float32: A (negative), D, the bias of dt, [heads] each, and the
    norm's weight; `conv` [taps, channels] and its bias, float32 too. They must not be moved. States are float32 [slots,
    heads, states, dim]."""

    def __init__(
        self, form: Mamba2Form, parameters: tuple[torch.Tensor, ...], conv: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self.form = form
        numbers = np.array([*form.limits, form.epsilon, form.scale], dtype=np.float32)
        record = (
            form.heads, form.dim, form.states, form.groups, form.norm, form.norm_groups, form.width, form.taps,
            *(vector.data_ptr() for vector in parameters), conv.data_ptr(), 0 if bias is None else bias.data_ptr(),
            numbers.ctypes.data,
        )  # fmt: skip
        super().__init__(run_mamba2, form.heads * form.dim, record, (parameters, conv, bias, numbers))


@emitted(*[INT64] * 12)
def advance_tile(
    builder: Any, source: Any, target: Any, stride: Any, inputs: Any, input_stride: Any, decays: Any, b: Any,
    c: Any, shared_stride: Any, y: Any, y_stride: Any, tokens: Any,
) -> None:  # fmt: skip
    """Advance a tile of a state, with rows `stride` bytes apart, from `source` over some tokens to `target`. `inputs`:
    dt x of each token, sixteen; `decays`: its factor of decay; `b`, `c`: its B and C, of these rows; `y`: sixteen
    numbers, to which the results are added. All float32."""
    zero = LONG(0)
    shifts = [vectors.at(builder, zero, stride, row, zero) for row in range(TILE)]
    for shift in shifts:
        vectors.prefetch(builder, builder.add(builder.add(source, shift), LONG(AHEAD)))
    state = [cgutils.alloca_once_value(builder, load(builder, builder.add(source, shift), FLOATS)) for shift in shifts]
    with cgutils.for_range(builder, tokens) as loop:
        factor = vectors.splat(builder, load(builder, builder.add(decays, builder.mul(loop.index, LONG(4))), FLOAT))
        x = load(builder, builder.add(inputs, builder.mul(loop.index, input_stride)), FLOATS)
        result = builder.add(y, builder.mul(loop.index, y_stride))
        shared = builder.mul(loop.index, shared_stride)
        sums = [load(builder, result, FLOATS), vectors.constant(FLOATS, 0.0)]
        for row, cell in enumerate(state):
            first, second = (
                vectors.splat(builder, load(builder, builder.add(builder.add(base, shared), LONG(4 * row)), FLOAT))
                for base in (b, c)
            )
            moved = vectors.multiply_add(builder, first, x, builder.fmul(builder.load(cell), factor))
            builder.store(moved, cell)
            sums[row % 2] = vectors.multiply_add(builder, moved, second, sums[row % 2])
        store(builder, builder.fadd(*sums), result)
    for shift, cell in zip(shifts, state, strict=True):
        store(builder, builder.load(cell), builder.add(target, shift))


@serial_in_order
@allocates
def run_mamba2(
    record: int, states: int, windows: int, projected: int, out: int, rows: int, bounds: int, begins: int, ends: int,
    sources: int, targets: int, tokens: int, dtype: np.generic, team: int,
) -> None:  # fmt: skip
    """A `Mamba2Kernel` by address; the numbers of segments are `SegmentAddresses`."""
    fields = array(pointer(record, _I64), (_FIELDS,))
    inner, heads = fields[HEADS] * fields[DIM], fields[HEADS]
    channels, size = inner + 2 * fields[GROUPS] * fields[STATES], inner * fields[STATES]
    blocks, most = max(1, (tokens + BLOCK - 1) // BLOCK), min(tokens, BLOCK)
    mixed, y = np.empty(most * channels * size_of(dtype), np.uint8), np.empty(most * inner, np.float32)
    for block in range(blocks):
        first, last = block * BLOCK, min(tokens, (block + 1) * BLOCK)
        count, final = last - first, block + 1 == blocks
        parallel_for(
            _convolve_piece, team,
            pieces_of(count * channels * _CONV_WORK, rows * ((channels + CHANNELS - 1) // CHANNELS), team),
            (record, windows, projected, mixed.ctypes.data, rows, bounds, begins, ends, sources, targets, first, last,
             final, dtype),
        )  # fmt: skip
        work = (min(rows, count) * _STATE_WORK + count * _TOKEN_WORK) * size
        parallel_for(
            _scan_piece, team, pieces_of(work, rows * heads, team),
            (record, mixed.ctypes.data, projected, y.ctypes.data, states, rows, bounds, begins, ends, sources, targets,
             first, last, final, dtype),
        )  # fmt: skip
        parallel_for(
            _norm_piece, team, pieces_of(count * inner * _NORM_WORK, count, team),
            (record, projected, out, y.ctypes.data, first, last, dtype),
        )  # fmt: skip
    keep(mixed)
    keep(y)


@inline
def _tokens_of(begin: int, end: int, first: int, last: int, final: bool) -> tuple[int, int]:
    """The tokens of a segment that are in [first, last), or (-1, -1) if this block skips it. A segment without tokens
    copies a state, in the block that its position is in."""
    left, right = max(begin, first), min(end, last)
    if begin == end:
        return (first, first) if begin >= first and (begin < last or final) else (-1, -1)
    return (left, right) if left < right else (-1, -1)


@serial_in_order
@allocates
def _convolve_piece(
    piece: int, pieces: int, worker: int,
    record: int, windows: int, projected: int, mixed: int, rows: int, bounds: int, begins: int, ends: int,
    sources: int, targets: int, first: int, last: int, final: bool, dtype: np.generic,
) -> None:  # fmt: skip
    """Convolve x, B and C, of some channels of some rows, for the tokens in [first, last)."""
    fields, size = array(pointer(record, _I64), (_FIELDS,)), size_of(dtype)
    inner, width, taps = fields[HEADS] * fields[DIM], fields[WIDTH], fields[TAPS]
    channels, bias = inner + 2 * fields[GROUPS] * fields[STATES], fields[CONV_BIAS]
    bound, begin, end, source, target = segment_arrays(rows, bounds, begins, ends, sources, targets)
    blocks, slot = (channels + CHANNELS - 1) // CHANNELS, (taps - 1) * channels * size
    sums = np.empty(CHANNELS, np.float32)
    for unit in range(rows * blocks * piece // pieces, rows * blocks * (piece + 1) // pieces):
        channel = unit % blocks * CHANNELS
        for index in range(bound[unit // blocks], bound[unit // blocks + 1]):
            left, right = _tokens_of(begin[index], end[index], first, last, final)
            if left < 0:
                continue
            window, pool = source[index] if begin[index] >= first else target[index], windows + channel * size
            convolve_tokens(
                projected + (left * width + inner + channel) * size, width, fields[CONV] + channel * 4, channels,
                0 if bias == 0 else bias + channel * 4, pool + window * slot, pool + target[index] * slot, channels,
                mixed + ((left - first) * channels + channel) * size, channels, right - left,
                min(CHANNELS, channels - channel), taps, True, sums, dtype,
            )  # fmt: skip


@serial_in_order
@allocates
def _scan_piece(
    piece: int, pieces: int, worker: int,
    record: int, mixed: int, projected: int, y: int, pool: int, rows: int, bounds: int, begins: int, ends: int,
    sources: int, targets: int, first: int, last: int, final: bool, dtype: np.generic,
) -> None:  # fmt: skip
    """Advance the states of some heads of some rows over the tokens in [first, last)."""
    fields = array(pointer(record, _I64), (_FIELDS,))
    heads, dim, states, group = fields[HEADS], fields[DIM], fields[STATES], fields[GROUPS]
    bound, begin, end, source, target = segment_arrays(rows, bounds, begins, ends, sources, targets)
    count, last_group = last - first, -1
    decays, steps = np.empty(count, np.float32), np.empty(count, np.float32)
    inputs, shared = np.empty((count, dim), np.float32), np.empty((2, count, states), np.float32)
    slot = heads * states * dim * 4
    for unit in range(rows * heads * piece // pieces, rows * heads * (piece + 1) // pieces):
        head = unit % heads
        for index in range(bound[unit // heads], bound[unit // heads + 1]):
            left, right = _tokens_of(begin[index], end[index], first, last, final)
            if left < 0:
                continue
            state = source[index] if begin[index] >= first else target[index]  # where an earlier block has put it
            if last_group != index * group + head * group // heads:  # the heads of a group share B and C
                last_group = index * group + head * group // heads
                _take_shared(fields, mixed, head, left - first, right - first, shared.ctypes.data, count, dtype)
            _take_steps(fields, projected, head, left, right, steps.ctypes.data, decays.ctypes.data, dtype)
            _take_inputs(fields, mixed, y, head, left - first, right - first, steps, inputs.ctypes.data, dtype)
            _move_tiles(
                pool + state * slot + head * states * dim * 4, pool + target[index] * slot + head * states * dim * 4,
                dim, states, inputs.ctypes.data, decays.ctypes.data, shared.ctypes.data,
                shared.ctypes.data + count * states * 4, y + ((left - first) * heads + head) * dim * 4,
                heads * dim * 4, right - left,
            )  # fmt: skip
    keep(decays)
    keep(steps)
    keep(inputs)
    keep(shared)


@serial_in_order
def _take_shared(
    fields: NDArray[np.int64], mixed: int, head: int, left: int, right: int, shared: int, most: int, dtype: np.generic
) -> None:
    """Write B and C of a head's group for the block's tokens [left, right), as float32 [2, most, states]."""
    inner, states, groups = fields[HEADS] * fields[DIM], fields[STATES], fields[GROUPS]
    group, channels = head * groups // fields[HEADS], inner + 2 * groups * states
    for token in range(left, right):
        for matrix in range(2):
            address = mixed + (token * channels + inner + (matrix * groups + group) * states) * size_of(dtype)
            values = array(pointer(address, dtype), (states,))
            floats = array(pointer(shared + (matrix * most + token - left) * states * 4, _F32), (states,))
            for lane in range(states):
                floats[lane] = widen(values[lane])


@serial_in_order
def _take_steps(
    fields: NDArray[np.int64], projected: int, head: int, left: int, right: int, steps: int, decays: int,
    dtype: np.generic,
) -> None:  # fmt: skip
    """Write dt of one head for tokens [left, right) to `steps`, and the factors of decay to `decays`."""
    heads = fields[HEADS]
    numbers = array(pointer(fields[NUMBERS], _F32), (4,))
    decay = array(pointer(fields[DECAY], _F32), (heads,))[head]
    bias = array(pointer(fields[STEP_BIAS], _F32), (heads,))[head]
    least, most = numbers[LEAST], numbers[MOST]
    column = 2 * (heads * fields[DIM] + fields[GROUPS] * fields[STATES]) + head
    count = right - left
    step_sizes, factors = array(pointer(steps, _F32), (count,)), array(pointer(decays, _F32), (count,))
    for token in range(count):
        address = projected + ((left + token) * fields[WIDTH] + column) * size_of(dtype)
        step_sizes[token] = widen(array(pointer(address, dtype), (1,))[0]) + bias
    for token in range(count):
        step = _softplus(step_sizes[token])
        step = least if step < least else step
        step = most if step > most else step
        step_sizes[token] = step
        factors[token] = exponential(step * decay)


@serial_in_order
def _take_inputs(
    fields: NDArray[np.int64], mixed: int, y: int, head: int, left: int, right: int, steps: NDArray[np.float32],
    inputs: int, dtype: np.generic,
) -> None:  # fmt: skip
    """Write dt x of one head for the block's tokens [left, right) to `inputs`, and D x to y, where results begin."""
    heads, dim = fields[HEADS], fields[DIM]
    skip = array(pointer(fields[SKIP], _F32), (heads,))[head]
    channels = heads * dim + 2 * fields[GROUPS] * fields[STATES]
    for token in range(left, right):
        step = steps[token - left]
        values = array(pointer(mixed + (token * channels + head * dim) * size_of(dtype), dtype), (dim,))
        floats = array(pointer(inputs + (token - left) * dim * 4, _F32), (dim,))
        results = array(pointer(y + (token * heads + head) * dim * 4, _F32), (dim,))
        for lane in range(dim):
            x = widen(values[lane])
            floats[lane] = step * x
            results[lane] = skip * x


@serial_in_order
def _move_tiles(
    source: int, target: int, dim: int, states: int, inputs: int, decays: int, b: int, c: int, y: int,
    y_stride: int, tokens: int,
) -> None:  # fmt: skip
    """Advance one head's state over some tokens, tile by tile in the order of its memory."""
    row = dim * 4
    for first in range(0, states, TILE):
        for lane in range(0, dim, LANES):
            offset = first * row + lane * 4
            advance_tile(
                source + offset, target + offset, row, inputs + lane * 4, row, decays, b + first * 4, c + first * 4,
                states * 4, y + lane * 4, y_stride, tokens,
            )  # fmt: skip


@inline
def _softplus(x: np.float32) -> np.float32:
    """log(1 + e^x), as max(x, 0) + log(1 + e^-|x|); the logarithm is twice the inverse hyperbolic tangent's series."""
    power = exponential(-abs(x))
    ratio = power / (power + np.float32(2))
    square = ratio * ratio
    total = square * np.float32(1 / 15) + np.float32(1 / 13)
    total = total * square + np.float32(1 / 11)
    total = total * square + np.float32(1 / 9)
    total = total * square + np.float32(1 / 7)
    total = total * square + np.float32(1 / 5)
    total = total * square + np.float32(1 / 3)
    total = total * square + np.float32(1)
    log_term = np.float32(2) * ratio * total
    return log_term + x if x > np.float32(0) else log_term


@serial_in_order
def _norm_piece(
    piece: int, pieces: int, worker: int,
    record: int, projected: int, out: int, y: int, first: int, last: int, dtype: np.generic,
) -> None:  # fmt: skip
    """Gate and normalise some of the tokens [first, last); z comes first in a row of projections."""
    fields, size = array(pointer(record, _I64), (_FIELDS,)), size_of(dtype)
    numbers = array(pointer(fields[NUMBERS], _F32), (4,))
    inner, tokens, form, groups = fields[HEADS] * fields[DIM], last - first, fields[NORM], fields[NORM_GROUPS]
    width, scale = inner // groups, numbers[SCALE]
    for token in range(tokens * piece // pieces, tokens * (piece + 1) // pieces):
        values = array(pointer(y + token * inner * 4, _F32), (inner,))
        results = array(pointer(out + (first + token) * inner * size, dtype), (inner,))
        gates = array(pointer(projected + (first + token) * fields[WIDTH] * size, dtype), (inner,))
        if form == GATED:
            for index in range(inner):
                values[index] *= silu(widen(gates[index]))
        for group in range(groups if form != GATE_ALONE else 0):
            address = y + (token * inner + group * width) * 4
            factor = np.float32(1) / np.sqrt(square_sum(address, width, _F32) / np.float32(width) + numbers[EPSILON])
            normed = array(pointer(address, _F32), (width,))
            weight = array(pointer(fields[WEIGHT] + group * width * 4, _F32), (width,))
            for index in range(width):
                normed[index] = normed[index] * factor * weight[index]
        if form == GATED:
            for index in range(inner):
                results[index] = narrow(values[index] * scale, dtype)
        else:
            for index in range(inner):
                results[index] = narrow(values[index] * silu(widen(gates[index])) * scale, dtype)
