"""The tile of a product with weights in 8 or 4 bits, in LLVM's terms. What it multiplies: `gemm_quantized`."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.vectors import FLOATS, LANES, LINE, LONG, WORD, WORDS, at, cpu_has, load

GROUP = 64
"""Inputs of a row that share a scale."""
PANEL = LANES
PANELS = 2
"""Panels of a tile."""
MOST = 6 if cpu_has("avx512f") else 1
"""Rows of x in the largest tile whose sums fit in the registers."""
_UNROLL = 4
_BYTE_DOTS = cpu_has("avx512vnni")


class _TileWriter:
    """Writes the tile of one number of rows. out float32 [rows, 32]; `panel` is the bytes from one to the other."""

    def __init__(self, builder: Any, rows: int, bits: int, arguments: Any) -> None:
        self.builder, self.rows, self.bits = builder, rows, bits
        (self.x, self.x_scales, self.starts, self.weights, self.panel, self.scales, self.scale_panel, self.groups,
         self.turn, self.turns, self.out) = arguments  # fmt: skip
        self.line_inputs = 4 if bits == 8 else 8
        """Inputs in a line of a panel's weights."""
        self.cells = [(row, panel) for row in range(rows) for panel in range(PANELS)]

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
                for panel in range(PANELS):
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
            target = builder.add(self.out, LONG((row * PANELS + panel) * LINE))
            vectors.store(builder, builder.load(totals[row, panel]), target)

    def _word_row(self) -> Any:
        return self.builder.mul(self.groups, LONG(4))

    def _ahead(self, group: Any) -> Any:
        """How far ahead weights are asked for: the tiles that share these take turns at asking for the next."""
        builder = self.builder
        mine = builder.icmp_signed("==", builder.srem(group, self.turns), self.turn)
        return builder.select(mine, builder.mul(self.panel, LONG(PANELS)), LONG(0))

    def _add_line(self, sums: Any, line: Any, x_size: Any, ahead: Any) -> None:
        builder = self.builder
        offset = builder.mul(line, LONG(LINE))
        halves: list[list[Any]] = []
        for panel in range(PANELS):
            address = at(builder, self.weights, self.panel, panel, offset)
            vectors.prefetch(builder, builder.add(address, ahead))
            halves.append(self._unpack(load(builder, address, WORDS)))
        place = builder.mul(line, LONG(self.line_inputs))
        for half in range(self.line_inputs // 4):
            for row in range(self.rows):
                four = load(builder, at(builder, self.x, x_size, row, builder.add(place, LONG(4 * half))), WORD)
                values = vectors.splat(builder, four)
                for panel in range(PANELS):
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
        for panel in range(PANELS):
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


tile1, tile2, tile3, tile4, tile5, tile6 = map(_make_tile, range(1, 7))
