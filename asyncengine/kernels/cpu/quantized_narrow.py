"""The tile of a product with quantized weights for CPUs with vectors of eight (AVX2), in LLVM's terms.

Sixteen registers hold the sums of eight cells, each one row of x by eight outputs, beside what is multiplied: four rows
by one panel, two rows by two. `quantized_tiles`, made for 32 registers of sixteen numbers, has four times as many sums,
which go to memory and back with every 16 inputs.

Products are those of bytes, one without sign, whose sums of two are of 16 bits. Where numbers are small those are added
in 16 bits as long as they fit: 32 inputs of 4 bits, 8 of 6 bits. Else numbers have their sign, which goes over to x:
128 * 127 twice is just below 2^15. Integers, and the order of all that is done in float32, are those of
`quantized_tiles`: so are results, to the bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.panel_form import PANEL, UNIT, PanelForm
from asyncengine.kernels.cpu.quantized_writer import HIGH, LOW, SHORT_MOST, Cells, TileWriter
from asyncengine.kernels.cpu.vectors import BYTE, EIGHT_WORDS, LINE, LONG, WORD, at, cpu_has, load

NARROW = cpu_has("avx2") and not cpu_has("avx512vnni")
"""Kernels are compiled for a CPU that has a use for these tiles."""
_HALVES = 2
"""Vectors of a line: each has four inputs of eight outputs."""
_QUADS = UNIT // 4
_RUN = 8
"""Most vectors of products that are added in 16 bits."""
_BYTES, _SHORTS = ir.VectorType(BYTE, 32), ir.VectorType(ir.IntType(16), 16)
_SIGNS = 0x80808080


def run_of(form: PanelForm) -> int:
    """Vectors of products whose 16-bit sums can be added up: 1, 2, 4 or 8; 0 where numbers must have their sign."""
    fitting = min(_RUN, SHORT_MOST // (2 * 128 * form.largest))
    return 1 << fitting.bit_length() - 1 if fitting else 0


def narrow_fits(form: PanelForm) -> bool:
    """Whether these are the tiles for such numbers. Those whose sums can be added up in 16 bits are left to
    wider vectors, if the CPU has them. Numbers with "minima", whose sums of x are no integers, have no sign."""
    return not cpu_has("avx512f") if run_of(form) else form.below != "minima"


class NarrowWriter(TileWriter):
    """Writes the tile of one number of rows, of vectors of eight."""

    lanes = PANEL // _HALVES

    def __init__(self, builder: Any, form: PanelForm, *others: Any) -> None:
        super().__init__(builder, form, *others)
        self._run = run_of(form)

    @classmethod
    def panels_of(cls, rows: int) -> int:
        return 2 if rows <= 2 else 1

    def zero(self, plane: Any) -> Any:
        """The 128 that `_signed` leaves out are part of it."""
        return super().zero(plane) if self._run else self.builder.fsub(vectors.constant(self.floats, 128.0), plane)

    def dots(self, numbers: Any, first: Any, sum_index: Any) -> Cells:
        builder, form = self.builder, self.form
        units = form.summed // UNIT
        stretch = min(units, max(1, self._run // _QUADS))
        dots = {cell: cgutils.alloca_once_value(builder, vectors.constant(EIGHT_WORDS, 0)) for cell in self.cells}
        with cgutils.for_range(builder, LONG(units // stretch)) as loop:
            unit = builder.mul(loop.index, LONG(stretch))
            begin = builder.add(numbers, builder.mul(unit, LONG(form.unit_bytes)))
            inputs = builder.add(first, builder.mul(unit, LONG(UNIT)))
            if self.panels == 1:  # large tiles share a panel: each prefetches in its turn
                with builder.if_then(builder.icmp_signed("!=", self.ahead, LONG(0))):
                    self.ask(begin, stretch * form.unit_bytes // LINE)
            (self._add_lifted if self._run else self._add_signed)(begin, inputs, stretch, dots)
        totals = {cell: builder.load(value) for cell, value in dots.items()}
        if self._run and form.offset:  # at the end: before, there would be no registers for it
            for row in range(self.rows):
                taken = self.of_row(self.sums, self.sums_size, row, sum_index, WORD)
                for eight in self.vectors:
                    totals[row, eight] = builder.add(totals[row, eight], taken)
        return totals

    def _ask_alone(self, begin: Any, quad: int) -> None:
        """Small tiles share their weights with no other, and wait for memory: they prefetch a unit with each unit."""
        if self.panels > 1 and quad % _QUADS == 0:
            size = self.form.unit_bytes
            self.ask(self.builder.add(begin, LONG(quad // _QUADS * size)), size // LINE)

    def _add_lifted(self, begin: Any, inputs: Any, units: int, dots: Cells) -> None:
        """Products of the numbers of a few units, as they are stored."""
        sums: Cells = {}
        for quad in range(units * _QUADS):
            self._ask_alone(begin, quad)
            weights = [self._lifted(eight, begin, inputs, quad) for eight in self.vectors]
            for row in range(self.rows):
                x = self._x(row, inputs, quad)
                for eight in self.vectors:
                    cell, product = (row, eight), self._multiplied(weights[eight], x)
                    if cell in sums:  # they fit; LLVM would add products to each other first, were it a plain sum
                        product = vectors.call(self.builder, "llvm.sadd.sat.v16i16", _SHORTS, [sums[cell], product])
                    sums[cell] = product
            if (quad + 1) % self._run == 0 or quad + 1 == units * _QUADS:
                for cell, product in sums.items():
                    self._add_shorts(product, dots[cell])
                sums = {}

    def _add_signed(self, begin: Any, inputs: Any, units: int, dots: Cells) -> None:
        """Products of numbers with their sign: of their size and x with their sign."""
        builder = self.builder
        for quad in range(units * _QUADS):
            self._ask_alone(begin, quad)
            weights = [self._signed(eight, begin, quad) for eight in self.vectors]
            sizes = [vectors.call(builder, "llvm.abs.v32i8", _BYTES, [one, ir.IntType(1)(0)]) for one in weights]
            for row in range(self.rows):
                x = self._x(row, inputs, quad)
                for eight in self.vectors:
                    signed_x = vectors.call(builder, "llvm.x86.avx2.psign.b", _BYTES, [x, weights[eight]])
                    self._add_shorts(self._multiplied(sizes[eight], signed_x), dots[row, eight])

    def _multiplied(self, unsigned: Any, signed: Any) -> Any:
        """Sums of two products of bytes, of 16 bits."""
        return vectors.call(self.builder, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, [unsigned, signed])

    def _add_shorts(self, shorts: Any, into: Any) -> None:
        """Add two numbers of 16 bits to each of eight sums. Empty assembly hides the sum from LLVM, which would else
        add such sums to each other first, and has too few registers for that."""
        builder = self.builder
        pairs = [shorts, ir.Constant(_SHORTS, [1] * 16)]
        pairs_sum = vectors.call(builder, "llvm.x86.avx2.pmadd.wd", EIGHT_WORDS, pairs)
        total = builder.add(builder.load(into), pairs_sum)
        same = ir.FunctionType(EIGHT_WORDS, [EIGHT_WORDS])
        builder.store(builder.asm(same, "", "=x,0", [total], False), into)

    def _x(self, row: int, inputs: Any, quad: int) -> Any:
        builder = self.builder
        word = load(builder, at(builder, self.x, self.x_size, row, builder.add(inputs, LONG(4 * quad))), WORD)
        return builder.bitcast(vectors.splat(builder, word, 8), _BYTES)

    def _line(self, eight: int, begin: Any, line: int) -> Any:
        """Half of a line of numbers, as words."""
        builder = self.builder
        panel, half = divmod(eight, _HALVES)
        offset = builder.add(begin, LONG(line * LINE + half * LINE // 2))
        return load(builder, at(builder, self.weights, self.panel, panel, offset), EIGHT_WORDS)

    def _lifted(self, eight: int, begin: Any, inputs: Any, quad: int) -> Any:
        """Four inputs of eight outputs as they are stored, a number in a byte."""
        builder, form = self.builder, self.form
        if self.spread:
            panel, half = divmod(eight, _HALVES)
            offset = builder.add(builder.mul(inputs, LONG(PANEL)), LONG(quad * LINE + half * LINE // 2))
            size = builder.mul(self.chunks, LONG(form.chunk * PANEL))
            return load(builder, at(builder, self.bytes, size, panel, offset), _BYTES)
        unit, inside = divmod(quad, _QUADS)
        lines = unit * form.unit_bytes // LINE
        words = self._line(eight, begin, lines + inside // 2)
        if inside % 2:
            words = builder.lshr(words, vectors.constant(EIGHT_WORDS, 4))
        words = builder.and_(words, vectors.constant(EIGHT_WORDS, LOW))
        if form.bits == 6:
            shift, count = ((builder.shl, 4), (builder.shl, 2), (builder.lshr, 0), (builder.lshr, 2))[inside]
            top = shift(self._line(eight, begin, lines + 2), vectors.constant(EIGHT_WORDS, count))
            words = builder.or_(words, builder.and_(top, vectors.constant(EIGHT_WORDS, HIGH)))
        if form.below == "table":
            return self._entries(words, [entry + form.offset for entry in form.table])
        return builder.bitcast(words, _BYTES)

    def _signed(self, eight: int, begin: Any, quad: int) -> Any:
        """Four inputs of eight outputs with their sign; of "zeros", 128 less than they are stored."""
        builder, form = self.builder, self.form
        if form.bits == 8:
            words = self._line(eight, begin, quad)
            return builder.bitcast(builder.xor(words, vectors.constant(EIGHT_WORDS, _SIGNS)), _BYTES)
        unit, inside = divmod(quad, _QUADS)
        words = self._line(eight, begin, unit * form.unit_bytes // LINE + inside // 2)
        if inside % 2:
            words = builder.lshr(words, vectors.constant(EIGHT_WORDS, 4))
        return self._entries(builder.and_(words, vectors.constant(EIGHT_WORDS, LOW)), list(form.table))

    def look_up(self, words: Any, table: list[int]) -> Any:
        return self.builder.bitcast(self._entries(words, table), EIGHT_WORDS)

    def _entries(self, words: Any, table: list[int]) -> Any:
        entries = ir.Constant(_BYTES, [entry % 256 for entry in table] * 2)
        indices = self.builder.bitcast(words, _BYTES)
        return vectors.call(self.builder, "llvm.x86.avx2.pshuf.b", _BYTES, [entries, indices])
