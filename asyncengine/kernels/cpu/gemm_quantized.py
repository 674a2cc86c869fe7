"""x W^T with weights in 8 or 4 bits and x rounded to 8 bits as it comes: integer products, scaled in float32.

Weights are whole numbers above an offset (128 or 8), sixteen outputs side by side, four inputs of each together, which
is what the CPU's instruction for such products takes (AVX512-VNNI; elsewhere plain arithmetic does the same). x is
rounded in groups of 64 numbers of one row, each with a scale of its own, so that one large value costs its group alone.
Sums of integers are exact, and those of the groups are made in one order: a row's result depends neither on the rows
beside it nor on the number of threads.

Memory, for panels of sixteen outputs and inputs padded with zeros to whole groups:
8 bits: weights uint8 [panels, inputs / 4, 16, 4]; scales float32 [outputs]
4 bits: weights uint8 [panels, inputs / 8, 16, 4]: of eight inputs the first four in the lower halves of the bytes, the
others in the upper ones; scales bfloat16 [panels, inputs / 64, 16]
"""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.jit import (
    array,
    kind_of,
    narrow,
    pointer,
    serial_in_order,
    widen,
)
from asyncengine.kernels.cpu.quantized_tiles import (
    GROUP,
    MOST,
    PANEL,
    PANELS,
    tile1,
    tile2,
    tile3,
    tile4,
    tile5,
    tile6,
)
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of, reads_worth
from asyncengine.kernels.cpu.vectors import bits_of, number_of

_EVEN = 6
"""Rows whose arithmetic takes as long as reading a panel."""
_ROUNDING = 16
"""Bytes that could be read while a number of x is rounded."""
_ROUNDER, _ROUNDER_BITS = np.float32(1.5 * 2**23), np.int32(0x4B400000)
"""Adding it leaves a float32 without fraction, rounded to nearest even: a small number plus these bits."""


def scratch_bytes(rows: int, inputs: int) -> int:
    """What `gemm` needs beside its arguments."""
    groups = -(-inputs // GROUP)
    return rows * groups * (GROUP + 8)


def gemm(
    x: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, bits: int, out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:  # fmt: skip
    """out [..., outputs] = x [..., inputs] W^T + bias; `bias` float32 [outputs], `out` contiguous, of either type."""
    x = x.contiguous()
    inputs, outputs = x.shape[-1], out.shape[-1]
    rows = x.numel() // inputs
    scratch = torch.empty(scratch_bytes(rows, inputs), dtype=torch.uint8)
    multiply_rounded(
        x.data_ptr(), weights.data_ptr(), scales.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        scratch.data_ptr(), rows, inputs, outputs, np.uint8(bits) if bits == 8 else np.int8(bits),
        kind_of(x.dtype), kind_of(out.dtype), x.element_size(), use_team(),
    )  # fmt: skip


@serial_in_order
def multiply_rounded(
    x: int, weights: int, scales: int, bias: int, out: int, scratch: int, rows: int, inputs: int, outputs: int,
    bits: np.generic, kind: np.generic, out_kind: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    """`gemm` by address. `size` is the bytes of a number of x."""
    groups = -(-inputs // GROUP)
    offset = 128 if bits == 8 else 8
    parallel_for(
        _round_part,
        team,
        pieces_of(rows * inputs * _ROUNDING, rows, team),
        (x, scratch, rows, inputs, offset, kind, size),
    )
    size_of_weights = groups * GROUP * outputs // 8 * (8 if bits == 8 else 4)
    pairs = -(-outputs // (PANELS * PANEL))
    pieces = pieces_of(size_of_weights * reads_worth(rows, _EVEN), pairs, team)
    parallel_for(_gemm_part, team, pieces, (weights, scales, bias, out, scratch, rows, groups, outputs, bits, out_kind))


@serial_in_order
def _round_part(
    piece: int,
    pieces: int,
    worker: int,
    x: int,
    scratch: int,
    rows: int,
    inputs: int,
    offset: int,
    kind: np.generic,
    size: int,
) -> None:
    """Rows of x, those of one of `pieces`, as int8 [rows, groups * 64], then scales float32 [rows, groups], then int32
    alike: what a sum begins with, so that the offset of the weights falls out of it. `size`: bytes of a number of x.

    NaN and infinities make the scale of their group, and so every result of their row, NaN or infinite.
    """
    first, last = rows * piece // pieces, rows * (piece + 1) // pieces
    groups = -(-inputs // GROUP)
    rounded = array(pointer(scratch, np.int8(0)), (rows, groups, GROUP))
    scales = array(pointer(scratch + rows * groups * GROUP, np.float32(0)), (rows, groups))
    starts = array(pointer(scratch + rows * groups * (GROUP + 4), np.int32(0)), (rows, groups))
    for row in range(first, last):
        for group in range(groups):
            count = min(GROUP, inputs - group * GROUP)
            values = array(pointer(x + (row * inputs + group * GROUP) * size, kind), (GROUP,))
            largest = np.int32(0)
            for index in range(count):  # as bits, which order like the numbers; floats would be compared one by one
                largest = max(largest, bits_of(widen(values[index])) & np.int32(0x7FFFFFFF))
            scale = number_of(largest) / np.float32(127)
            factor = np.float32(1) / scale if scale > np.float32(1e-30) else np.float32(0)
            numbers = rounded[row, group]
            total = np.int32(0)
            for index in range(count):
                shifted = widen(values[index]) * factor + _ROUNDER
                number = bits_of(shifted) - _ROUNDER_BITS
                numbers[index] = number
                total += number
            for index in range(count, GROUP):
                numbers[index] = 0
            scales[row, group] = scale
            starts[row, group] = -offset * total


@serial_in_order
def _gemm_part(
    piece: int, pieces: int, worker: int,
    weights: int, scales: int, bias: int, out: int, scratch: int, rows: int, groups: int,
    outputs: int, bits: np.generic, kind: np.generic,
) -> None:  # fmt: skip
    """Outputs of the pairs of panels of one of `pieces`, for all rows."""
    pairs = -(-outputs // (PANELS * PANEL))
    first, last = pairs * piece // pieces, pairs * (piece + 1) // pieces
    panel = groups * GROUP * PANEL // 8 * (8 if bits == 8 else 4)
    numbers, x_scales = scratch, scratch + rows * groups * GROUP
    starts = x_scales + rows * groups * 4
    results = array(pointer(out, kind), (rows, outputs))
    found = np.empty((MOST, PANELS * PANEL), np.float32)
    by_output = array(pointer(scales, np.float32(0)), (outputs,))
    added = array(pointer(bias, np.float32(0)), (outputs,))
    panels = -(-outputs // PANEL)
    turns = -(-rows // MOST)
    for pair in range(first, last):
        one, width = pair * PANELS, min(PANELS * PANEL, outputs - pair * PANELS * PANEL)
        two = min(one + 1, panels - 1)
        for turn in range(turns):
            row, end = rows * turn // turns, rows * (turn + 1) // turns
            _tile(
                end - row, numbers + row * groups * GROUP, x_scales + row * groups * 4, starts + row * groups * 4,
                weights + one * panel, (two - one) * panel, scales + one * groups * PANEL * 2,
                (two - one) * groups * PANEL * 2, groups, turn, turns, found.ctypes.data, bits,
            )  # fmt: skip
            for place in range(row, end):
                for lane in range(width):
                    value = found[place - row, lane]
                    column = one * PANEL + lane
                    if bits == 8:
                        value *= by_output[column]
                    if bias != 0:
                        value += added[column]
                    results[place, column] = narrow(value, kind)


@serial_in_order
def _tile(
    rows: int, x: int, x_scales: int, starts: int, weights: int, panel: int, scales: int, scale_panel: int, groups: int,
    turn: int, turns: int, out: int, bits: np.generic,
) -> None:  # fmt: skip
    if rows == 1:
        tile1(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)
    elif rows == 2:
        tile2(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)
    elif rows == 3:
        tile3(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)
    elif rows == 4:
        tile4(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)
    elif rows == 5:
        tile5(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)
    elif rows == 6:
        tile6(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)


round_part, gemm_part = _round_part, _gemm_part
"""For a loop over several weights (`experts`)."""
