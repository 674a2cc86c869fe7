"""Rounding of weights to the whole numbers that `gemm_quantized` multiplies.

8 bits: each output has one scale, its largest weight over 127. 4 bits: every 64 inputs of an output have one, taken
among a few as that with the least squared error; the largest weight becomes -8 at first, as in llama.cpp's q4_0.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.gemm_quantized import QuantizedMatrix
from asyncengine.kernels.cpu.jit import allocates, array, inline, kind_of, narrow, pointer, serial, widen
from asyncengine.kernels.cpu.panel_form import GROUP, int_form
from asyncengine.kernels.cpu.quantized_panels import empty_panels, pack_rows
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of

_WORK = 64
"""Bytes that could be read while a weight is rounded."""
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, -1.15, -1.05, -0.95)
"""Of the scale by which the largest weight is -8; negative: the largest is +7 or so."""


def quantize_rows(
    weight: torch.Tensor, panels: torch.Tensor, row_scales: torch.Tensor | None, bits: int, first: int
) -> None:
    """Put a bfloat16 or float32 weight [n, inputs] in the place of rows `first` to `first + n` of panels of
    `panel_form.int_form`. `row_scales` float32 [outputs] are for 8 bits only.

    `first` is a multiple of `PANEL`; so is n, or these are the last rows.
    """
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    kind, team = kind_of(weight.dtype), use_team()
    numbers = np.empty((outputs, inputs), dtype=np.uint8)
    if bits == 8:
        assert row_scales is not None
        scales = row_scales[first : first + outputs]
        _to_int8(weight.data_ptr(), numbers.ctypes.data, scales.data_ptr(), outputs, inputs, kind, team)
        pack_rows(int_form(8), panels, first, numbers)
        return
    shrink = torch.tensor(_SHRINK, dtype=torch.float32)
    by_group = torch.empty((outputs, -(-inputs // GROUP)), dtype=torch.bfloat16)
    _to_int4(
        weight.data_ptr(), numbers.ctypes.data, by_group.data_ptr(), outputs, inputs, shrink.data_ptr(),
        len(_SHRINK), kind, team,
    )  # fmt: skip
    pack_rows(int_form(4), panels, first, numbers, scales=by_group)


def quantize(weight: torch.Tensor, bits: int) -> QuantizedMatrix:
    """A bfloat16 or float32 weight [outputs, inputs] as `gemm_quantized.gemm` takes it."""
    outputs, inputs = weight.shape
    form = int_form(bits)
    panels = empty_panels(form, outputs, inputs)
    row_scales = torch.empty(outputs, dtype=torch.float32) if bits == 8 else None
    quantize_rows(weight, panels, row_scales, bits, 0)
    return QuantizedMatrix(form, panels, row_scales, inputs, outputs)


@serial
def _to_int8(weight: int, numbers: int, scales: int, outputs: int, inputs: int, kind: np.generic, team: int) -> None:
    pieces = pieces_of(outputs * inputs * _WORK, outputs, team)
    parallel_for(_part_to_int8, team, pieces, (weight, numbers, scales, outputs, inputs, kind))


@serial
def _part_to_int8(
    piece: int,
    pieces: int,
    worker: int,
    weight: int,
    numbers: int,
    scales: int,
    outputs: int,
    inputs: int,
    kind: np.generic,
) -> None:
    first, last = outputs * piece // pieces, outputs * (piece + 1) // pieces
    values = array(pointer(weight, kind), (outputs, inputs))
    results = array(pointer(numbers, np.uint8(0)), (outputs, inputs))
    by_output = array(pointer(scales, np.float32(0)), (outputs,))
    for row in range(first, last):
        largest = np.float32(0)
        for index in range(inputs):
            largest = max(largest, abs(widen(values[row, index])))
        factor = np.float32(127) / largest if largest > np.float32(1e-30) else np.float32(0)
        by_output[row] = largest / np.float32(127)
        for index in range(inputs):
            results[row, index] = np.int32(np.rint(widen(values[row, index]) * factor)) + 128


@serial
def _to_int4(
    weight: int, numbers: int, scales: int, outputs: int, inputs: int, shrink: int, choices: int, kind: np.generic,
    team: int,
) -> None:  # fmt: skip
    pieces = pieces_of(outputs * inputs * _WORK, outputs, team)
    parallel_for(_part_to_int4, team, pieces, (weight, numbers, scales, outputs, inputs, shrink, choices, kind))


@serial
@allocates
def _part_to_int4(
    piece: int, pieces: int, worker: int,
    weight: int, numbers: int, scales: int, outputs: int, inputs: int, shrink: int,
    choices: int, kind: np.generic,
) -> None:  # fmt: skip
    first, last = outputs * piece // pieces, outputs * (piece + 1) // pieces
    groups = -(-inputs // GROUP)
    values = array(pointer(weight, kind), (outputs, inputs))
    results = array(pointer(numbers, np.uint8(0)), (outputs, inputs))
    by_group = array(pointer(scales, np.uint16(0)), (outputs, groups))
    factors = array(pointer(shrink, np.float32(0)), (choices,))
    kept = np.empty(GROUP, np.float32)
    for row in range(first, last):
        for group in range(groups):
            begin, count = group * GROUP, min(GROUP, inputs - group * GROUP)
            kept[count:] = 0
            for index in range(count):
                kept[index] = widen(values[row, begin + index])
            scale = narrow(_best_scale(kept, factors), np.uint16(0))
            by_group[row, group] = scale
            inverse = _inverse(widen(scale))
            for index in range(count):
                results[row, begin + index] = np.uint8(_nearest_int4(kept[index] * inverse) + np.float32(8))


@inline
def _nearest_int4(value: np.float32) -> np.float32:
    """The nearest whole number of -8 .. 7."""
    return np.float32(min(max(np.rint(value), np.float32(-8)), np.float32(7)))


@inline
def _inverse(scale: np.float32) -> np.float32:
    return np.float32(1) / scale if abs(scale) > np.float32(1e-30) else np.float32(0)


@serial
def _best_scale(values: np.ndarray, factors: np.ndarray) -> np.float32:
    largest = np.float32(0)
    for index in range(GROUP):
        if abs(values[index]) > abs(largest):
            largest = values[index]
    best, least = np.float32(0), np.float32(np.inf)
    for choice in range(len(factors)):
        scale = widen(narrow(largest / np.float32(-8) * factors[choice], np.uint16(0)))
        inverse = _inverse(scale)
        error = np.float32(0)
        for index in range(GROUP):
            missing = values[index] - _nearest_int4(values[index] * inverse) * scale
            error += missing * missing
        if error < least:
            best, least = scale, error
    return best
