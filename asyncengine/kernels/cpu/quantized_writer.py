"""The common part of tiles of products with quantized weights, in LLVM's terms: all but the products of integers.

The matrices: `gemm_quantized`, `panel_form`. Tiles: `quantized_tiles`, `quantized_narrow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.panel_form import GROUP, PANEL, UNIT, PanelForm
from asyncengine.kernels.cpu.vectors import BYTE, FLOAT, LINE, LONG, WORD, at, load

AHEAD = 2048
"""Bytes that a panel is asked for before it is read, where no other tile reads it."""
SHORT_MOST = 2**15 - 1
LOW, HIGH = 0x0F0F0F0F, 0x30303030
"""The lower four bits of every byte, and the two above those."""
Cells = dict[tuple[int, int], Any]
"""Values of a tile by row and vector of `lanes` outputs, panel after panel."""


class TileWriter:
    """Writes the tile of one number of rows. out [rows, panels * 16], times scales of outputs, plus a bias.

    For 64 inputs: t = sum over groups of scale * (integer sum - zero * sum of x); total += t * scale of x. Where scales
    are steps of a block's, totals of the block are made so, and times its scale added to the total. Before a chunk's
    numbers its minima times sums of x (as numbers) are taken off.
    """

    lanes = PANEL
    """Outputs of a vector."""

    def __init__(self, builder: Any, form: PanelForm, rows: int, spread: bool, kind: Any, arguments: Any) -> None:
        """`kind`: of the result. `arguments`: as `make_tile` says, from x on."""
        self.builder, self.form, self.rows, self.spread, self.kind = builder, form, rows, spread, kind
        (self.x, self.x_scales, self.sums, self.weights, self.panel, self.chunks, self.turn, self.turns, self.bytes,
         self.by_output, self.added, self.out, self.across) = arguments  # fmt: skip
        self.panels = self.panels_of(rows)
        self.vectors = range(self.panels * PANEL // self.lanes)
        self.cells = [(row, vector) for row in range(rows) for vector in self.vectors]
        self.floats, self.words = (ir.VectorType(number, self.lanes) for number in (FLOAT, WORD))
        self.parts = form.chunk // GROUP
        """Parts of a chunk, with one scale of x each."""
        self.ahead = LONG(0)
        """Bytes from the weights that are multiplied to those that are asked for meanwhile."""
        self.totals = self._zeros()
        self.of_block = self._zeros() if form.block else self.totals
        self.x_size = builder.mul(self.chunks, LONG(form.chunk))
        self.scales_size = builder.mul(self.chunks, LONG(4 * self.parts))
        self.sums_size = builder.mul(self.chunks, LONG(4 * form.chunk // form.summed))

    @classmethod
    def panels_of(cls, rows: int) -> int:
        """Panels of a tile of so many rows."""
        raise NotImplementedError

    def dots(self, numbers: Any, first: Any, where: Any) -> Cells:
        """Sums of products of a group's integers as they are meant (of "zeros" and "minima": as they are stored), from
        byte `numbers` of a panel and input `first` on. `where`: of the group's sum of x, in a row's."""
        raise NotImplementedError

    def zero(self, plane: Any) -> Any:
        """The factor of a sum of x, where groups have this zero."""
        return self.builder.fneg(plane)

    def write(self) -> None:
        builder, form = self.builder, self.form
        with cgutils.for_range(builder, self.chunks) as outer:
            chunk = builder.mul(outer.index, LONG(form.chunk_bytes))
            if form.block:
                self._clear(self.of_block)
            if form.below == "minima":
                self._take_minima(chunk, outer.index)
            with cgutils.for_range(builder, LONG(self.parts)) as inner:
                place = builder.add(builder.mul(outer.index, LONG(self.parts)), inner.index)
                self.ahead = self.distance(place)
                share = -(-form.head // LINE // self.parts)
                self.ask(builder.add(chunk, builder.mul(inner.index, LONG(share * LINE))), share)
                self._add_part(chunk, inner.index, place)
            if form.block:
                self._add_block("scales", chunk)
        self._finish()

    def of_row(self, base: Any, size: Any, row: int, place: Any, kind: Any) -> Any:
        """Number `place` of a row's scales or sums, in all lanes."""
        address = at(self.builder, base, size, row, self.builder.mul(place, LONG(4)))
        return vectors.splat(self.builder, load(self.builder, address, kind), self.lanes)

    def ask(self, begin: Any, lines: int) -> None:
        """Ask for so many lines of each panel, `ahead` of byte `begin`."""
        builder, first = self.builder, self.builder.add(begin, self.ahead)
        for panel in range(self.panels):
            for line in range(lines):
                address = at(builder, self.weights, self.panel, panel, builder.add(first, LONG(line * LINE)))
                vectors.prefetch(builder, address)

    def distance(self, place: Any) -> Any:
        """The distance by which weights are prefetched.

        Tiles that share them take turns at prefetching the next panels. A tile that has them for itself prefetches what
        it reads soon, and at a panel's end the beginning of the next but one: each is a stream.
        """
        builder, count = self.builder, LONG(self.panels)
        mine = builder.icmp_signed("==", builder.srem(place, self.turns), self.turn)
        shared = builder.select(mine, builder.mul(self.panel, count), LONG(0))
        begin = builder.mul(place, LONG(self.form.chunk_bytes // self.parts))
        within = builder.icmp_signed("<", builder.add(begin, LONG(AHEAD)), self.panel)
        beyond = builder.add(builder.mul(self.panel, LONG(self.panels - 1)), LONG(AHEAD))
        own = builder.select(within, LONG(AHEAD), beyond)
        return builder.select(builder.icmp_signed("==", self.turns, LONG(1)), own, shared)

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
            place = builder.add(builder.mul(index, LONG(count)), loop.index)
            for row in range(self.rows):
                x_sum = self.of_row(self.sums, self.sums_size, row, place, FLOAT)
                for vector in self.vectors:
                    self._multiply_add(taken[vector], x_sum, self.of_block[row, vector])
        if form.block:
            self._add_block("minima", chunk)
            self._clear(self.of_block)

    def _add_part(self, chunk: Any, part: Any, place: Any) -> None:
        """64 inputs: `part` is their number in the chunk, `place` in the row."""
        builder, form = self.builder, self.form
        groups, size = GROUP // form.summed, GROUP // UNIT * form.unit_bytes
        numbers = builder.add(chunk, builder.add(LONG(form.head), builder.mul(part, LONG(size))))
        several = self._zeros() if groups > 1 else {}
        with cgutils.for_range(builder, LONG(groups)) as loop:
            where = builder.add(builder.mul(place, LONG(groups)), loop.index)
            own = builder.add(numbers, builder.mul(loop.index, LONG(size // groups)))
            dots = self.dots(own, builder.mul(where, LONG(form.summed)), where)
            found = self._scaled(dots, chunk, self._group_of(part, loop.index), where, several)
            if groups == 1:
                self._add_scaled(found, place)
        if groups > 1:
            self._add_scaled({cell: builder.load(value) for cell, value in several.items()}, place)

    def _scaled(self, dots: Cells, chunk: Any, group: Any, where: Any, several: Cells) -> Cells:
        """A group's integers times its scale, or those added to `several`, where 64 inputs have more than one group."""
        builder, form = self.builder, self.form
        name = "steps" if form.block else "scales"
        scales = [self._plane(name, vector, chunk, group) if form.group else None for vector in self.vectors]
        zeros: list[Any] = []
        if form.below == "zeros":
            zeros = [self.zero(self._plane("zeros", vector, chunk, group)) for vector in self.vectors]
        found: Cells = {}
        for row in range(self.rows):
            x_sum = self.of_row(self.sums, self.sums_size, row, where, FLOAT) if zeros else None
            for vector in self.vectors:
                number = builder.sitofp(dots[row, vector], self.floats)
                if zeros:  # all whole numbers below 2^24: exact
                    number = vectors.multiply_add(builder, zeros[vector], x_sum, number)
                if several:
                    self._multiply_add(number, scales[vector], several[row, vector])
                else:
                    found[row, vector] = number if scales[vector] is None else builder.fmul(number, scales[vector])
        return found

    def _add_scaled(self, found: Cells, place: Any) -> None:
        for row in range(self.rows):
            scale = self.of_row(self.x_scales, self.scales_size, row, place, FLOAT)
            for vector in self.vectors:
                self._multiply_add(found[row, vector], scale, self.of_block[row, vector])

    def _group_of(self, part: Any, group: Any) -> Any:
        """The number in its chunk of the group with those inputs."""
        builder, size = self.builder, self.form.group
        if size > GROUP:
            return builder.udiv(part, LONG(size // GROUP))
        return builder.add(builder.mul(part, LONG(GROUP // (size or GROUP))), group)

    def _add_block(self, name: str, chunk: Any) -> None:
        """Add what a block has, times its scale."""
        scales = [self._plane(name, vector, chunk, LONG(0)) for vector in self.vectors]
        for row, vector in self.cells:
            own = self.builder.load(self.of_block[row, vector])
            self._multiply_add(own, scales[vector], self.totals[row, vector])

    def _plane(self, name: str, vector: int, chunk: Any, index: Any) -> Any:
        """The number that the group or block has, a vector of outputs as float32."""
        builder = self.builder
        panel, part = divmod(vector, PANEL // self.lanes)
        offset, size, _ = self.form.planes[name]
        begin = builder.add(chunk, LONG(offset + part * size * self.lanes))
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
        builder, rounds = self.builder, self.kind == numba.types.uint16
        size = 2 if rounds else 4
        for vector in self.vectors:
            first = vector * self.lanes
            for base, combine in ((self.by_output, builder.fmul), (self.added, builder.fadd)):
                with builder.if_then(builder.icmp_signed("!=", base, LONG(0))):
                    own = load(builder, builder.add(base, LONG(4 * first)), self.floats)
                    for row in range(self.rows):
                        total = self.totals[row, vector]
                        builder.store(combine(builder.load(total), own), total)
            for row in range(self.rows):
                total = builder.load(self.totals[row, vector])
                target = at(builder, self.out, self.across, row, LONG(size * first))
                vectors.store(builder, vectors.narrow(builder, total) if rounds else total, target)


def make_tile(form: PanelForm, tiles: Iterable[tuple[type[TileWriter], int, bool]]) -> Any:
    """tile(rows, at_once, x, x_scales, sums, panels, panel, chunks, turn, turns, bytes, by_output, added, out, across,
    kind) inside kernels, of int64 but for the kind of the result: that one of `tiles`, (writer, rows, spread), which
    has so many rows and `at_once` panels.

    x int8 [rows, inputs], as `gemm_quantized` rounds it, with scales and sums; panels `panel` bytes apart; `turn` of
    `turns` tiles that read those, one after the other; `bytes`: where a spreader put their numbers, for tiles that are
    spread, else 0; scales of outputs and a bias, float32 [panels * 16], or 0; out [rows, panels * 16], rows `across`
    bytes apart."""
    known = list(tiles)

    def typed(_: Any, rows: Any, at_once: Any, x: Any, x_scales: Any, sums: Any, weights: Any, panel: Any, chunks: Any,
              turn: Any, turns: Any, held: Any, by_output: Any, added: Any, out: Any, across: Any,
              kind: Any) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            wanted = builder.icmp_signed("!=", arguments[10], LONG(0))
            for writer, count, spread in known:
                same = builder.icmp_signed("==", arguments[0], LONG(count))
                alike = builder.icmp_signed("==", wanted, ir.IntType(1)(spread))
                beside = builder.icmp_signed("==", arguments[1], LONG(writer.panels_of(count)))
                with builder.if_then(builder.and_(beside, builder.and_(same, alike))):
                    writer(builder, form, count, spread, kind, arguments[2:15]).write()
            return context.get_dummy_value()

        return numba.types.void(*[numba.types.int64] * 15, kind), generate

    return intrinsic(typed)
