"""Depthwise causal convolution of a step's tokens, with the windows of inputs that their sequences remember.

A result is bias + w0 x0 + w1 x1 ..., oldest input first, each product and sum rounded to float32: the same bits however
a sequence is cut into steps. Work is shared out by rows and by blocks of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.kernels.cpu.activation import exponential
from asyncengine.kernels.cpu.calls import team_kernel
from asyncengine.kernels.cpu.jit import allocates, array, inline, keep, narrow, pointer, serial_in_order, tag_of, widen
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.vectors import size_of

# A step's segments (`layers.states.StateSegments`) for kernels of state layers: int64 by address.


class Segments(Protocol):
    """The fields of `StateSegments`."""

    @property
    def rows(self) -> NDArray[np.int64]: ...
    @property
    def begins(self) -> NDArray[np.int64]: ...
    @property
    def ends(self) -> NDArray[np.int64]: ...
    @property
    def sources(self) -> NDArray[np.int64]: ...
    @property
    def targets(self) -> NDArray[np.int64]: ...


class SegmentAddresses(NamedTuple):
    """Segments by address, as kernels take them."""

    rows: int
    bounds: int
    begins: int
    ends: int
    sources: int
    targets: int

    @classmethod
    def of(cls, segments: Segments | SegmentAddresses) -> SegmentAddresses:
        """The number of rows, and addresses of arrays that `segments` must keep alive."""
        if isinstance(segments, SegmentAddresses):
            return segments
        arrays = (segments.rows, segments.begins, segments.ends, segments.sources, segments.targets)
        return cls(len(segments.rows) - 1, *(values.ctypes.data for values in arrays))


class StateKernel:
    """One layer whose sequences have states, by address. `record`: its sizes and addresses, int64."""

    def __init__(self, run: Any, outputs: int, record: Sequence[int], owners: object) -> None:
        """`run`: the kernel by address; `owners`: the tensors and arrays whose addresses are in the record."""
        self._run, self.outputs, self._owners = run, outputs, owners  # an address does not keep memory alive
        self.record = np.array(record, dtype=np.int64)
        self.address: int = self.record.ctypes.data

    def __call__(
        self, projected: torch.Tensor, states: torch.Tensor | None, windows: torch.Tensor, segments: Segments
    ) -> torch.Tensor:
        """Results [T, outputs] of projections [T, width], contiguous; advances `states` and `windows`, its pools."""
        out = torch.empty((len(projected), self.outputs), dtype=projected.dtype)
        self._run(
            self.address, 0 if states is None else states.data_ptr(), windows.data_ptr(), projected.data_ptr(),
            out.data_ptr(), *SegmentAddresses.of(segments), len(projected), tag_of(projected.dtype), use_team(),
        )  # fmt: skip
        return out


@inline
def segment_arrays(rows: int, bounds: int, begins: int, ends: int, sources: int, targets: int) -> Any:
    """The arrays at `SegmentAddresses`."""
    bound = array(pointer(bounds, _I64), (rows + 1,))
    count = bound[rows]
    begin, end = array(pointer(begins, _I64), (count,)), array(pointer(ends, _I64), (count,))
    return bound, begin, end, array(pointer(sources, _I64), (count,)), array(pointer(targets, _I64), (count,))


CHANNELS = 256
"""Channels of a block."""
_I64, _F32 = np.int64(0), np.float32(0)


@serial_in_order
def convolve_tokens(
    x: int, stride: int, weight: int, weight_stride: int, bias: int, source: int, target: int, window_stride: int,
    out: int, out_stride: int, tokens: int, channels: int, taps: int, silu: bool, sums: NDArray[np.float32],
    dtype: np.generic,
) -> None:  # fmt: skip
    """Convolve a few channels of one sequence's next tokens: writes results to `out`, and the window after them, which
    was at `source` before, to `target`.

    Every address is that of the first of these channels in its row; strides are in numbers. `target` may be `source`.
    `sums`: scratch memory for `CHANNELS` numbers.
    """
    size = size_of(dtype)
    for token in range(tokens):
        _add_taps(
            sums, x, stride, weight, weight_stride, bias, source, window_stride, out + token * out_stride * size, token,
            channels, taps, silu, dtype,
        )  # fmt: skip
    if tokens == 0 and source == target:
        return
    length = taps - 1
    for index in range(length):  # ascending: in one window (source is target), inputs move to lower indices
        position = index + tokens - length
        address = x + position * stride * size if position >= 0 else source + (index + tokens) * window_stride * size
        values = array(pointer(address, dtype), (channels,))
        window = array(pointer(target + index * window_stride * size, dtype), (channels,))
        for channel in range(channels):
            window[channel] = values[channel]


@serial_in_order
def _add_taps(
    sums: NDArray[np.float32], x: int, stride: int, weight: int, weight_stride: int, bias: int, window: int,
    window_stride: int, out: int, token: int, channels: int, taps: int, silu: bool, dtype: np.generic,
) -> None:  # fmt: skip
    """Write one token's results. `sums`: scratch memory for a block of channels, to which taps are added in turn."""
    size = size_of(dtype)
    results = array(pointer(out, dtype), (channels,))
    for first in range(0, channels, CHANNELS):
        lanes = min(CHANNELS, channels - first)
        if bias != 0:
            biases = array(pointer(bias + first * 4, _F32), (lanes,))
            for lane in range(lanes):
                sums[lane] = biases[lane]
        else:
            for lane in range(lanes):
                sums[lane] = np.float32(0)
        for tap in range(taps):
            index = token + tap - taps + 1
            address = x + index * stride * size if index >= 0 else window + (index + taps - 1) * window_stride * size
            inputs = array(pointer(address + first * size, dtype), (lanes,))
            weights = array(pointer(weight + (tap * weight_stride + first) * 4, _F32), (lanes,))
            for lane in range(lanes):
                sums[lane] += weights[lane] * widen(inputs[lane])
        if silu:
            for lane in range(lanes):
                total = sums[lane]
                results[first + lane] = narrow(total / (np.float32(1) + exponential(-total)), dtype)
        else:
            for lane in range(lanes):
                results[first + lane] = narrow(sums[lane], dtype)


# A gated short convolution between its projections: C * conv(B * x), by rows and blocks of channels.

_GATED_TOKENS = 64
"""Most tokens that are taken at a time."""
_GATED_WORK = 24
"""Bytes that could be read while a result is computed."""
# Indices of a layer's record of int64: sizes, and addresses (0: there is none).
WIDTH, TAPS, WEIGHT, BIAS = range(4)
_FIELDS = 4


class ShortConvKernel(StateKernel):
    """One gated short convolution: [T, width] of B, C and x [T, 3 * width]; its only states are windows.

    weight float32 [taps, width], bias float32 [width]; they must not be moved.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        taps, width = weight.shape
        addresses = weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        super().__init__(run_short_conv, width, (width, taps, *addresses), (weight, bias))


def _short_conv_sizes(record: int, rows: int, tokens: int) -> tuple[int, int]:
    width = array(pointer(record, _I64), (_FIELDS,))[WIDTH]
    return rows * ((width + CHANNELS - 1) // CHANNELS), tokens * width * _GATED_WORK


@team_kernel(_short_conv_sizes)
@serial_in_order
@allocates
def run_short_conv(
    first_unit: int, last_unit: int, record: int, states: int, windows: int, projected: int, out: int, rows: int,
    bounds: int, begins: int, ends: int, sources: int, targets: int, tokens: int, dtype: np.generic,
) -> None:  # fmt: skip
    """A `ShortConvKernel` by address; the numbers of segments are `SegmentAddresses`."""
    fields, size = array(pointer(record, _I64), (_FIELDS,)), size_of(dtype)
    width, taps, bias = fields[WIDTH], fields[TAPS], fields[BIAS]
    bound, begin, end, source, target = segment_arrays(rows, bounds, begins, ends, sources, targets)
    memory = np.empty(_GATED_TOKENS * CHANNELS * size, np.uint8)
    sums = np.empty(CHANNELS, np.float32)
    blocks, slot = (width + CHANNELS - 1) // CHANNELS, (taps - 1) * width * size
    for unit in range(first_unit, last_unit):
        channel = unit % blocks * CHANNELS
        lanes = min(CHANNELS, width - channel)
        for index in range(bound[unit // blocks], bound[unit // blocks + 1]):
            before, after = windows + source[index] * slot, windows + target[index] * slot
            first = begin[index]
            while True:
                count = min(_GATED_TOKENS, end[index] - first)
                row, result = projected + first * 3 * width * size, out + (first * width + channel) * size
                inputs, column = memory.ctypes.data, channel * size
                _multiply(row + column, row + 2 * width * size + column, 3 * width, inputs, lanes, count, lanes, dtype)
                convolve_tokens(
                    inputs, lanes, fields[WEIGHT] + channel * 4, width, 0 if bias == 0 else bias + channel * 4,
                    before + channel * size, after + channel * size, width, result, width, count, lanes, taps, False,
                    sums, dtype,
                )  # fmt: skip
                _multiply_into(row + (width + channel) * size, 3 * width, result, width, count, lanes, dtype)
                before, first = after, first + count
                if first >= end[index]:
                    break
    keep(memory)


@serial_in_order
def _multiply(
    left: int, right: int, stride: int, out: int, out_stride: int, tokens: int, lanes: int, dtype: np.generic
) -> None:
    """Multiply rows that are `stride` numbers apart; write the products to rows `out_stride` apart."""
    for token in range(tokens):
        shift = token * stride * size_of(dtype)
        first, second = array(pointer(left + shift, dtype), (lanes,)), array(pointer(right + shift, dtype), (lanes,))
        results = array(pointer(out + token * out_stride * size_of(dtype), dtype), (lanes,))
        for lane in range(lanes):
            results[lane] = narrow(widen(first[lane]) * widen(second[lane]), dtype)


@serial_in_order
def _multiply_into(
    factors: int, stride: int, out: int, out_stride: int, tokens: int, lanes: int, dtype: np.generic
) -> None:
    for token in range(tokens):
        row_factors = array(pointer(factors + token * stride * size_of(dtype), dtype), (lanes,))
        results = array(pointer(out + token * out_stride * size_of(dtype), dtype), (lanes,))
        for lane in range(lanes):
            results[lane] = narrow(widen(results[lane]) * widen(row_factors[lane]), dtype)
