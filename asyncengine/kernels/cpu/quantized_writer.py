"""The common part of tiles of products with quantized weights, in LLVM's terms: all but the products of integers.

The matrices: `gemm_quantized`, `panel_form`. Tiles: `quantized_tiles`, `quantized_narrow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.intrinsics import INT64, TAG, emitted
from asyncengine.kernels.cpu.panel_form import GROUP, PANEL, UNIT, PanelForm
from asyncengine.kernels.cpu.vectors import BYTE, FLOAT, LINE, LONG, WORD, at, load

AHEAD = 2048
"""Bytes that a panel is prefetched before it is read, where no other tile reads it."""
SHORT_MOST = 2**15 - 1
LOW, HIGH = 0x0F0F0F0F, 0x30303030
"""The lower four bits of every byte, and the two above those."""
Cells = dict[tuple[int, int], Any]
"""Values of a tile by row and vector of `lanes` outputs, panel after panel."""


class TileWriter:
    """Writes the tile of one number of rows. out [rows, panels * 16], times scales of outputs, plus a bias.

    For the inputs of one scale of x: t = sum over groups of scale * (integer sum - zero * sum of x); total += t * scale
    of x. Where scales are steps of a block's, totals of the block are made so, and times its scale added to the total.
    Before a chunk's numbers its minima times sums of x (as numbers) are taken off.
    """

    lanes = PANEL
    """Outputs of a vector."""

    def __init__(self, builder: Any, form: PanelForm, rows: int, spread: bool, dtype: Any, arguments: Any) -> None:
        """`dtype`: the result's. `arguments`: those of `make_tile`'s tile, from x on."""
        self.builder, self.form, self.rows, self.spread, self.dtype = builder, form, rows, spread, dtype
        (self.x, self.x_scales, self.sums, self.weights, self.panel, self.chunks, self.turn, self.turns, self.bytes,
         self.by_output, self.added, self.out, self.across, self.spared) = arguments  # fmt: skip
        self.panels = self.panels_of(rows)
        self.vectors = range(self.panels * PANEL // self.lanes)
        self.cells = [(row, vector) for row in range(rows) for vector in self.vectors]
        self.floats, self.words = (ir.VectorType(number, self.lanes) for number in (FLOAT, WORD))
        self.segments = form.chunk // GROUP
        """Segments of a chunk, of 64 inputs each."""
        self.ahead = LONG(0)
        """Bytes from the weights that are multiplied to those that are prefetched meanwhile."""
        self.totals = self._zeros()
        self.of_block = self._zeros() if form.block else self.totals
        self.x_size = builder.mul(self.chunks, LONG(form.chunk))
        self.scales_size = builder.mul(self.chunks, LONG(4 * form.chunk // form.shared))
        self.sums_size = builder.mul(self.chunks, LONG(4 * form.chunk // form.summed))

    @classmethod
    def panels_of(cls, rows: int) -> int:
        """Panels of a tile of `rows` rows."""
        raise NotImplementedError

    def dots(self, numbers: Any, first: Any, sum_index: Any) -> Cells:
        """Sums of products of a group's integers as they are meant (of "zeros" and "minima": as they are stored), from
        byte `numbers` of a panel and input `first` on. `sum_index`: of the group's sum of x, in a row's."""
        raise NotImplementedError

    def x_scale(self, row: int, index: Any) -> Any:
        """The scale of that number of a row of x, in all lanes."""
        return self.of_row(self.x_scales, self.scales_size, row, index, FLOAT)

    def as_float(self, dot: Any) -> Any:
        """One of `dots` as float32."""
        return self.builder.sitofp(dot, self.floats)

    def zero(self, plane: Any) -> Any:
        """The factor of a sum of x, where groups have this zero."""
        return self.builder.fneg(plane)

    def write(self) -> None:
        builder, form = self.builder, self.form
        if form.spares:
            self._add_spared()
        with cgutils.for_range(builder, self.chunks) as outer:
            chunk = builder.mul(outer.index, LONG(form.chunk_bytes))
            if form.block:
                self._clear(self.of_block)
            if form.below == "minima":
                self._take_minima(chunk, outer.index)
            with cgutils.for_range(builder, LONG(self.segments)) as inner:
                index = builder.add(builder.mul(outer.index, LONG(self.segments)), inner.index)
                self.ahead = self.distance(index)
                share = -(-form.head // LINE // self.segments)
                self.ask(builder.add(chunk, builder.mul(inner.index, LONG(share * LINE))), share)
                self._add_segment(chunk, inner.index, index)
            if form.block:
                self._add_block("scales", chunk)
        self._finish()

    def of_row(self, base: Any, size: Any, row: int, index: Any, item_type: Any) -> Any:
        """Number `index` of a row's scales or sums, in all lanes."""
        address = at(self.builder, base, size, row, self.builder.mul(index, LONG(4)))
        return vectors.splat(self.builder, load(self.builder, address, item_type), self.lanes)

    def ask(self, begin: Any, lines: int) -> None:
        """Prefetch `lines` lines of each panel, `ahead` of byte `begin`."""
        builder, first = self.builder, self.builder.add(begin, self.ahead)
        for panel in range(self.panels):
            for line in range(lines):
                address = at(builder, self.weights, self.panel, panel, builder.add(first, LONG(line * LINE)))
                vectors.prefetch(builder, address)

    def distance(self, index: Any) -> Any:
        """The distance by which weights are prefetched.

        Tiles that share them take turns at prefetching the next panels. A tile that has them for itself prefetches what
        it reads soon, and at a panel's end the beginning of the next but one: each is a stream.
        """
        builder, count = self.builder, LONG(self.panels)
        has_turn = builder.icmp_signed("==", builder.srem(index, self.turns), self.turn)
        shared = builder.select(has_turn, builder.mul(self.panel, count), LONG(0))
        begin = builder.mul(index, LONG(self.form.chunk_bytes // self.segments))
        within = builder.icmp_signed("<", builder.add(begin, LONG(AHEAD)), self.panel)
        beyond = builder.add(builder.mul(self.panel, LONG(self.panels - 1)), LONG(AHEAD))
        unshared = builder.select(within, LONG(AHEAD), beyond)
        return builder.select(builder.icmp_signed("==", self.turns, LONG(1)), unshared, shared)

    def _zeros(self) -> Cells:
        zero = vectors.constant(self.floats, 0.0)
        return {cell: cgutils.alloca_once_value(self.builder, zero) for cell in self.cells}

    def _clear(self, cells: Cells) -> None:
        for cell in cells.values():
            self.builder.store(vectors.constant(self.floats, 0.0), cell)

    def _multiply_add(self, left: Any, right: Any, into: Any) -> None:
        self.builder.store(vectors.multiply_add(self.builder, left, right, self.builder.load(into)), into)

    def _take_minima(self, chunk: Any, index: Any) -> None:
        """Take off a chunk's minima times sums of x, before its other sums need the registers."""
        builder, form = self.builder, self.form
        count, name = form.chunk // form.summed, "minimum_steps" if form.block else "minima"
        with cgutils.for_range(builder, LONG(count)) as loop:
            group = builder.udiv(loop.index, LONG(form.group // form.summed))
            taken = [builder.fneg(self._plane(name, vector, chunk, group)) for vector in self.vectors]
            sum_index = builder.add(builder.mul(index, LONG(count)), loop.index)
            for row in range(self.rows):
                x_sum = self.of_row(self.sums, self.sums_size, row, sum_index, FLOAT)
                for vector in self.vectors:
                    self._multiply_add(taken[vector], x_sum, self.of_block[row, vector])
        if form.block:
            self._add_block("minima", chunk)
            self._clear(self.of_block)

    def _add_segment(self, chunk: Any, segment: Any, index: Any) -> None:
        """64 inputs: `segment` is their number in the chunk, `index` that in the row."""
        builder, form = self.builder, self.form
        shares, groups = GROUP // form.shared, form.shared // form.summed
        first, whole = (builder.mul(number, LONG(shares)) for number in (segment, index))
        numbers = builder.add(chunk, LONG(form.head))
        with cgutils.for_range(builder, LONG(shares)) as outer:
            share, scale = (builder.add(begin, outer.index) for begin in (first, whole))
            several = self._zeros() if groups > 1 else {}
            with cgutils.for_range(builder, LONG(groups)) as loop:
                inside = builder.add(builder.mul(share, LONG(groups)), loop.index)
                sum_index = builder.add(builder.mul(scale, LONG(groups)), loop.index)
                group_numbers = builder.add(numbers, builder.mul(inside, LONG(form.summed // UNIT * form.unit_bytes)))
                dots = self.dots(group_numbers, builder.mul(sum_index, LONG(form.summed)), sum_index)
                scaled = self._scaled(dots, chunk, self._group_of(share, loop.index), sum_index, several)
                if groups == 1:
                    self._add_scaled(scaled, scale)
            if groups > 1:
                self._add_scaled({cell: builder.load(value) for cell, value in several.items()}, scale)

    def _scaled(self, dots: Cells, chunk: Any, group: Any, sum_index: Any, group_totals: Cells) -> Cells:
        """A group's integers times its scale, or those added to `group_totals`, where a scale of x has several."""
        builder, form = self.builder, self.form
        name = "steps" if form.block else "scales"
        scales = [self._plane(name, vector, chunk, group) if form.group else None for vector in self.vectors]
        zeros: list[Any] = []
        if form.below == "zeros":
            zeros = [self.zero(self._plane("zeros", vector, chunk, group)) for vector in self.vectors]
        scaled: Cells = {}
        for row in range(self.rows):
            x_sum = self.of_row(self.sums, self.sums_size, row, sum_index, FLOAT) if zeros else None
            for vector in self.vectors:
                number = self.as_float(dots[row, vector])
                if zeros:  # all whole numbers below 2^24: exact
                    number = vectors.multiply_add(builder, zeros[vector], x_sum, number)
                if group_totals:
                    self._multiply_add(number, scales[vector], group_totals[row, vector])
                else:
                    scaled[row, vector] = number if scales[vector] is None else builder.fmul(number, scales[vector])
        return scaled

    def _add_scaled(self, scaled: Cells, index: Any) -> None:
        for row in range(self.rows):
            scale = self.x_scale(row, index)
            for vector in self.vectors:
                self._multiply_add(scaled[row, vector], scale, self.of_block[row, vector])

    def _group_of(self, share: Any, group: Any) -> Any:
        """The number in its chunk of the group with those inputs."""
        builder, size, shared = self.builder, self.form.group, self.form.shared
        if size > shared:
            return builder.udiv(share, LONG(size // shared))
        return builder.add(builder.mul(share, LONG(shared // (size or shared))), group)

    def _add_block(self, name: str, chunk: Any) -> None:
        """Add a block's totals, times its scale."""
        scales = [self._plane(name, vector, chunk, LONG(0)) for vector in self.vectors]
        for row, vector in self.cells:
            block_total = self.builder.load(self.of_block[row, vector])
            self._multiply_add(block_total, scales[vector], self.totals[row, vector])

    def _add_spared(self) -> None:
        """Add the products of the number of each row of x that was not rounded."""
        builder, form = self.builder, self.form
        for row in range(self.rows):
            index = builder.zext(load(builder, at(builder, self.spared, LONG(8), row, LONG(0)), WORD), LONG)
            value = load(builder, at(builder, self.spared, LONG(8), row, LONG(4)), FLOAT)
            chunk = builder.mul(builder.udiv(index, LONG(form.chunk)), LONG(form.chunk_bytes))
            inside, x_lanes = builder.urem(index, LONG(form.chunk)), vectors.splat(builder, value, self.lanes)
            for vector in self.vectors:
                self._multiply_add(self._column(vector, chunk, inside), x_lanes, self.totals[row, vector])

    def _column(self, vector: int, chunk: Any, inside: Any) -> Any:
        """Weights of one input of a chunk, a vector of outputs, as float32."""
        builder, form = self.builder, self.form
        panel, half = divmod(vector, PANEL // self.lanes)
        quad, unit = builder.urem(builder.udiv(inside, LONG(4)), LONG(4)), builder.udiv(inside, LONG(UNIT))
        begin = builder.add(chunk, LONG(form.head + half * self.lanes * 4))
        begin = builder.add(begin, builder.mul(unit, LONG(form.unit_bytes)))
        shift = builder.mul(builder.urem(inside, LONG(4)), LONG(8))

        def bits(line: Any, more: Any, mask: int) -> Any:
            offset = builder.add(begin, builder.mul(line, LONG(LINE)))
            words = load(builder, at(builder, self.weights, self.panel, panel, offset), self.words)
            count = vectors.splat(builder, builder.trunc(builder.add(shift, more), WORD), self.lanes)
            return builder.and_(builder.lshr(words, count), vectors.constant(self.words, mask))

        def plane(name: str, steps: str) -> Any:
            factor = self._plane(steps if form.block else name, vector, chunk, builder.udiv(inside, LONG(form.group)))
            return builder.fmul(factor, self._plane(name, vector, chunk, LONG(0))) if form.block else factor

        if form.bits == 8:
            number = bits(quad, LONG(0), 255)
        else:
            number = bits(builder.udiv(quad, LONG(2)), builder.mul(builder.urem(quad, LONG(2)), LONG(4)), 15)
        if form.bits == 6:
            top = bits(LONG(2), builder.mul(quad, LONG(2)), 3)
            number = builder.or_(number, builder.shl(top, vectors.constant(self.words, 4)))
        if form.below == "table":
            number = self.look_up(number, [entry + form.offset for entry in form.table])
            number = builder.and_(number, vectors.constant(self.words, 255))
        weight = builder.sitofp(builder.sub(number, vectors.constant(self.words, form.offset)), self.floats)
        if form.below == "zeros":
            weight = builder.fsub(weight, plane("zeros", ""))
        weight = builder.fmul(weight, plane("scales", "steps"))
        return builder.fsub(weight, plane("minima", "minimum_steps")) if form.below == "minima" else weight

    def look_up(self, words: Any, table: list[int]) -> Any:
        """Each byte of the words, below 16, replaced by that entry of a table."""
        return vectors.look_up(self.builder, words, table)

    def _plane(self, name: str, vector: int, chunk: Any, index: Any) -> Any:
        """The number that the group or block has, a vector of outputs as float32."""
        builder = self.builder
        panel, half = divmod(vector, PANEL // self.lanes)
        offset, size, _ = self.form.planes[name]
        begin = builder.add(chunk, LONG(offset + half * size * self.lanes))
        address = at(
            builder, self.weights, self.panel, panel, builder.add(builder.mul(index, LONG(size * PANEL)), begin)
        )
        if size == 4:
            return load(builder, address, self.floats)
        if size == 1:
            numbers = load(builder, address, ir.VectorType(BYTE, self.lanes))
            if name == "zeros":
                return builder.uitofp(numbers, self.floats)
            return builder.sitofp(builder.sext(numbers, self.words), self.floats)
        halves = load(builder, address, ir.VectorType(ir.IntType(16), self.lanes))
        return vectors.widen_halves(builder, halves, self.form.scale)

    def _finish(self) -> None:
        """Totals times scales of their outputs, and the bias, as far as there are any; rounded."""
        builder, rounds = self.builder, self.dtype == numba.types.uint16
        size = 2 if rounds else 4
        for vector in self.vectors:
            first = vector * self.lanes
            for base, combine in ((self.by_output, builder.fmul), (self.added, builder.fadd)):
                with builder.if_then(builder.icmp_signed("!=", base, LONG(0))):
                    operand = load(builder, builder.add(base, LONG(4 * first)), self.floats)
                    for row in range(self.rows):
                        total = self.totals[row, vector]
                        builder.store(combine(builder.load(total), operand), total)
            for row in range(self.rows):
                total = builder.load(self.totals[row, vector])
                target = at(builder, self.out, self.across, row, LONG(size * first))
                vectors.store(builder, vectors.narrow(builder, total) if rounds else total, target)


def make_tile(form: PanelForm, tiles: Iterable[tuple[type[TileWriter], int, bool]]) -> Any:
    """tile(rows, at_once, x, x_scales, sums, panels, panel, chunks, turn, turns, bytes, by_output, added, out, across,
    spared, dtype) inside kernels, of int64 but for the result's dtype: that one of `tiles`, (writer, rows, spread),
    which has `rows` rows and `at_once` panels.

    x int8 [rows, inputs], as `gemm_quantized` rounds it, with scales and sums; panels `panel` bytes apart; `turn` of
    `turns` tiles that read those, one after the other; `bytes`: where a spreader put their numbers, for tiles that are
    spread, else 0; scales of outputs and a bias, float32 [panels * 16], or 0; out [rows, panels * 16], rows `across`
    bytes apart; `spared`: of each row the number of an input that is not rounded, int32, and the input, float32."""
    writers = list(tiles)

    @emitted(*[INT64] * 16, TAG)
    def tile(builder: Any, rows: Any, at_once: Any, x: Any, x_scales: Any, sums: Any, weights: Any, panel: Any,
             chunks: Any, turn: Any, turns: Any, lifted: Any, by_output: Any, added: Any, out: Any, across: Any,
             spared: Any, dtype: Any) -> None:  # fmt: skip
        values = x, x_scales, sums, weights, panel, chunks, turn, turns, lifted, by_output, added, out, across, spared
        is_spread = builder.icmp_signed("!=", lifted, LONG(0))
        for writer, count, spread in writers:
            same_rows = builder.icmp_signed("==", rows, LONG(count))
            same_form = builder.icmp_signed("==", is_spread, ir.IntType(1)(spread))
            same_panels = builder.icmp_signed("==", at_once, LONG(writer.panels_of(count)))
            with builder.if_then(builder.and_(same_panels, builder.and_(same_rows, same_form))):
                writer(builder, form, count, spread, dtype, values).write()

    return tile
