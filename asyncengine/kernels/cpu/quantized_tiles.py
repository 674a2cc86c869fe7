"""The tile of a product with quantized weights, in LLVM's terms. What it multiplies: `gemm_quantized`, `panel_form`."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.intrinsics import INT64, emitted
from asyncengine.kernels.cpu.panel_form import GROUP, PANEL, UNIT, PanelForm
from asyncengine.kernels.cpu.quantized_writer import HIGH, LOW, SHORT_MOST, Cells, TileWriter
from asyncengine.kernels.cpu.vectors import BYTE, EIGHT_WORDS, FLOAT, LANES, LINE, LONG, WORD, WORDS, at, cpu_has, load

PANELS = 2
"""Panels of a tile."""
MOST = 4 if cpu_has("avx512f") or cpu_has("avx2") else 1
"""Rows of x in the largest tile. Six have room for their sums in the registers, but not for what else a group needs:
what they write to memory and read again costs more than numbers that are taken apart once more."""
SPREAD = 3 if MOST > 1 else 0
"""Turns of rows from which on numbers of 6 bits are spread to bytes beforehand, once for all of them; 0: never."""
_NEAR = 512
"""Bytes that a panel of a `StreamWriter` is prefetched before it is read."""
_LINES = 4
"""Lines of numbers that are written out one after the other; more are a loop."""
_BYTE_DOTS = cpu_has("avx512vnni")
_SHORTS = cpu_has("avx2")
"""Without those: the CPU has products of bytes whose sums of two are of 16 bits."""


class WideWriter(TileWriter):
    """Writes the tile of one number of rows and two panels, of vectors of sixteen: numbers stay as they are stored."""

    @classmethod
    def panels_of(cls, rows: int) -> int:
        return PANELS

    def dots(self, numbers: Any, first: Any, sum_index: Any) -> Cells:
        builder, form = self.builder, self.form
        dots = {cell: cgutils.alloca_once(builder, WORDS) for cell in self.cells}
        for row, panel in self.cells:
            start = vectors.constant(WORDS, 0)
            if form.offset:
                start = self.of_row(self.sums, self.sums_size, row, sum_index, WORD)
            builder.store(start, dots[row, panel])
        units = form.summed // UNIT
        lines = 2 if self.spread else form.unit_bytes // LINE
        at_once = min(units, max(1, _LINES // lines))
        with cgutils.for_range(builder, LONG(units // at_once)) as loop:
            for step in range(at_once):
                unit = builder.add(builder.mul(loop.index, LONG(at_once)), LONG(step))
                begin = builder.add(numbers, builder.mul(unit, LONG(form.unit_bytes)))
                inputs = builder.add(first, builder.mul(unit, LONG(UNIT)))
                self.ask(begin, form.unit_bytes // LINE)
                quads = [self._unit(panel, begin, inputs) for panel in range(self.panels)]
                for row in range(self.rows):
                    offsets = [builder.add(inputs, LONG(4 * quad)) for quad in range(UNIT // 4)]
                    words = [load(builder, at(builder, self.x, self.x_size, row, offset), WORD) for offset in offsets]
                    values = [vectors.splat(builder, word) for word in words]
                    for panel in range(self.panels):
                        cell = dots[row, panel]
                        builder.store(_add_unit(builder, form, builder.load(cell), quads[panel], values), cell)
        return {cell: builder.load(value) for cell, value in dots.items()}

    def _unit(self, panel: int, begin: Any, inputs: Any) -> list[Any]:
        """The numbers of sixteen inputs, four in each vector: of byte `begin` of a panel, or where they are spread."""
        builder, form = self.builder, self.form
        if not self.spread:
            offsets = [builder.add(begin, LONG(line * LINE)) for line in range(form.unit_bytes // LINE)]
            addresses = [at(builder, self.weights, self.panel, panel, offset) for offset in offsets]
            return _quads(builder, form, [load(builder, address, WORDS) for address in addresses])
        size, first = builder.mul(self.chunks, LONG(form.chunk * PANEL)), builder.mul(inputs, LONG(PANEL))
        offsets = [builder.add(first, LONG(quad * LINE)) for quad in range(UNIT // 4)]
        return [load(builder, at(builder, self.bytes, size, panel, offset), WORDS) for offset in offsets]


class StreamWriter(WideWriter):
    """Writes the tile of one panel, for the few rows whose products wait for memory (`streamed_rows`).

    What a thread reads is then one stream from its first panel to its last, and the CPU itself asks for what follows;
    it is helped to begin, not overtaken: asked for a few KB ahead, it leaves off. Two panels side by side are two
    streams, each of which breaks off where its panel ends: of 4 bits a core gets half as much that way.
    """

    @classmethod
    def panels_of(cls, rows: int) -> int:
        return 1

    def distance(self, index: Any) -> Any:
        return LONG(_NEAR)


class FloatWriter(WideWriter):
    """Writes the tile of one number of rows and two panels, for x in float32: numbers are widened as they are read."""

    def __init__(self, builder: Any, form: PanelForm, *others: Any) -> None:
        super().__init__(builder, form, *others)
        self.x_size = builder.mul(self.x_size, LONG(4))

    def x_scale(self, row: int, index: Any) -> Any:
        return vectors.constant(self.floats, 1.0)

    def as_float(self, dot: Any) -> Any:
        return dot

    def dots(self, numbers: Any, first: Any, sum_index: Any) -> Cells:
        builder, form = self.builder, self.form
        dots = self._zeros()
        with cgutils.for_range(builder, LONG(form.summed // UNIT)) as loop:
            begin = builder.add(numbers, builder.mul(loop.index, LONG(form.unit_bytes)))
            inputs = builder.add(first, builder.mul(loop.index, LONG(UNIT)))
            self.ask(begin, form.unit_bytes // LINE)
            units = [self._unit(panel, begin, inputs) for panel in range(self.panels)]
            for index in range(UNIT):
                weights = [self._widened(quads[index // 4], index % 4) for quads in units]
                offset = builder.mul(builder.add(inputs, LONG(index)), LONG(4))
                for row in range(self.rows):
                    value = load(builder, at(builder, self.x, self.x_size, row, offset), FLOAT)
                    for panel in range(self.panels):
                        self._multiply_add(weights[panel], vectors.splat(builder, value), dots[row, panel])
        return {cell: builder.load(value) for cell, value in dots.items()}

    def _widened(self, words: Any, byte: int) -> Any:
        """That byte of each word as the number that is meant; of "zeros" and "minima", as it is stored."""
        builder = self.builder
        number = builder.and_(builder.lshr(words, vectors.constant(WORDS, 8 * byte)), vectors.constant(WORDS, 255))
        return builder.sitofp(builder.sub(number, vectors.constant(WORDS, self.form.offset)), self.floats)


def streamed_rows(form: PanelForm) -> int:
    """Rows of x up to which tiles of one panel are faster. Loads for each row and group (scales, sums of x) are
    then repeated for each panel: there is too much of that where groups are of 16, and for 8 bits also where of 32."""
    if not cpu_has("avx512f"):
        return 0
    return 3 if form.summed == GROUP or (form.summed >= 32 and form.bits < 8) else 0


def _quads(builder: Any, form: PanelForm, lines: list[Any]) -> list[Any]:
    """The numbers of sixteen inputs, four in each vector, out of the lines that have them."""
    if form.bits == 8:
        return lines
    low = vectors.constant(WORDS, LOW)
    quads = []
    for words in lines[:2]:
        upper = builder.lshr(words, vectors.constant(WORDS, 4))
        quads += [builder.and_(words, low), builder.and_(upper, low)]
    if form.below == "table":
        return [vectors.look_up(builder, quad, [entry + form.offset for entry in form.table]) for quad in quads]
    if form.bits == 4:
        return quads
    shifts = ((builder.shl, 4), (builder.shl, 2), (builder.lshr, 0), (builder.lshr, 2))
    tops = [shift(lines[2], vectors.constant(WORDS, count)) for shift, count in shifts]
    high = vectors.constant(WORDS, HIGH)
    return [builder.or_(quad, builder.and_(top, high)) for quad, top in zip(quads, tops, strict=True)]


def _add_unit(builder: Any, form: PanelForm, total: Any, unsigned: list[Any], signed: list[Any]) -> Any:
    """To each of sixteen sums, the products of the bytes of a unit: in each vector four without sign and four with."""
    if _BYTE_DOTS:
        for numbers, values in zip(unsigned, signed, strict=True):
            total = vectors.call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, [total, numbers, values])
        return total
    if vectors.NEON:
        return _add_shorts(builder, form, total, unsigned, signed)
    fitting = SHORT_MOST // (2 * 128 * form.largest) if _SHORTS else 0
    if not fitting:
        for numbers, values in zip(unsigned, signed, strict=True):
            total = _add_bytes(builder, total, numbers, values)
        return total
    for first in range(0, len(unsigned), fitting):
        pairs = list(zip(unsigned, signed, strict=True))[first : first + fitting]
        total = builder.add(total, _halves(builder, pairs))
    return total


def _halves(builder: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """Sums of the products of a few vectors, whose 16-bit sums of two can be added up; eight lanes at a time."""
    short_vector, numbers, halves = ir.VectorType(ir.IntType(16), 16), ir.VectorType(BYTE, 32), []
    for half in range(2):
        lanes = ir.Constant(EIGHT_WORDS, list(range(8 * half, 8 * half + 8)))
        total = ir.Constant(short_vector, [0] * 16)
        for pair in pairs:
            sides = [builder.bitcast(builder.shuffle_vector(side, side, lanes), numbers) for side in pair]
            total = builder.add(total, vectors.call(builder, "llvm.x86.avx2.pmadd.ub.sw", short_vector, sides))
        ones = ir.Constant(short_vector, [1] * 16)
        halves.append(vectors.call(builder, "llvm.x86.avx2.pmadd.wd", EIGHT_WORDS, [total, ones]))
    return builder.shuffle_vector(*halves, ir.Constant(WORDS, list(range(LANES))))


def _add_shorts(builder: Any, form: PanelForm, total: Any, unsigned: list[Any], signed: list[Any]) -> Any:
    """The same by NEON, which adds pairs of 16 bits to sums of 32: products of bytes at even places and of those at odd
    ones fit in 16 bits, and of small numbers sums of several do. Every such CPU has this, unlike products of bytes."""
    short_vector, products = ir.VectorType(ir.IntType(16), 2 * LANES), []
    eight, low = (vectors.constant(short_vector, value) for value in (8, 255))
    for pair in zip(unsigned, signed, strict=True):
        numbers, values = (builder.bitcast(side, short_vector) for side in pair)
        products.append(builder.mul(builder.and_(numbers, low), builder.ashr(builder.shl(values, eight), eight)))
        products.append(builder.mul(builder.lshr(numbers, eight), builder.ashr(values, eight)))
    fitting = max(1, SHORT_MOST // (128 * form.largest))
    for first in range(0, len(products), fitting):
        shorts = functools.reduce(builder.add, products[first : first + fitting])
        total = builder.add(total, vectors.by_slices(builder, shorts, 8, _add_neighbours))
    return total


def _add_neighbours(builder: Any, shorts: Any) -> Any:
    return vectors.call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", ir.VectorType(WORD, 4), [shorts])


def _add_bytes(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """To each of sixteen sums, the products of four bytes without and four with sign, by plain arithmetic."""
    for byte in range(4):
        left = builder.and_(builder.lshr(unsigned, vectors.constant(WORDS, 8 * byte)), vectors.constant(WORDS, 255))
        lifted = builder.shl(signed, vectors.constant(WORDS, 24 - 8 * byte))
        right = builder.ashr(lifted, vectors.constant(WORDS, 24))
        total = builder.add(total, builder.mul(left, right))
    return total


def make_spreader(form: PanelForm, panels: int) -> Any:
    """spread(panels, panel, chunks, bytes), of int64, inside kernels: the numbers of a tile's panels, one in a byte.
    `bytes` has room for uint8 [panels, inputs / 4, outputs of a panel, 4]."""

    @emitted(*[INT64] * 4)
    def spread(builder: Any, weights: Any, size: Any, chunks: Any, target: Any) -> None:
        units, unit = form.chunk // UNIT, UNIT * PANEL
        for number in range(panels):
            with cgutils.for_range(builder, chunks) as outer, cgutils.for_range(builder, LONG(units)) as inner:
                begin = builder.add(builder.mul(outer.index, LONG(form.chunk_bytes)), LONG(form.head))
                begin = builder.add(begin, builder.mul(inner.index, LONG(form.unit_bytes)))
                lines = range(form.unit_bytes // LINE)
                offsets = [at(builder, weights, size, number, builder.add(begin, LONG(line * LINE))) for line in lines]
                quads = _quads(builder, form, [load(builder, offset, WORDS) for offset in offsets])
                done = builder.mul(builder.add(builder.mul(outer.index, LONG(units)), inner.index), LONG(unit))
                whole = builder.mul(chunks, LONG(form.chunk * PANEL))
                for quad, words in enumerate(quads):
                    offset = builder.add(done, LONG(quad * LINE))
                    vectors.store(builder, words, at(builder, target, whole, number, offset))

    return spread
