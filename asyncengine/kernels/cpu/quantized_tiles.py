"""The tile of a product with quantized weights, in LLVM's terms. What it multiplies: `gemm_quantized`, `panel_form`."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.panel_form import GROUP, PANEL, UNIT, PanelForm
from asyncengine.kernels.cpu.vectors import (
    BYTE,
    EIGHT_WORDS,
    FLOAT,
    FLOATS,
    LANES,
    LINE,
    LONG,
    WORD,
    WORDS,
    at,
    cpu_has,
    load,
)

PANELS = 2
"""Panels of a tile."""
MOST = 4 if cpu_has("avx512f") or cpu_has("avx2") else 1
"""Rows of x in the largest tile. Six have room for their sums in the registers, but not for what else a group needs:
what they write to memory and read again costs more than numbers that are taken apart once more."""
SPREAD = 3 if MOST > 1 else 0
"""Turns of rows from which on numbers of 6 bits are spread to bytes beforehand, once for all of them; 0: never."""
_AHEAD = 2048
"""Bytes that a panel is asked for before it is read, where no other tile reads it."""
_LINES = 4
"""Of numbers, that are written out one after the other; more are a loop."""
_BYTE_DOTS = cpu_has("avx512vnni")
_SHORTS = cpu_has("avx2")
"""Without those: the CPU has products of bytes whose sums of two are of 16 bits."""
_SHORT_MOST = 2**15 - 1
_BYTES = ir.VectorType(BYTE, LANES)
_LOW, _HIGH = 0x0F0F0F0F, 0x30303030


class _TileWriter:
    """Writes the tile of one number of rows. out float32 [rows, 32]; `panel` is the bytes from one to the other.

    For 64 inputs: t = sum over groups of scale * (integer sum - zero * sum of x); total += t * scale of x. Where scales
    are steps of a block's, totals of the block are made so, and times its scale added to the total. Before a chunk's
    numbers its minima times sums of x (as numbers) are taken off.
    """

    def __init__(self, builder: Any, form: PanelForm, rows: int, spread: bool, arguments: Any) -> None:
        self.builder, self.form, self.rows, self.spread = builder, form, rows, spread
        (self.x, self.x_scales, self.sums, self.weights, self.panel, self.chunks, self.turn, self.turns,
         self.out, self.bytes) = arguments  # fmt: skip
        self.cells = [(row, panel) for row in range(rows) for panel in range(PANELS)]
        self.parts = form.chunk // GROUP
        """Of a chunk, with one scale of x each."""
        self.dots = {cell: cgutils.alloca_once(builder, WORDS) for cell in self.cells}
        self.scaled = {cell: cgutils.alloca_once(builder, FLOATS) for cell in self.cells}
        self.totals = self._zeros()
        self.of_block = self._zeros() if form.block else self.totals

    def _zeros(self) -> dict[tuple[int, int], Any]:
        zero = vectors.constant(FLOATS, 0.0)
        return {cell: cgutils.alloca_once_value(self.builder, zero) for cell in self.cells}

    def write(self) -> None:
        builder, form = self.builder, self.form
        x_size = builder.mul(self.chunks, LONG(form.chunk))
        sizes = [builder.mul(self.chunks, LONG(4 * count)) for count in (self.parts, form.chunk // form.summed)]
        with cgutils.for_range(builder, self.chunks) as outer:
            chunk = builder.mul(outer.index, LONG(form.chunk_bytes))
            if form.below == "minima":
                self._take_minima(chunk, outer.index, sizes[1])
            elif form.block:
                self._clear(self.of_block)
            with cgutils.for_range(builder, LONG(self.parts)) as inner:
                place = builder.add(builder.mul(outer.index, LONG(self.parts)), inner.index)
                ahead = self._ahead(place)
                self._ask_for_head(chunk, inner.index, ahead)
                self._add_part(chunk, inner.index, place, x_size, sizes, ahead)
            if form.block:
                self._add_block("scales", chunk)
        for row, panel in self.cells:
            target = builder.add(self.out, LONG((row * PANELS + panel) * LINE))
            vectors.store(builder, builder.load(self.totals[row, panel]), target)

    def _clear(self, cells: dict[tuple[int, int], Any]) -> None:
        for cell in cells.values():
            self.builder.store(vectors.constant(FLOATS, 0.0), cell)

    def _take_minima(self, chunk: Any, index: Any, size: Any) -> None:
        """Take off a chunk's minima times sums of x, before its other sums need the registers."""
        builder, form = self.builder, self.form
        count, name = form.chunk // form.summed, "minimum_steps" if form.block else "minima"
        if form.block:
            self._clear(self.of_block)
        with cgutils.for_range(builder, LONG(count)) as loop:
            group = builder.udiv(loop.index, LONG(form.group // form.summed))
            taken = [builder.fneg(self._plane(name, panel, chunk, group)) for panel in range(PANELS)]
            where = builder.mul(builder.add(builder.mul(index, LONG(count)), loop.index), LONG(4))
            for row in range(self.rows):
                x_sum = vectors.splat(builder, load(builder, at(builder, self.sums, size, row, where), FLOAT))
                for panel in range(PANELS):
                    own = self.of_block[row, panel]
                    builder.store(vectors.multiply_add(builder, taken[panel], x_sum, builder.load(own)), own)
        if form.block:
            self._add_block("minima", chunk)
            self._clear(self.of_block)

    def _ahead(self, place: Any) -> Any:
        """How far ahead weights are asked for. Tiles that share these take turns at asking for the next panels; one
        that has them for itself asks for what it reads soon, and at a panel's end for the beginning of the next but
        one: each is a stream."""
        builder = self.builder
        mine = builder.icmp_signed("==", builder.srem(place, self.turns), self.turn)
        shared = builder.select(mine, builder.mul(self.panel, LONG(PANELS)), LONG(0))
        begin = builder.mul(place, LONG(self.form.chunk_bytes // self.parts))
        within = builder.icmp_signed("<", builder.add(begin, LONG(_AHEAD)), self.panel)
        beyond = builder.add(builder.mul(self.panel, LONG(PANELS - 1)), LONG(_AHEAD))
        own = builder.select(within, LONG(_AHEAD), beyond)
        return builder.select(builder.icmp_signed("==", self.turns, LONG(1)), own, shared)

    def _ask_for_head(self, chunk: Any, part: Any, ahead: Any) -> None:
        """Each part of a chunk asks for its share."""
        builder = self.builder
        share = -(-self.form.head // LINE // self.parts)
        begin = builder.add(builder.mul(part, LONG(share * LINE)), builder.add(chunk, ahead))
        for panel in range(PANELS):
            for line in range(share):
                address = at(builder, self.weights, self.panel, panel, builder.add(begin, LONG(line * LINE)))
                vectors.prefetch(builder, address)

    def _add_part(self, chunk: Any, part: Any, place: Any, x_size: Any, sizes: list[Any], ahead: Any) -> None:
        """64 inputs: `part` is their number in the chunk, `place` in the row."""
        builder, form = self.builder, self.form
        groups, bytes_of_part = GROUP // form.summed, GROUP // UNIT * form.unit_bytes
        numbers = builder.add(chunk, builder.add(LONG(form.head), builder.mul(part, LONG(bytes_of_part))))
        if groups > 1:
            for cell in self.cells:
                builder.store(vectors.constant(FLOATS, 0.0), self.scaled[cell])
        with cgutils.for_range(builder, LONG(groups)) as loop:
            group = loop.index
            where = builder.mul(builder.add(builder.mul(place, LONG(groups)), group), LONG(4))
            x_sums = [at(builder, self.sums, sizes[1], row, where) for row in range(self.rows)]
            for row, panel in self.cells:
                start = vectors.constant(WORDS, 0)
                if form.offset:
                    start = vectors.splat(builder, load(builder, x_sums[row], WORD))
                builder.store(start, self.dots[row, panel])
            first = builder.add(builder.mul(place, LONG(GROUP)), builder.mul(group, LONG(form.summed)))
            own = builder.add(numbers, builder.mul(group, LONG(bytes_of_part // groups)))
            self._add_lines(own, first, x_size, ahead)
            self._add_group(chunk, self._group_of(part, group), x_sums, groups > 1)
        for row in range(self.rows):
            where = builder.mul(place, LONG(4))
            scale = vectors.splat(builder, load(builder, at(builder, self.x_scales, sizes[0], row, where), FLOAT))
            for panel in range(PANELS):
                total, found = self.of_block[row, panel], builder.load(self.scaled[row, panel])
                builder.store(vectors.multiply_add(builder, found, scale, builder.load(total)), total)

    def _group_of(self, part: Any, group: Any) -> Any:
        """The number in its chunk of the group with those inputs."""
        builder, size = self.builder, self.form.group
        if size > GROUP:
            return builder.udiv(part, LONG(size // GROUP))
        return builder.add(builder.mul(part, LONG(GROUP // (size or GROUP))), group)

    def _add_lines(self, numbers: Any, first: Any, x_size: Any, ahead: Any) -> None:
        """Products of the integers of a group, from byte `numbers` of a panel and input `first` on."""
        builder, form = self.builder, self.form
        units = form.summed // UNIT
        lines = 2 if self.spread else form.unit_bytes // LINE
        at_once = min(units, max(1, _LINES // lines))
        with cgutils.for_range(builder, LONG(units // at_once)) as loop:
            for step in range(at_once):
                unit = builder.add(builder.mul(loop.index, LONG(at_once)), LONG(step))
                begin = builder.add(numbers, builder.mul(unit, LONG(form.unit_bytes)))
                inputs = builder.add(first, builder.mul(unit, LONG(UNIT)))
                quads = [self._unit(panel, begin, inputs, ahead) for panel in range(PANELS)]
                for row in range(self.rows):
                    places = [builder.add(inputs, LONG(4 * quad)) for quad in range(UNIT // 4)]
                    words = [load(builder, at(builder, self.x, x_size, row, place), WORD) for place in places]
                    values = [vectors.splat(builder, word) for word in words]
                    for panel in range(PANELS):
                        cell = self.dots[row, panel]
                        builder.store(_add_unit(builder, form, builder.load(cell), quads[panel], values), cell)

    def _unit(self, panel: int, begin: Any, inputs: Any, ahead: Any) -> list[Any]:
        """The numbers of sixteen inputs, four in each vector: of byte `begin` of a panel, or where they are spread."""
        builder, form = self.builder, self.form
        lines = range(form.unit_bytes // LINE)
        own = [at(builder, self.weights, self.panel, panel, builder.add(begin, LONG(line * LINE))) for line in lines]
        for address in own:
            vectors.prefetch(builder, builder.add(address, ahead))
        if not self.spread:
            return _quads(builder, form, [load(builder, address, WORDS) for address in own])
        size, first = builder.mul(self.chunks, LONG(form.chunk * PANEL)), builder.mul(inputs, LONG(PANEL))
        places = [builder.add(first, LONG(quad * LINE)) for quad in range(UNIT // 4)]
        return [load(builder, at(builder, self.bytes, size, panel, place), WORDS) for place in places]

    def _add_group(self, chunk: Any, group: Any, x_sums: list[Any], several: bool) -> None:
        """Add a group's integers times its scale to those of its 64 inputs."""
        builder, form = self.builder, self.form
        scaled = "steps" if form.block else "scales"
        scales = [self._plane(scaled, panel, chunk, group) if form.group else None for panel in range(PANELS)]
        zeros: list[Any] = []
        if form.below == "zeros":
            zeros = [builder.fneg(self._plane("zeros", panel, chunk, group)) for panel in range(PANELS)]
        for row, panel in self.cells:
            number = builder.sitofp(builder.load(self.dots[row, panel]), FLOATS)
            if zeros:  # all whole numbers below 2^24: exact
                x_sum = vectors.splat(builder, load(builder, x_sums[row], FLOAT))
                number = vectors.multiply_add(builder, zeros[panel], x_sum, number)
            into = self.scaled[row, panel]
            if several:
                number = vectors.multiply_add(builder, number, scales[panel], builder.load(into))
            elif scales[panel] is not None:
                number = builder.fmul(number, scales[panel])
            builder.store(number, into)

    def _add_block(self, name: str, chunk: Any) -> None:
        """Add what a block has, times its scale."""
        builder = self.builder
        scales = [self._plane(name, panel, chunk, LONG(0)) for panel in range(PANELS)]
        for row, panel in self.cells:
            total, added = self.totals[row, panel], builder.load(self.of_block[row, panel])
            builder.store(vectors.multiply_add(builder, added, scales[panel], builder.load(total)), total)

    def _plane(self, name: str, panel: int, chunk: Any, index: Any) -> Any:
        """What the group or block of that number has, sixteen outputs as float32."""
        builder = self.builder
        offset, size, _ = self.form.planes[name]
        place = builder.add(builder.mul(index, LONG(size * PANEL)), builder.add(chunk, LONG(offset)))
        address = at(builder, self.weights, self.panel, panel, place)
        if name == "zeros":
            return builder.uitofp(load(builder, address, _BYTES), FLOATS)
        if size == 1:
            return builder.sitofp(builder.sext(load(builder, address, _BYTES), WORDS), FLOATS)
        if size == 4:
            return load(builder, address, FLOATS)
        halves = load(builder, address, ir.VectorType(ir.IntType(16), LANES))
        return vectors.widen_halves(builder, halves, self.form.scale)


def _quads(builder: Any, form: PanelForm, lines: list[Any]) -> list[Any]:
    """The numbers of sixteen inputs, four in each vector, out of the lines that have them."""
    if form.bits == 8:
        return lines
    low = vectors.constant(WORDS, _LOW)
    quads = []
    for words in lines[:2]:
        upper = builder.lshr(words, vectors.constant(WORDS, 4))
        quads += [builder.and_(words, low), builder.and_(upper, low)]
    if form.below == "table":
        return [vectors.look_up(builder, quad, [entry + 128 for entry in form.table]) for quad in quads]
    if form.bits == 4:
        return quads
    shifts = ((builder.shl, 4), (builder.shl, 2), (builder.lshr, 0), (builder.lshr, 2))
    tops = [shift(lines[2], vectors.constant(WORDS, count)) for shift, count in shifts]
    high = vectors.constant(WORDS, _HIGH)
    return [builder.or_(quad, builder.and_(top, high)) for quad, top in zip(quads, tops, strict=True)]


def _add_unit(builder: Any, form: PanelForm, total: Any, unsigned: list[Any], signed: list[Any]) -> Any:
    """To each of sixteen sums, the products of the bytes of a unit: in each vector four without sign and four with."""
    if _BYTE_DOTS:
        for numbers, values in zip(unsigned, signed, strict=True):
            total = vectors.call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, [total, numbers, values])
        return total
    if not _SHORTS:
        for numbers, values in zip(unsigned, signed, strict=True):
            total = _add_bytes(builder, total, numbers, values)
        return total
    fitting = _SHORT_MOST // (2 * 128 * form.largest)
    for first in range(0, len(unsigned), max(1, fitting)):
        pairs = list(zip(unsigned, signed, strict=True))[first : first + max(1, fitting)]
        total = builder.add(total, _halves(builder, pairs) if fitting else _byte_by_byte(builder, *pairs[0]))
    return total


def _halves(builder: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """The same of a few vectors whose sums of two products, added up, fit into 16 bits; eight lanes at a time."""
    kind, made = ir.VectorType(ir.IntType(16), 16), []
    for half in range(2):
        total = ir.Constant(kind, [0] * 16)
        for pair in pairs:
            sides = [_half(builder, side, half) for side in pair]
            total = builder.add(total, vectors.call(builder, "llvm.x86.avx2.pmadd.ub.sw", kind, sides))
        ones = ir.Constant(kind, [1] * 16)
        made.append(vectors.call(builder, "llvm.x86.avx2.pmadd.wd", EIGHT_WORDS, [total, ones]))
    return _whole(builder, made)


def _byte_by_byte(builder: Any, unsigned: Any, signed: Any) -> Any:
    """The same of one vector with bytes of any size: those at even places and those at odd ones, each in 16 bits."""
    kind, made = ir.VectorType(ir.IntType(16), 16), []
    eight, low = ir.Constant(kind, [8] * 16), ir.Constant(kind, [255] * 16)
    for half in range(2):
        numbers, values = (builder.bitcast(_half(builder, side, half), kind) for side in (unsigned, signed))
        even = [builder.and_(numbers, low), builder.ashr(builder.shl(values, eight), eight)]
        odd = [builder.lshr(numbers, eight), builder.ashr(values, eight)]
        sums = [vectors.call(builder, "llvm.x86.avx2.pmadd.wd", EIGHT_WORDS, sides) for sides in (even, odd)]
        made.append(builder.add(*sums))
    return _whole(builder, made)


def _half(builder: Any, words: Any, half: int) -> Any:
    """Eight of sixteen words, as bytes."""
    lanes = ir.Constant(EIGHT_WORDS, list(range(8 * half, 8 * half + 8)))
    return builder.bitcast(builder.shuffle_vector(words, words, lanes), ir.VectorType(BYTE, 32))


def _whole(builder: Any, halves: list[Any]) -> Any:
    return builder.shuffle_vector(*halves, ir.Constant(WORDS, list(range(LANES))))


def _add_bytes(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """To each of sixteen sums, the products of four bytes without and four with sign, by plain arithmetic."""
    for place in range(4):
        left = builder.and_(builder.lshr(unsigned, vectors.constant(WORDS, 8 * place)), vectors.constant(WORDS, 255))
        lifted = builder.shl(signed, vectors.constant(WORDS, 24 - 8 * place))
        right = builder.ashr(lifted, vectors.constant(WORDS, 24))
        total = builder.add(total, builder.mul(left, right))
    return total


def make_tile(form: PanelForm, rows: int, spread: bool = False) -> Any:
    """tile(x, x_scales, sums, panels, panel, chunks, turn, turns, out, bytes), of int64, inside kernels.

    `spread`: numbers are taken from `bytes`, where `make_spreader` put them; else that is not looked at.
    """

    def typed(_: Any, x: Any, x_scales: Any, sums: Any, weights: Any, panel: Any, chunks: Any, turn: Any, turns: Any,
              out: Any, bytes_: Any) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _TileWriter(builder, form, rows, spread, arguments).write()
            return context.get_dummy_value()

        return numba.types.void(*[numba.types.int64] * 10), generate

    return intrinsic(typed)


def make_spreader(form: PanelForm) -> Any:
    """spread(panels, panel, chunks, bytes), of int64, inside kernels: the numbers of a tile's panels, one in a byte.
    `bytes` has room for uint8 [panels, inputs / 4, outputs of a panel, 4]."""

    def typed(_: Any, weights: Any, panel: Any, chunks: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            own, size, count, out = arguments
            units, unit = form.chunk // UNIT, UNIT * PANEL
            for number in range(PANELS):
                with cgutils.for_range(builder, count) as outer, cgutils.for_range(builder, LONG(units)) as inner:
                    begin = builder.add(builder.mul(outer.index, LONG(form.chunk_bytes)), LONG(form.head))
                    begin = builder.add(begin, builder.mul(inner.index, LONG(form.unit_bytes)))
                    lines = range(form.unit_bytes // LINE)
                    places = [at(builder, own, size, number, builder.add(begin, LONG(line * LINE))) for line in lines]
                    quads = _quads(builder, form, [load(builder, place, WORDS) for place in places])
                    done = builder.mul(builder.add(builder.mul(outer.index, LONG(units)), inner.index), LONG(unit))
                    whole = builder.mul(count, LONG(form.chunk * PANEL))
                    for quad, words in enumerate(quads):
                        place = builder.add(done, LONG(quad * LINE))
                        vectors.store(builder, words, at(builder, out, whole, number, place))
            return context.get_dummy_value()

        return numba.types.void(*[numba.types.int64] * 4), generate

    return intrinsic(typed)
