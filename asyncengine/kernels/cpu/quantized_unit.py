"""The tile of a product with quantized weights for CPUs with a matrix unit (Intel's AMX), in LLVM's terms.

The unit adds the products of signed bytes of sixteen rows of x and unsigned bytes of sixteen outputs of up to 64 inputs
at once (`matrix_unit`). Sums of integers are exact, and scales follow in the order that all tiles have: a row's result
is that of the tiles of few rows, to the bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu.matrix_unit import ROWS, WEIGHTS, X, load_tile, multiply_tiles, store_tile, zero_tile
from asyncengine.kernels.cpu.panel_form import PANEL
from asyncengine.kernels.cpu.quantized_tiles import WideWriter
from asyncengine.kernels.cpu.quantized_writer import Cells
from asyncengine.kernels.cpu.vectors import LINE, LONG, WORD, WORDS, at, load


class UnitWriter(WideWriter):
    """Writes the tile of sixteen rows and two panels, whose numbers are bytes: as they are stored, or spread."""

    def dots(self, numbers: Any, first: Any, where: Any) -> Cells:
        builder, form = self.builder, self.form
        room = cgutils.alloca_once(builder, ir.ArrayType(WORDS, ROWS * self.panels))
        sums = builder.ptrtoint(room, LONG)
        spread_size = builder.mul(self.chunks, LONG(form.chunk * PANEL))
        load_tile(builder, X[0], builder.add(self.x, first), self.x_size)
        for panel in range(self.panels):
            zero_tile(builder, panel)
            if self.spread:
                own = at(builder, self.bytes, spread_size, panel, builder.mul(first, LONG(PANEL)))
            else:
                own = at(builder, self.weights, self.panel, panel, numbers)
            load_tile(builder, WEIGHTS[panel], own, LONG(LINE))
            multiply_tiles(builder, "bsud", panel, X[0], WEIGHTS[panel])
            store_tile(builder, panel, builder.add(sums, LONG(panel * ROWS * LINE)), LONG(LINE))
        found: Cells = {}
        for row, panel in self.cells:
            total = load(builder, builder.add(sums, LONG((panel * ROWS + row) * LINE)), WORDS)
            if form.offset:
                total = builder.add(total, self.of_row(self.sums, self.sums_size, row, where, WORD))
            found[row, panel] = total
        return found
