"""Rounding of weights to the whole numbers that `gemm_quantized` multiplies.

8 bits: each output has one scale, its largest weight over 127. 4 bits: every 32 inputs of an output have a scale and a
minimum, taken among a few as those with the least squared error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.jit import allocates, array, inline, keep, kind_of, pointer, room, serial, widen
from asyncengine.kernels.cpu.panel_form import INT4_GROUP, PANEL, int_form
from asyncengine.kernels.cpu.quantized_panels import pack_units
from asyncengine.kernels.cpu.rounding_tile import columns, round_group
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of
from asyncengine.kernels.cpu.vectors import bits_of, number_of

_KEPT = INT4_GROUP * PANEL
_WORK = 64
"""Bytes that could be read while a weight is rounded."""
_SIZE = np.int32(2**31 - 1)
"""Bits of a float32 without its sign."""


def quantize_rows(
    weight: torch.Tensor, panels: torch.Tensor, row_scales: torch.Tensor | None, bits: int, first: int
) -> None:
    """Put a bfloat16 or float32 weight [n, inputs] in the place of rows `first` to `first + n` of panels of
    `panel_form.int_form`. `row_scales` float32 [outputs] are for 8 bits only.

    `first` is a multiple of `PANEL`; so is n, or these are the last rows.
    """
    weight, form = weight.contiguous(), int_form(bits)
    rows, inputs = weight.shape
    chunks, panel = panels.shape[1], panels[first // PANEL :]
    assert form.chunks(inputs) == chunks
    assert first % PANEL == 0
    assert -(-rows // PANEL) <= len(panel)
    assert (row_scales is not None) == (bits == 8)
    scales = 0 if row_scales is None else row_scales[first:].data_ptr()
    offset = form.planes["minima"][0] if bits == 4 else 0
    _to_panels(
        weight.data_ptr(), panel.data_ptr(), scales, rows, inputs, chunks, form.chunk, form.chunk_bytes, form.head,
        bits, offset, kind_of(weight.dtype), use_team(),
    )  # fmt: skip


@serial
def _to_panels(
    weight: int, panels: int, row_scales: int, rows: int, inputs: int, chunks: int, chunk: int, chunk_bytes: int,
    head: int, bits: int, offset: int, kind: np.generic, team: int,
) -> None:  # fmt: skip
    pieces = pieces_of(rows * inputs * _WORK, -(-rows // PANEL), team)
    known = (
        weight, panels, row_scales, rows, inputs, chunks, chunk, chunk_bytes, head, bits, offset, kind,
    )  # fmt: skip
    parallel_for(_panels_part, team, pieces, known)


@serial
@allocates
def _panels_part(
    piece: int, pieces: int, worker: int,
    weight: int, panels: int, row_scales: int, rows: int, inputs: int, chunks: int, chunk: int, chunk_bytes: int,
    head: int, bits: int, offset: int, kind: np.generic,
) -> None:  # fmt: skip
    """A panel's numbers never leave the core's own cache between being rounded and being put in their places."""
    count, wide = -(-rows // PANEL), chunks * chunk
    values = array(pointer(weight, kind), (rows, inputs))
    own = np.zeros(PANEL * wide if bits == 8 else 1, np.uint8)
    words = array(pointer(np.int64(own.ctypes.data), np.uint32(0)), (PANEL, wide // 4))
    numbers = array(pointer(np.int64(own.ctypes.data), np.uint8(0)), (PANEL, wide))
    for panel in range(count * piece // pieces, count * (piece + 1) // pieces):
        here, first = panels + panel * chunks * chunk_bytes, panel * PANEL
        present = min(PANEL, rows - first)
        if bits == 8:
            scales = array(pointer(row_scales, np.float32(0)), (rows,))
            for lane in range(present):
                scales[first + lane] = _row_to_int8(values[first + lane], numbers[lane], inputs)
            for lane in range(present, PANEL):
                for index in range(wide):
                    numbers[lane, index] = 0
        for place in range(chunks):
            target = here + place * chunk_bytes
            if bits == 8:
                pack_units(words, target + head, place * chunk, chunk, bits)
            else:
                _chunk_to_int4(values[first : first + present], place * chunk, chunk, target, offset, target + head)
    keep(own)


@inline
def _chunk_to_int4(values: Any, begin: int, chunk: int, scales: int, minima: int, numbers: int) -> None:
    """The groups of a chunk, whose first input is `begin`: `values` [16 outputs at most, inputs]. `minima`: bytes from
    scales to minima."""
    kept, present, inputs = room(_KEPT, np.float32(0)), values.shape[0], values.shape[1]
    for group in range(chunk // INT4_GROUP):
        first = begin + group * INT4_GROUP
        count = max(min(INT4_GROUP, inputs - first), 0)
        if count == INT4_GROUP and present == PANEL:
            for block in range(INT4_GROUP // PANEL):
                start = np.int64(values[0, first + block * PANEL :].ctypes.data)
                columns(start, values.strides[0], np.int64(kept.ctypes.data) + block * PANEL * PANEL * 4, values[0, 0])
        else:
            for index in range(_KEPT):
                kept[index] = 0
            for lane in range(present):
                for index in range(count):
                    kept[index * PANEL + lane] = widen(values[lane, first + index])
        outputs = present if count > 0 else 0
        plane, target = scales + group * PANEL * 2, numbers + group * INT4_GROUP * PANEL // 2
        round_group(np.int64(kept.ctypes.data), count, outputs, plane, plane + minima, target)


@inline
def _row_to_int8(values: Any, numbers: Any, inputs: int) -> np.float32:
    """The scale of a row whose numbers, 128 above what they stand for, are written."""
    size = np.int32(0)
    for index in range(inputs):
        size = max(size, np.int32(bits_of(widen(values[index])) & _SIZE))
    largest = number_of(size)
    factor = np.float32(127) / largest if largest > np.float32(1e-30) else np.float32(0)
    for index in range(inputs):
        numbers[index] = np.int32(np.rint(widen(values[index]) * factor)) + 128
    return np.float32(largest / np.float32(127))
