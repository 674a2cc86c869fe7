"""A gated short convolution between its projections: C * conv(B * x), by rows and blocks of channels."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.causal_conv import CHANNELS, SegmentPlaces, Segments, convolve_tokens
from asyncengine.kernels.cpu.jit import allocates, array, keep, kind_of, narrow, pointer, serial_in_order, widen
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of
from asyncengine.kernels.cpu.vectors import size_of

_TOKENS = 64
"""Most tokens that are taken at a time."""
_WORK = 24
"""Bytes that could be read while a result is computed."""
_WHOLE = np.int64(0)
# What is known of a layer: int64 by place. Sizes, and addresses (0: there is none).
WIDTH, TAPS, WEIGHT, BIAS = range(4)
_FIELDS = 4


class ShortConvKernel:
    """One layer's, by address. weight float32 [taps, width], bias float32 [width]; they must stay where they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._held = (weight, bias)  # an address keeps nothing where it is
        taps, self.outputs = weight.shape
        places = weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        self._record = np.array([self.outputs, taps, *places], dtype=np.int64)
        self.address: int = self._record.ctypes.data

    def __call__(self, projected: torch.Tensor, windows: torch.Tensor, segments: Segments) -> torch.Tensor:
        """[T, width] of B, C and x [T, 3 * width], contiguous; `windows` is the layer's pool."""
        out = torch.empty((len(projected), self.outputs), dtype=projected.dtype)
        run_short_conv(
            self.address, 0, windows.data_ptr(), projected.data_ptr(), out.data_ptr(), *SegmentPlaces.of(segments),
            len(projected), kind_of(projected.dtype), use_team(),
        )  # fmt: skip
        return out


@serial_in_order
def run_short_conv(
    record: int, states: int, windows: int, projected: int, out: int, rows: int, bounds: int, begins: int, ends: int,
    sources: int, targets: int, tokens: int, kind: np.generic, team: int,
) -> None:  # fmt: skip
    """A `ShortConvKernel` by address; the numbers of segments are `SegmentPlaces`."""
    width = array(pointer(record, _WHOLE), (_FIELDS,))[WIDTH]
    pieces = pieces_of(tokens * width * _WORK, rows * ((width + CHANNELS - 1) // CHANNELS), team)
    parallel_for(
        _part, team, pieces, (record, windows, projected, out, rows, bounds, begins, ends, sources, targets, kind)
    )


@serial_in_order
@allocates
def _part(
    piece: int, pieces: int, worker: int,
    record: int, windows: int, projected: int, out: int, rows: int, bounds: int, begins: int, ends: int, sources: int,
    targets: int, kind: np.generic,
) -> None:  # fmt: skip
    fields, size = array(pointer(record, _WHOLE), (_FIELDS,)), size_of(kind)
    width, taps, bias = fields[WIDTH], fields[TAPS], fields[BIAS]
    bound = array(pointer(bounds, _WHOLE), (rows + 1,))
    count = bound[rows]
    begin, end = array(pointer(begins, _WHOLE), (count,)), array(pointer(ends, _WHOLE), (count,))
    source, target = array(pointer(sources, _WHOLE), (count,)), array(pointer(targets, _WHOLE), (count,))
    memory = np.empty(_TOKENS * CHANNELS * size, np.uint8)
    sums = np.empty(CHANNELS, np.float32)
    blocks, slot = (width + CHANNELS - 1) // CHANNELS, (taps - 1) * width * size
    for unit in range(rows * blocks * piece // pieces, rows * blocks * (piece + 1) // pieces):
        channel = unit % blocks * CHANNELS
        lanes = min(CHANNELS, width - channel)
        for index in range(bound[unit // blocks], bound[unit // blocks + 1]):
            known, after = windows + source[index] * slot, windows + target[index] * slot
            first = begin[index]
            while True:
                tokens = min(_TOKENS, end[index] - first)
                row, result = projected + first * 3 * width * size, out + (first * width + channel) * size
                inputs, column = memory.ctypes.data, channel * size
                _multiply(row + column, row + 2 * width * size + column, 3 * width, inputs, lanes, tokens, lanes, kind)
                convolve_tokens(
                    inputs, lanes, fields[WEIGHT] + channel * 4, width, 0 if bias == 0 else bias + channel * 4,
                    known + channel * size, after + channel * size, width, result, width, tokens, lanes, taps, False,
                    sums, kind,
                )  # fmt: skip
                _multiply_into(row + (width + channel) * size, 3 * width, result, width, tokens, lanes, kind)
                known, first = after, first + tokens
                if first >= end[index]:
                    break
    keep(memory)


@serial_in_order
def _multiply(
    left: int, right: int, stride: int, out: int, out_stride: int, tokens: int, lanes: int, kind: np.generic
) -> None:
    """Multiply rows `stride` numbers apart, into rows `out_stride` apart."""
    for token in range(tokens):
        shift = token * stride * size_of(kind)
        first, second = array(pointer(left + shift, kind), (lanes,)), array(pointer(right + shift, kind), (lanes,))
        results = array(pointer(out + token * out_stride * size_of(kind), kind), (lanes,))
        for lane in range(lanes):
            results[lane] = narrow(widen(first[lane]) * widen(second[lane]), kind)


@serial_in_order
def _multiply_into(
    factors: int, stride: int, out: int, out_stride: int, tokens: int, lanes: int, kind: np.generic
) -> None:
    for token in range(tokens):
        known = array(pointer(factors + token * stride * size_of(kind), kind), (lanes,))
        results = array(pointer(out + token * out_stride * size_of(kind), kind), (lanes,))
        for lane in range(lanes):
            results[lane] = narrow(widen(results[lane]) * widen(known[lane]), kind)
