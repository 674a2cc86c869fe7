"""Rounding of weights to the whole numbers that `gemm_quantized` multiplies, and back for rows that are looked up.

8 bits: each output has one scale, its largest weight over 127. 4 bits: every 64 inputs of an output have one, taken
among a few as that with the least squared error; the largest weight becomes -8 at first, as in llama.cpp's q4_0.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.arena import Empty, ordinary
from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.jit import array, inline, kind_of, narrow, pointer, serial, widen
from asyncengine.kernels.cpu.quantized_tiles import GROUP, PANEL
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of

_WORK = 64
"""Bytes that could be read while a weight is rounded."""
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, -1.15, -1.05, -0.95)
"""Of the scale by which the largest weight is -8; negative: the largest is +7 or so."""


def empty(outputs: int, inputs: int, bits: int, memory: Empty = ordinary) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for (weights, scales) of a weight [outputs, inputs], to be filled by `quantize_rows`."""
    groups, panels = -(-inputs // GROUP), -(-outputs // PANEL)
    numbers = memory((panels, groups * GROUP * bits // 32, PANEL, 4), torch.uint8)
    if bits == 8:
        return numbers, memory((outputs,), torch.float32)
    return numbers, memory((panels, groups, PANEL), torch.bfloat16)


def quantize_rows(weight: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, bits: int, first: int) -> None:
    """Put a bfloat16 or float32 weight [n, inputs] in the place of rows `first` to `first + n` of the whole.

    `first` is a multiple of `PANEL`; so is n, or these are the last rows.
    """
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    kind, team = kind_of(weight.dtype), use_team()
    panel = first // PANEL
    to, its_scales = numbers[panel:].data_ptr(), scales[first if bits == 8 else panel :].data_ptr()
    if bits == 8:
        _to_int8(weight.data_ptr(), to, its_scales, outputs, inputs, kind, team)
    else:
        shrink = torch.tensor(_SHRINK, dtype=torch.float32)
        _to_int4(
            weight.data_ptr(), to, its_scales, outputs, inputs, shrink.data_ptr(), len(_SHRINK), kind, team
        )  # fmt: skip


def quantize(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, scales) as `gemm_quantized.gemm` takes them, of a bfloat16 or float32 weight [outputs, inputs]."""
    outputs, inputs = weight.shape
    numbers, scales = empty(outputs, inputs, bits)
    quantize_rows(weight, numbers, scales, bits, 0)
    return numbers, scales


def read_rows(ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """out [n, inputs] = rows `ids` (int64 [n], in range) of a weight in 8 bits."""
    _read_rows(
        ids.data_ptr(), numbers.data_ptr(), scales.data_ptr(), out.data_ptr(), ids.numel(), out.shape[-1],
        numbers.shape[1], kind_of(out.dtype), use_team(),
    )  # fmt: skip


@serial
def _to_int8(weight: int, numbers: int, scales: int, outputs: int, inputs: int, kind: np.generic, team: int) -> None:
    pieces = pieces_of(outputs * inputs * _WORK, -(-outputs // PANEL), team)
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
    panels = -(-outputs // PANEL)
    first, last = panels * piece // pieces, panels * (piece + 1) // pieces
    lines = -(-inputs // GROUP) * GROUP // 4
    values = array(pointer(weight, kind), (outputs, inputs))
    results = array(pointer(numbers, np.uint8(0)), (last, lines, PANEL, 4))
    by_output = array(pointer(scales, np.float32(0)), (outputs,))
    for panel in range(first, last):
        results[panel, :, :, :] = 128
        for lane in range(min(PANEL, outputs - panel * PANEL)):
            row = panel * PANEL + lane
            largest = np.float32(0)
            for index in range(inputs):
                largest = max(largest, abs(widen(values[row, index])))
            factor = np.float32(127) / largest if largest > np.float32(1e-30) else np.float32(0)
            by_output[row] = largest / np.float32(127)
            for index in range(inputs):
                number = np.int32(np.rint(widen(values[row, index]) * factor))
                results[panel, index // 4, lane, index % 4] = number + 128


@serial
def _to_int4(
    weight: int, numbers: int, scales: int, outputs: int, inputs: int, shrink: int, choices: int, kind: np.generic,
    team: int,
) -> None:  # fmt: skip
    pieces = pieces_of(outputs * inputs * _WORK, -(-outputs // PANEL), team)
    parallel_for(_part_to_int4, team, pieces, (weight, numbers, scales, outputs, inputs, shrink, choices, kind))


@serial
def _part_to_int4(
    piece: int, pieces: int, worker: int,
    weight: int, numbers: int, scales: int, outputs: int, inputs: int, shrink: int,
    choices: int, kind: np.generic,
) -> None:  # fmt: skip
    panels = -(-outputs // PANEL)
    first, last = panels * piece // pieces, panels * (piece + 1) // pieces
    groups = -(-inputs // GROUP)
    values = array(pointer(weight, kind), (outputs, inputs))
    results = array(pointer(numbers, np.uint8(0)), (last, groups * GROUP // 8, PANEL, 4))
    by_group = array(pointer(scales, np.uint16(0)), (last, groups, PANEL))
    factors = array(pointer(shrink, np.float32(0)), (choices,))
    kept = np.empty(GROUP, np.float32)
    rounded = np.empty(GROUP, np.uint8)
    for panel in range(first, last):
        for group in range(groups):
            for lane in range(PANEL):
                row = panel * PANEL + lane
                kept[:] = 0
                if row < outputs:
                    for index in range(min(GROUP, inputs - group * GROUP)):
                        kept[index] = widen(values[row, group * GROUP + index])
                scale = narrow(_best_scale(kept, factors), np.uint16(0))
                by_group[panel, group, lane] = scale
                inverse = _inverse(widen(scale))
                for index in range(GROUP):
                    rounded[index] = np.uint8(_nearest_int4(kept[index] * inverse) + np.float32(8))
                for index in range(GROUP):
                    if index % 8 < 4:
                        line = group * GROUP // 8 + index // 8
                        results[panel, line, lane, index % 4] = rounded[index] | rounded[index + 4] << 4


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


@serial
def _read_rows(
    ids: int, numbers: int, scales: int, out: int, count: int, inputs: int, lines: int, kind: np.generic, team: int
) -> None:
    parallel_for(
        _read_part,
        team,
        pieces_of(count * lines * PANEL * 4, count, team),
        (ids, numbers, scales, out, count, inputs, lines, kind),
    )


@serial
def _read_part(
    piece: int, pieces: int, worker: int,
    ids: int, numbers: int, scales: int, out: int, count: int, inputs: int, lines: int,
    kind: np.generic,
) -> None:  # fmt: skip
    first, last = count * piece // pieces, count * (piece + 1) // pieces
    wanted = array(pointer(ids, np.int64(0)), (last,))
    results = array(pointer(out, kind), (last, inputs))
    for place in range(first, last):
        row = wanted[place]
        panel = array(pointer(numbers + row // PANEL * lines * PANEL * 4, np.uint8(0)), (lines, PANEL, 4))
        scale = array(pointer(scales + row * 4, np.float32(0)), (1,))[0]
        for index in range(inputs):
            number = np.float32(np.int32(panel[index // 4, row % PANEL, index % 4]) - 128)
            results[place, index] = narrow(number * scale, kind)
