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

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from asyncengine.cpu import vectors
from asyncengine.cpu.calls import spread
from asyncengine.cpu.jit import (
    array,
    kind_of,
    narrow,
    pointer,
    serial_in_order,
    widen,
)
from asyncengine.cpu.team import pieces_of, reads_worth, use_team
from asyncengine.cpu.vectors import FLOATS, LANES, LINE, LONG, WORD, WORDS, at, bits_of, cpu_has, load, number_of

GROUP = 64
PANEL = LANES
_PANELS = 2
"""Panels of a tile."""
_MOST = 6 if cpu_has("avx512f") else 1
"""Rows of x in the largest tile whose sums fit in the registers."""
_UNROLL = 4
_EVEN = 6
"""Rows whose arithmetic takes as long as reading a panel."""
_ROUNDING = 16
"""Bytes that could be read while a number of x is rounded."""
_ROUNDER, _ROUNDER_BITS = np.float32(1.5 * 2**23), np.int32(0x4B400000)
"""Adding it leaves a float32 without fraction, rounded to nearest even: a small number plus these bits."""
_BYTE_DOTS = cpu_has("avx512vnni")


def scratch_bytes(rows: int, inputs: int) -> int:
    """What `product` needs beside its arguments."""
    groups = -(-inputs // GROUP)
    return rows * groups * (GROUP + 8)


def product(
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
    """`product` by address. `size` is the bytes of a number of x."""
    groups = -(-inputs // GROUP)
    offset = 128 if bits == 8 else 8
    spread(
        _round_part,
        team,
        pieces_of(rows * inputs * _ROUNDING, rows, team),
        (x, scratch, rows, inputs, offset, kind, size),
    )
    size_of_weights = groups * GROUP * outputs // 8 * (8 if bits == 8 else 4)
    pairs = -(-outputs // (_PANELS * PANEL))
    pieces = pieces_of(size_of_weights * reads_worth(rows, _EVEN), pairs, team)
    spread(_product_part, team, pieces, (weights, scales, bias, out, scratch, rows, groups, outputs, bits, out_kind))


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
def _product_part(
    piece: int, pieces: int, worker: int,
    weights: int, scales: int, bias: int, out: int, scratch: int, rows: int, groups: int,
    outputs: int, bits: np.generic, kind: np.generic,
) -> None:  # fmt: skip
    """Outputs of the pairs of panels of one of `pieces`, for all rows."""
    pairs = -(-outputs // (_PANELS * PANEL))
    first, last = pairs * piece // pieces, pairs * (piece + 1) // pieces
    panel = groups * GROUP * PANEL // 8 * (8 if bits == 8 else 4)
    numbers, x_scales = scratch, scratch + rows * groups * GROUP
    starts = x_scales + rows * groups * 4
    results = array(pointer(out, kind), (rows, outputs))
    found = np.empty((_MOST, _PANELS * PANEL), np.float32)
    by_output = array(pointer(scales, np.float32(0)), (outputs,))
    added = array(pointer(bias, np.float32(0)), (outputs,))
    panels = -(-outputs // PANEL)
    turns = -(-rows // _MOST)
    for pair in range(first, last):
        one, width = pair * _PANELS, min(_PANELS * PANEL, outputs - pair * _PANELS * PANEL)
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
        _tile1(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)
    elif rows == 2:
        _tile2(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)
    elif rows == 3:
        _tile3(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)
    elif rows == 4:
        _tile4(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)
    elif rows == 5:
        _tile5(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)
    elif rows == 6:
        _tile6(x, x_scales, starts, weights, panel, scales, scale_panel, groups, turn, turns, out, bits)


class _TileWriter:
    """Writes the tile of one number of rows. out float32 [rows, 32]; `panel` is the bytes from one to the other."""

    def __init__(self, builder: Any, rows: int, bits: int, arguments: Any) -> None:
        self.builder, self.rows, self.bits = builder, rows, bits
        (self.x, self.x_scales, self.starts, self.weights, self.panel, self.scales, self.scale_panel, self.groups,
         self.turn, self.turns, self.out) = arguments  # fmt: skip
        self.line_inputs = 4 if bits == 8 else 8
        """Inputs in a line of a panel's weights."""
        self.cells = [(row, panel) for row in range(rows) for panel in range(_PANELS)]

    def write(self) -> None:
        builder = self.builder
        zero = vectors.constant(FLOATS, 0.0)
        totals = {cell: cgutils.alloca_once_value(builder, zero) for cell in self.cells}
        sums = {cell: cgutils.alloca_once(builder, WORDS) for cell in self.cells}
        lines = GROUP // self.line_inputs
        with cgutils.for_range(builder, self.groups) as loop:
            group = loop.index
            word = builder.mul(group, LONG(4))
            x_size = builder.mul(self.groups, LONG(GROUP))
            for row in range(self.rows):
                start = vectors.splat(
                    builder, load(builder, at(builder, self.starts, self._word_row(), row, word), WORD)
                )
                for panel in range(_PANELS):
                    builder.store(start, sums[row, panel])
            ahead = self._ahead(group)
            with cgutils.for_range(builder, LONG(lines // _UNROLL)) as inner:
                for step in range(_UNROLL):
                    line = builder.add(builder.mul(inner.index, LONG(_UNROLL)), LONG(step))
                    line = builder.add(line, builder.mul(group, LONG(lines)))
                    self._add_line(sums, line, x_size, ahead)
            for row in range(self.rows):
                scale = load(builder, at(builder, self.x_scales, self._word_row(), row, word), ir.FloatType())
                self._add_group(totals, sums, row, vectors.splat(builder, scale), group)
        for row, panel in self.cells:
            target = builder.add(self.out, LONG((row * _PANELS + panel) * LINE))
            vectors.store(builder, builder.load(totals[row, panel]), target)

    def _word_row(self) -> Any:
        return self.builder.mul(self.groups, LONG(4))

    def _ahead(self, group: Any) -> Any:
        """How far ahead weights are asked for: the tiles that share these take turns at asking for the next."""
        builder = self.builder
        mine = builder.icmp_signed("==", builder.srem(group, self.turns), self.turn)
        return builder.select(mine, builder.mul(self.panel, LONG(_PANELS)), LONG(0))

    def _add_line(self, sums: Any, line: Any, x_size: Any, ahead: Any) -> None:
        builder = self.builder
        offset = builder.mul(line, LONG(LINE))
        halves: list[list[Any]] = []
        for panel in range(_PANELS):
            address = at(builder, self.weights, self.panel, panel, offset)
            vectors.prefetch(builder, builder.add(address, ahead))
            halves.append(self._unpack(load(builder, address, WORDS)))
        place = builder.mul(line, LONG(self.line_inputs))
        for half in range(self.line_inputs // 4):
            for row in range(self.rows):
                four = load(builder, at(builder, self.x, x_size, row, builder.add(place, LONG(4 * half))), WORD)
                values = vectors.splat(builder, four)
                for panel in range(_PANELS):
                    cell = sums[row, panel]
                    builder.store(_add_bytes(builder, builder.load(cell), halves[panel][half], values), cell)

    def _unpack(self, words: Any) -> list[Any]:
        if self.bits == 8:
            return [words]
        mask = vectors.constant(WORDS, 0x0F0F0F0F)
        upper = self.builder.lshr(words, vectors.constant(WORDS, 4))
        return [self.builder.and_(words, mask), self.builder.and_(upper, mask)]

    def _add_group(self, totals: Any, sums: Any, row: int, scale: Any, group: Any) -> None:
        builder = self.builder
        for panel in range(_PANELS):
            number = builder.sitofp(builder.load(sums[row, panel]), FLOATS)
            if self.bits == 4:
                half = ir.VectorType(ir.IntType(16), LANES)
                offset = builder.mul(group, LONG(2 * PANEL))
                stored = load(builder, at(builder, self.scales, self.scale_panel, panel, offset), half)
                bits = builder.shl(builder.zext(stored, WORDS), vectors.constant(WORDS, 16))
                number = builder.fmul(number, builder.bitcast(bits, FLOATS))
            total = totals[row, panel]
            builder.store(vectors.multiply_add(builder, number, scale, builder.load(total)), total)


def _add_bytes(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """To each of sixteen sums, the products of four bytes without and four with sign."""
    if _BYTE_DOTS:
        return vectors.call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, [total, unsigned, signed])
    for place in range(4):
        left = builder.and_(builder.lshr(unsigned, vectors.constant(WORDS, 8 * place)), vectors.constant(WORDS, 255))
        lifted = builder.shl(signed, vectors.constant(WORDS, 24 - 8 * place))
        right = builder.ashr(lifted, vectors.constant(WORDS, 24))
        total = builder.add(total, builder.mul(left, right))
    return total


def _make_tile(rows: int) -> Any:
    def typed(_: Any, x: Any, x_scales: Any, starts: Any, weights: Any, panel: Any, scales: Any, scale_panel: Any,
              groups: Any, turn: Any, turns: Any, out: Any, bits: Any) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _TileWriter(builder, rows, 8 if bits == numba.types.uint8 else 4, arguments[:11]).write()
            return context.get_dummy_value()

        return numba.types.void(*[numba.types.int64] * 11, bits), generate

    return intrinsic(typed)


_tile1, _tile2, _tile3, _tile4, _tile5, _tile6 = map(_make_tile, range(1, 7))
