"""x W^T with quantized weights. x is rounded to 8 bits as it comes: integer products, scaled in float32.

Weights are whole numbers, sixteen outputs side by side, four inputs of each together, which is what the CPU's
instruction for such products takes (AVX512-VNNI; elsewhere those of AVX2, or plain arithmetic, do the same). They are
stored without sign, above an offset or as they are; what offset, zero or minimum add is a multiple of the sum of x,
which is made when x is rounded: in groups of 32 or 64 numbers of one row, each with a scale of its own, so that one
large value costs its group alone; where it is 32, the largest of a row is not rounded at all, but multiplied in float32
(`PanelForm.spares`). Sums of integers are exact (64 products of 255 and 127 at most: 2^21), and those of the groups are
made in one order: a row's result depends neither on the rows beside it nor on the number of threads.

Of a form that is `exact`, x stays as it comes, and products are made in float32, of numbers that are widened for a few
rows at once: a few rows wait for memory as long as before, prompts take several times as long.

Where weights lie: `panel_form`. For each form that a model has, the part that multiplies is compiled by itself, and
called by its address: whoever calls it is the same for all forms.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

from asyncengine.kernels.cpu import jit, matrix_unit, quantized_tiles
from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.jit import allocates, array, inline, keep, pointer, room, serial_in_order, tag_of, widen
from asyncengine.kernels.cpu.panel_form import GROUP, PANEL, PanelForm
from asyncengine.kernels.cpu.quantized_narrow import NARROW, NarrowWriter, narrow_fits
from asyncengine.kernels.cpu.quantized_tiles import MOST, PANELS, SPREAD, WideWriter, streamed_rows
from asyncengine.kernels.cpu.quantized_writer import Cells, TileWriter, make_tile
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of, reads_worth
from asyncengine.kernels.cpu.vectors import LINE, LONG, UNIT, WORD, WORDS, at, bits_of, load, number_of, size_of
from asyncengine.kernels.elsewhere import called_apart

# The tile of a product with quantized weights for CPUs with a matrix unit (Intel's AMX), in LLVM's terms.


class UnitWriter(WideWriter):
    """Writes the tile of sixteen rows and two panels, whose numbers are bytes: as they are stored, or spread."""

    def dots(self, numbers: Any, first: Any, where: Any) -> Cells:
        builder, form = self.builder, self.form
        room = cgutils.alloca_once(builder, ir.ArrayType(WORDS, matrix_unit.ROWS * self.panels))
        sums = builder.ptrtoint(room, LONG)
        spread_size = builder.mul(self.chunks, LONG(form.chunk * PANEL))
        matrix_unit.load_tile(builder, matrix_unit.X[0], builder.add(self.x, first), self.x_size)
        for panel in range(self.panels):
            matrix_unit.zero_tile(builder, panel)
            if self.spread:
                own = at(builder, self.bytes, spread_size, panel, builder.mul(first, LONG(PANEL)))
            else:
                own = at(builder, self.weights, self.panel, panel, numbers)
            matrix_unit.load_tile(builder, matrix_unit.WEIGHTS[panel], own, LONG(LINE))
            matrix_unit.multiply_tiles(builder, "bsud", panel, matrix_unit.X[0], matrix_unit.WEIGHTS[panel])
            matrix_unit.store_tile(builder, panel, builder.add(sums, LONG(panel * matrix_unit.ROWS * LINE)), LONG(LINE))
        found: Cells = {}
        for row, panel in self.cells:
            total = load(builder, builder.add(sums, LONG((panel * matrix_unit.ROWS + row) * LINE)), WORDS)
            if form.offset:
                total = builder.add(total, self.of_row(self.sums, self.sums_size, row, where, WORD))
            found[row, panel] = total
        return found


_EVEN = 6
"""Rows whose arithmetic takes as long as reading a panel."""
_ROUNDING = 16
"""Bytes that could be read while a number of x is rounded."""
_ROUNDER, _ROUNDER_BITS = np.float32(1.5 * 2**23), np.int32(0x4B400000)
"""Adding it leaves a float32 without fraction, rounded to nearest even: a small number plus these bits."""
_WIDTH, _TILE = PANELS * PANEL, (matrix_unit.ROWS if UNIT else MOST) * PANELS * PANEL
"""Outputs of the widest tile, and numbers of the largest."""
# What is known of a quantized matrix: int64 by place. Addresses (0: there is none), and sizes.
PANELS_AT, ROW_SCALES, ORDER, INPUTS, OUTPUTS, CHUNKS, CHUNK_INPUTS, BYTES, SHARED, SUMMED, SUM_FORM = range(11)
MATRIX_FIELDS = 11
SPARED = 8
"""Bytes of a row of x for the number that is not rounded: its place among the weights' inputs, and itself."""
_SIZE = np.int32(2**31 - 1)
"""Bits of a float32 without its sign, which order like its size."""
_PLAIN, _SCALED, EXACT = 0, -1, -2
"""SUM_FORM: sums of x are wanted as float32, whole or times the scale of x; of x as it comes; above 0: as int32, times
minus this."""


class QuantizedMatrix(NamedTuple):
    """A matrix [outputs, inputs] in panels, as `quantized_panels` fills them."""

    form: PanelForm
    panels: torch.Tensor
    row_scales: torch.Tensor | None
    """float32 [outputs]"""
    inputs: int
    outputs: int
    order: torch.Tensor | None = None
    """int64 [inputs]: which number of x an input of the weights is multiplied with; None: its own."""

    def fields(self) -> NDArray[np.int64]:
        """PANELS_AT .. SUM_FORM. Addresses keep nothing where it is."""
        form, chunks = self.form, self.form.chunks(self.inputs)
        addresses = [0 if part is None else part.data_ptr() for part in (self.panels, self.row_scales, self.order)]
        sums = EXACT if form.exact else form.offset or (_SCALED if form.below == "minima" else _PLAIN)
        sizes = [self.inputs, self.outputs, chunks, form.chunk, self.panels.nbytes, form.shared, form.summed, sums]
        return np.array([*addresses, *sizes], dtype=np.int64)

    def scratch_bytes(self, rows: int) -> int:
        """Bytes that a product of so many rows needs beside its arguments."""
        return rows * (self.form.chunks(self.inputs) * sum(self.form.row_bytes) + SPARED)


def gemm(
    x: torch.Tensor, matrix: QuantizedMatrix, out: torch.Tensor, bias: torch.Tensor | None = None,
    fields: NDArray[np.int64] | None = None,
) -> None:  # fmt: skip
    """out [..., outputs] = x [..., inputs] W^T + bias; `bias` float32 [outputs], `out` of either type.

    `out` may be columns of a wider matrix: its rows are `out.stride(-2)` apart, and contiguous each. `fields`: those of
    the matrix, where they are at hand.
    """
    x = x.contiguous()
    inputs = x.shape[-1]
    if inputs != matrix.inputs:
        raise ValueError(f"x is of {inputs}, the weight of {matrix.inputs}")
    rows = x.numel() // inputs
    scratch = torch.empty(matrix.scratch_bytes(rows), dtype=torch.uint8)
    known = matrix.fields() if fields is None else fields
    stride = out.stride(-2) if out.dim() > 1 else matrix.outputs
    _multiply(
        x.data_ptr(), known.ctypes.data, code_for(matrix.form, out.dtype), 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), stride, scratch.data_ptr(), rows, tag_of(x.dtype), tag_of(out.dtype), x.element_size(),
        use_team(),
    )  # fmt: skip


def code_for(form: PanelForm, dtype: torch.dtype) -> int:
    """The address of what multiplies weights of this form, for a result of that type. Compiled now if need be: unless
    others compile it (`elsewhere.called_apart`)."""
    kind = "uint16" if dtype == torch.bfloat16 else "float32"
    report = called_apart.get()
    if report is not None:
        words = (form.bits, form.group, form.below, form.block, form.scale, int(form.exact), kind, *form.table)
        report(f"{__name__}:compile_code:form {' '.join(map(str, words))}", False)
        return 0
    address: int = _code_for(form, kind, NARROW).address
    return address


def compile_code(words: str) -> None:
    """Compile, and keep, what `code_for` names so."""
    _, bits, group, below, block, scale, exact, kind, *table = words.split()
    form = PanelForm(int(bits), int(group), below, int(block), scale, tuple(map(int, table)), exact == "1")
    _code_for(form, kind, NARROW)


@functools.cache
def _code_for(form: PanelForm, kind: str, narrow: bool) -> Any:
    """It stays where it is. `narrow`: by tiles of `NarrowWriter`, of a form that it takes."""
    return jit.compiled_for(_make_part(form, narrow), f"void({', '.join(['int64'] * 12)}, {kind})")


@serial_in_order
def _multiply(
    x: int, fields: int, code: int, bias: int, out: int, stride: int, scratch: int, rows: int, kind: np.generic,
    out_kind: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    """`gemm` by address. `code` is what `code_for` says, `stride` numbers from one row of `out` to the next, `size` the
    bytes of a number of x."""
    matrix = array(pointer(fields, np.int64(0)), (MATRIX_FIELDS,))
    inputs, outputs, chunks = matrix[INPUTS], matrix[OUTPUTS], matrix[CHUNKS]
    groups = chunks * matrix[CHUNK_INPUTS] // matrix[SHARED]
    pieces = pieces_of(rows * inputs * _ROUNDING, rows, team)
    parallel_for(
        round_part, team, pieces,
        (x, matrix[ORDER], scratch, rows, inputs, groups, matrix[SHARED], matrix[SUMMED], matrix[SUM_FORM], kind, size),
    )  # fmt: skip
    pairs = -(-outputs // (PANELS * PANEL))
    pieces = pieces_of(matrix[BYTES] * reads_worth(rows, _EVEN), pairs, team)
    known = (matrix[PANELS_AT], matrix[ROW_SCALES], bias, out, scratch, rows, chunks, outputs, stride, out_kind)
    parallel_for(code, team, pieces, known)


@serial_in_order
@allocates
def round_part(
    piece: int, pieces: int, worker: int,
    x: int, order: int, scratch: int, rows: int, inputs: int, groups: int, shared: int, summed: int, sum_form: int,
    kind: np.generic, size: int,
) -> None:  # fmt: skip
    """Rows of x, those of one of `pieces`, as int8 [rows, groups * shared], then scales float32 [rows, groups], then
    sums of every `summed` numbers [rows, groups * shared / summed], as `sum_form` says, then `SPARED`; with `EXACT` as
    float32 all of them, and without scales. `size`: bytes of a number of x.

    NaN and infinities make the scale of their group, and so every result of their row, NaN or infinite.
    """
    first, last = rows * piece // pieces, rows * (piece + 1) // pieces
    if sum_form == EXACT:
        for row in range(first, last):
            _take_row(x + row * inputs * size, order, scratch, row, rows, inputs, groups * shared, summed, kind)
        return
    rounded = array(pointer(scratch, np.int8(0)), (rows, groups, shared))
    scales = array(pointer(scratch + rows * groups * shared, np.float32(0)), (rows, groups))
    parts = shared // summed
    sums = array(pointer(scratch + rows * groups * (shared + 4), np.int32(0)), (rows, groups, parts))
    ordered = array(pointer(order, np.int64(0)), (inputs,))
    spared = array(pointer(scratch + rows * groups * (shared + 4 + 4 * parts), np.int32(0)), (rows, SPARED // 4))
    taken = np.empty(GROUP, np.float32)
    for row in range(first, last):
        whole = array(pointer(x + row * inputs * size, kind), (inputs,))
        lone = _place_of_largest(whole, shared) if shared < GROUP else -1
        for group in range(groups):
            begin = group * shared
            count, numbers = max(0, min(shared, inputs - begin)), rounded[row, group]
            if order == 0 and not begin <= lone < begin + shared:
                values = array(pointer(x + (row * inputs + begin) * size, kind), (shared,))
                scale, total = _round_group(values, numbers, count)
            else:
                for index in range(count):
                    place = begin + index if order == 0 else ordered[begin + index]
                    taken[index] = widen(whole[place])
                    if place == lone:
                        spared[row, 0], spared[row, 1] = begin + index, bits_of(taken[index])
                        taken[index] = np.float32(0)
                scale, total = _round_group(taken, numbers, count)
            scales[row, group] = scale
            for part in range(parts):
                if parts > 1:
                    total = np.int32(0)
                    for index in range(part * summed, (part + 1) * summed):
                        total += numbers[index]
                if sum_form > 0:
                    sums[row, group, part] = -sum_form * total
                else:
                    found = np.float32(total) * (scale if sum_form == _SCALED else np.float32(1))
                    sums[row, group, part] = bits_of(found)


@inline
def _take_row(
    x: int, order: int, scratch: int, row: int, rows: int, inputs: int, width: int, summed: int, kind: np.generic
) -> None:
    """The row of x at that address as float32, in the place of row `row`, and sums of every `summed` numbers."""
    values, numbers = array(pointer(x, kind), (inputs,)), array(pointer(scratch, np.float32(0)), (rows, width))
    ordered, parts = array(pointer(order, np.int64(0)), (inputs,)), width // summed
    sums = array(pointer(scratch + rows * width * 4, np.float32(0)), (rows, parts))
    for part in range(parts):
        total = np.float32(0)
        for index in range(part * summed, (part + 1) * summed):
            number = np.float32(0)
            if index < inputs:
                number = widen(values[index] if order == 0 else values[ordered[index]])
            numbers[row, index] = number
            total += number
        sums[row, part] = total


@inline
def _place_of_largest(values: Any, at_once: int) -> int:
    """The place of the largest number by its size, the first of several. NaN is larger than all."""
    largest, place = np.int32(-1), 0
    for begin in range(0, len(values), at_once):
        end, own = min(begin + at_once, len(values)), np.int32(0)
        for index in range(begin, end):
            own = max(own, bits_of(widen(values[index])) & _SIZE)
        if own > largest:
            largest, place = own, begin
    while bits_of(widen(values[place])) & _SIZE != largest:
        place += 1
    return place


@inline
def _round_group(values: Any, numbers: Any, count: int) -> tuple[np.float32, np.int32]:
    """(scale, sum of the whole numbers) of the `count` numbers of a group; those that are missing become 0."""
    largest = np.int32(0)
    for index in range(count):  # as bits, which order like the numbers; floats would be compared one by one
        largest = max(largest, bits_of(widen(values[index])) & _SIZE)
    scale = number_of(largest) / np.float32(127)
    factor = np.float32(1) / scale if scale > np.float32(1e-30) else np.float32(0)
    total = np.int32(0)
    for index in range(count):
        shifted = widen(values[index]) * factor + _ROUNDER
        number = bits_of(shifted) - _ROUNDER_BITS
        numbers[index] = number
        total += number
    for index in range(count, len(numbers)):
        numbers[index] = 0
    return scale, total


def _make_part(form: PanelForm, narrow: bool) -> Any:
    """Make the function that computes the outputs of pairs of panels, those of one of `pieces`, of all rows."""
    made_for, smallest, streamed, tile, spread = _tiles_of(form, narrow)
    bits, summed, spreads = form.bits, form.summed, form.bits == 6 and SPREAD > 0
    chunk, chunk_bytes, exact = form.chunk, form.chunk_bytes, form.exact
    x_bytes, scales_bytes, sums_bytes = form.row_bytes

    def multiply_part(
        piece: int, pieces: int, worker: int,
        panels: int, row_scales: int, bias: int, out: int, scratch: int, rows: int, chunks: int, outputs: int,
        stride: int, kind: np.generic,
    ) -> None:  # fmt: skip
        pairs = -(-outputs // (PANELS * PANEL))
        first, last = pairs * piece // pieces, pairs * (piece + 1) // pieces
        panel, last_panel = chunks * chunk_bytes, -(-outputs // PANEL) - 1
        # known to be false where there is no unit: a compiler for such a CPU has not its instructions
        by_unit = UNIT and rows >= matrix_unit.ROWS and not exact
        most = matrix_unit.ROWS if by_unit else MOST
        size, turns = size_of(kind), -(-rows // most)
        own_scales, own_bias = room(_WIDTH, np.float32(0)), room(_WIDTH, np.float32(0))
        found = room(_TILE, kind)
        often = bits < 8 if by_unit else spreads and turns >= SPREAD  # of as many none has less than three rows
        held = np.empty(PANELS * PANEL * chunks * chunk + LINE if often else 1, np.uint8)
        numbers_at = -(-held.ctypes.data // LINE) * LINE if often else 0
        at_once = 1 if rows <= streamed or 0 < smallest <= rows else PANELS
        if by_unit:
            matrix_unit.configure_unit(most, most, summed)
        for one in range(PANELS * first, min(PANELS * last, last_panel + 1), at_once):
            begin, own = one * PANEL, panels + one * panel
            step = (min(one + 1, last_panel) - one) * panel if at_once > 1 else panel
            by_output, added = row_scales + begin * 4 if row_scales != 0 else 0, bias + begin * 4 if bias != 0 else 0
            width = min(at_once * PANEL, outputs - begin)
            whole = width == at_once * PANEL
            if not whole:
                by_output, added = _held(by_output, own_scales, width), _held(added, own_bias, width)
            if often:
                spread(own, step, chunks, numbers_at)
            for turn in range(turns):
                row, end = _rows_of(turn, turns, rows, most, smallest if at_once == 1 else 1)
                numbers = scratch + row * chunks * x_bytes
                scales = scratch + chunks * (rows * x_bytes + row * scales_bytes)
                sums = scratch + chunks * (rows * (x_bytes + scales_bytes) + row * sums_bytes)
                spared = scratch + chunks * rows * (x_bytes + scales_bytes + sums_bytes) + row * SPARED
                target, across = out + (row * stride + begin) * size, stride * size
                if not whole:
                    target, across = found.ctypes.data, at_once * PANEL * size
                tile(
                    end - row, at_once, numbers, scales, sums, own, step, chunks, turn, turns, numbers_at, by_output,
                    added, target, across, spared, kind,
                )  # fmt: skip
                for place in range(0 if whole else end - row):
                    results = array(pointer(out + ((row + place) * stride + begin) * size, kind), (width,))
                    for lane in range(width):
                        results[lane] = found[place * at_once * PANEL + lane]
        if by_unit:
            matrix_unit.release_unit()
        keep(held)

    multiply_part.made_for = made_for  # type: ignore[attr-defined]
    return serial_in_order(allocates(multiply_part))


def _tiles_of(form: PanelForm, narrow: bool) -> tuple[str, int, int, Any, Any]:
    """(what the function is made for, the rows from which one panel at a time is multiplied, if there are such, those
    up to which it is read as one stream, the tile, what spreads its numbers)"""
    wide: type[TileWriter] = NarrowWriter if narrow and narrow_fits(form) else WideWriter
    writer = quantized_tiles.FloatWriter if form.exact else wide
    streamed = streamed_rows(form) if writer is WideWriter else 0
    smallest = min((rows for rows in range(1, MOST + 1) if writer.panels_of(rows) == 1), default=0)
    tiles = [(writer, rows, False) for rows in range(2 if streamed else 1, MOST + 1)]
    tiles += [(quantized_tiles.StreamWriter, rows, False) for rows in range(1, streamed + 1)]
    tiles += [(writer, rows, True) for rows in (3, 4) if form.bits == 6 and SPREAD > 0]
    tiles += [(UnitWriter, matrix_unit.ROWS, form.bits < 8)] if UNIT and not form.exact else []
    spread = quantized_tiles.make_spreader(form, writer.panels_of(MOST))
    return f"{form} {writer.__name__}", smallest, streamed, make_tile(form, tiles), spread


@inline
def _rows_of(turn: int, turns: int, rows: int, most: int, smallest: int) -> tuple[int, int]:
    """The rows of one of `turns`, at least `smallest`: some of them once more if need be."""
    row, end = rows * turn // turns, rows * (turn + 1) // turns
    if UNIT and most == matrix_unit.ROWS:
        smallest = most
    if end - row < smallest:
        end = max(end, smallest)
        row = end - smallest
    return row, end


@inline
def _held(source: int, target: Any, count: int) -> int:
    """The address of so many float32 with room for whole vectors, or 0, if there are none."""
    if source == 0:
        return 0
    given = array(pointer(source, np.float32(0)), (count,))
    for index in range(count):
        target[index] = given[index]
    address: int = target.ctypes.data
    return address
