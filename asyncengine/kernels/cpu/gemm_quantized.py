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

Where weights lie: `panel_form`. For each form that a model has, the function that multiplies is compiled by itself, and
called by its address, so that its callers are the same for all forms.
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
        buffer = cgutils.alloca_once(builder, ir.ArrayType(WORDS, matrix_unit.ROWS * self.panels))
        sums = builder.ptrtoint(buffer, LONG)
        spread_size = builder.mul(self.chunks, LONG(form.chunk * PANEL))
        matrix_unit.load_tile(builder, matrix_unit.X[0], builder.add(self.x, first), self.x_size)
        for panel in range(self.panels):
            matrix_unit.zero_tile(builder, panel)
            if self.spread:
                source = at(builder, self.bytes, spread_size, panel, builder.mul(first, LONG(PANEL)))
            else:
                source = at(builder, self.weights, self.panel, panel, numbers)
            matrix_unit.load_tile(builder, matrix_unit.WEIGHTS[panel], source, LONG(LINE))
            matrix_unit.multiply_tiles(builder, "bsud", panel, matrix_unit.X[0], matrix_unit.WEIGHTS[panel])
            matrix_unit.store_tile(builder, panel, builder.add(sums, LONG(panel * matrix_unit.ROWS * LINE)), LONG(LINE))
        totals: Cells = {}
        for row, panel in self.cells:
            total = load(builder, builder.add(sums, LONG((panel * matrix_unit.ROWS + row) * LINE)), WORDS)
            if form.offset:
                total = builder.add(total, self.of_row(self.sums, self.sums_size, row, where, WORD))
            totals[row, panel] = total
        return totals


_EVEN = 6
"""Rows whose arithmetic takes as long as reading a panel."""
_ROUNDING = 16
"""Bytes that could be read while a number of x is rounded."""
_ROUNDER, _ROUNDER_BITS = np.float32(1.5 * 2**23), np.int32(0x4B400000)
"""Adding it rounds a small float32 to nearest even, and leaves the bits of that integer plus `_ROUNDER_BITS`."""
_WIDTH, _TILE = PANELS * PANEL, (matrix_unit.ROWS if UNIT else MOST) * PANELS * PANEL
"""Outputs of the widest tile, and numbers of the largest."""
# Indices of a quantized matrix's record of int64: addresses (0: there is none), and sizes.
PANELS_AT, ROW_SCALES, ORDER, INPUTS, OUTPUTS, CHUNKS, CHUNK_INPUTS, BYTES, SHARED, SUMMED, SUM_FORM = range(11)
MATRIX_FIELDS = 11
SPARED = 8
"""Bytes of a row of x for the number that is not rounded: its index among the weights' inputs, and itself."""
_MAGNITUDE = np.int32(2**31 - 1)
"""Bits of a float32 without its sign, which as integers are ordered like absolute values."""
_PLAIN, _SCALED, EXACT = 0, -1, -2
"""Values of SUM_FORM. Sums of x are float32: of whole numbers, of these times the scale of x, of x as it comes. Above
0: they are int32, times minus this."""


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
        """The record PANELS_AT .. SUM_FORM. It does not keep the tensors alive whose addresses it has."""
        form, chunks = self.form, self.form.chunks(self.inputs)
        addresses = [0 if field is None else field.data_ptr() for field in (self.panels, self.row_scales, self.order)]
        sums = EXACT if form.exact else form.offset or (_SCALED if form.below == "minima" else _PLAIN)
        sizes = [self.inputs, self.outputs, chunks, form.chunk, self.panels.nbytes, form.shared, form.summed, sums]
        return np.array([*addresses, *sizes], dtype=np.int64)

    def scratch_bytes(self, rows: int) -> int:
        """Bytes of scratch memory for a product of `rows` rows."""
        return rows * (self.form.chunks(self.inputs) * sum(self.form.row_bytes) + SPARED)


def gemm(
    x: torch.Tensor, matrix: QuantizedMatrix, out: torch.Tensor, bias: torch.Tensor | None = None,
    fields: NDArray[np.int64] | None = None,
) -> None:  # fmt: skip
    """out [..., outputs] = x [..., inputs] W^T + bias; `bias` float32 [outputs], `out` of either type.

    `out` may be columns of a wider matrix: its rows are `out.stride(-2)` apart, and contiguous each. `fields`: the
    matrix's record, if the caller has it. Raises ValueError if x has another number of inputs than the matrix.
    """
    x = x.contiguous()
    inputs = x.shape[-1]
    if inputs != matrix.inputs:
        raise ValueError(f"x has {inputs} inputs, the weight {matrix.inputs}")
    rows = x.numel() // inputs
    scratch = torch.empty(matrix.scratch_bytes(rows), dtype=torch.uint8)
    record = matrix.fields() if fields is None else fields
    stride = out.stride(-2) if out.dim() > 1 else matrix.outputs
    _multiply(
        x.data_ptr(), record.ctypes.data, code_for(matrix.form, out.dtype), 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), stride, scratch.data_ptr(), rows, tag_of(x.dtype), tag_of(out.dtype), x.element_size(),
        use_team(),
    )  # fmt: skip


def code_for(form: PanelForm, dtype: torch.dtype) -> int:
    """The address of the function that multiplies weights of this form, for results of that dtype. It is compiled now
    if need be; 0 if other processes compile it (`elsewhere.called_apart`)."""
    type_name = "uint16" if dtype == torch.bfloat16 else "float32"
    report = called_apart.get()
    if report is not None:
        words = (form.bits, form.group, form.below, form.block, form.scale, int(form.exact), type_name, *form.table)
        report(f"{__name__}:compile_code:form {' '.join(map(str, words))}", False)
        return 0
    return int(_code_for(form, type_name, NARROW).address)


def compile_code(words: str) -> None:
    """Compile, and keep, the function that `code_for` reports by these words."""
    _, bits, group, below, block, scale, exact, type_name, *table = words.split()
    form = PanelForm(int(bits), int(group), below, int(block), scale, tuple(map(int, table)), exact == "1")
    _code_for(form, type_name, NARROW)


@functools.cache
def _code_for(form: PanelForm, type_name: str, narrow: bool) -> Any:
    """The code, which is never freed, so that its address stays. `narrow`: use `NarrowWriter` if it takes the form."""
    return jit.compiled_for(_make_piece(form, narrow), f"void({', '.join(['int64'] * 12)}, {type_name})")


@serial_in_order
def _multiply(
    x: int, fields: int, code: int, bias: int, out: int, stride: int, scratch: int, rows: int, dtype: np.generic,
    out_dtype: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    """`gemm` by address. `code`: from `code_for`; `stride`: numbers from one row of `out` to the next; `size`: bytes of
    a number of x."""
    matrix = array(pointer(fields, np.int64(0)), (MATRIX_FIELDS,))
    inputs, outputs, chunks = matrix[INPUTS], matrix[OUTPUTS], matrix[CHUNKS]
    groups = chunks * matrix[CHUNK_INPUTS] // matrix[SHARED]
    pieces = pieces_of(rows * inputs * _ROUNDING, rows, team)
    parallel_for(
        round_piece, team, pieces,
        (x, matrix[ORDER], scratch, rows, inputs, groups, matrix[SHARED], matrix[SUMMED], matrix[SUM_FORM], dtype,
         size),
    )  # fmt: skip
    pairs = -(-outputs // (PANELS * PANEL))
    pieces = pieces_of(matrix[BYTES] * reads_worth(rows, _EVEN), pairs, team)
    arguments = (matrix[PANELS_AT], matrix[ROW_SCALES], bias, out, scratch, rows, chunks, outputs, stride, out_dtype)
    parallel_for(code, team, pieces, arguments)


@serial_in_order
@allocates
def round_piece(
    piece: int, pieces: int, worker: int,
    x: int, order: int, scratch: int, rows: int, inputs: int, groups: int, shared: int, summed: int, sum_form: int,
    dtype: np.generic, size: int,
) -> None:  # fmt: skip
    """Round rows of x, those of one of `pieces`, to int8 [rows, groups * shared], followed by scales float32 [rows,
    groups], sums of every `summed` numbers [rows, groups * shared / summed] in the form `sum_form`, and `SPARED` bytes
    a row. With `EXACT`, numbers and sums are float32, and there are no scales. `size`: bytes of a number of x.

    NaN and infinities make the scale of their group, and so every result of their row, NaN or infinite.
    """
    first, last = rows * piece // pieces, rows * (piece + 1) // pieces
    if sum_form == EXACT:
        for row in range(first, last):
            _take_row(x + row * inputs * size, order, scratch, row, rows, inputs, groups * shared, summed, dtype)
        return
    rounded = array(pointer(scratch, np.int8(0)), (rows, groups, shared))
    scales = array(pointer(scratch + rows * groups * shared, np.float32(0)), (rows, groups))
    segments = shared // summed
    sums = array(pointer(scratch + rows * groups * (shared + 4), np.int32(0)), (rows, groups, segments))
    ordered = array(pointer(order, np.int64(0)), (inputs,))
    spared = array(pointer(scratch + rows * groups * (shared + 4 + 4 * segments), np.int32(0)), (rows, SPARED // 4))
    gathered = np.empty(GROUP, np.float32)
    for row in range(first, last):
        row_values = array(pointer(x + row * inputs * size, dtype), (inputs,))
        outlier = _index_of_largest(row_values, shared) if shared < GROUP else -1
        for group in range(groups):
            begin = group * shared
            count, numbers = max(0, min(shared, inputs - begin)), rounded[row, group]
            if order == 0 and not begin <= outlier < begin + shared:
                values = array(pointer(x + (row * inputs + begin) * size, dtype), (shared,))
                scale, total = _round_group(values, numbers, count)
            else:
                for index in range(count):
                    column = begin + index if order == 0 else ordered[begin + index]
                    gathered[index] = widen(row_values[column])
                    if column == outlier:
                        spared[row, 0], spared[row, 1] = begin + index, bits_of(gathered[index])
                        gathered[index] = np.float32(0)
                scale, total = _round_group(gathered, numbers, count)
            scales[row, group] = scale
            for segment in range(segments):
                if segments > 1:
                    total = np.int32(0)
                    for index in range(segment * summed, (segment + 1) * summed):
                        total += numbers[index]
                if sum_form > 0:
                    sums[row, group, segment] = -sum_form * total
                else:
                    segment_sum = np.float32(total) * (scale if sum_form == _SCALED else np.float32(1))
                    sums[row, group, segment] = bits_of(segment_sum)


@inline
def _take_row(
    x: int, order: int, scratch: int, row: int, rows: int, inputs: int, width: int, summed: int, dtype: np.generic
) -> None:
    """Write the row of x at that address as row `row` in float32, and sums of every `summed` numbers."""
    values, numbers = array(pointer(x, dtype), (inputs,)), array(pointer(scratch, np.float32(0)), (rows, width))
    ordered, segments = array(pointer(order, np.int64(0)), (inputs,)), width // summed
    sums = array(pointer(scratch + rows * width * 4, np.float32(0)), (rows, segments))
    for segment in range(segments):
        total = np.float32(0)
        for index in range(segment * summed, (segment + 1) * summed):
            number = np.float32(0)
            if index < inputs:
                number = widen(values[index] if order == 0 else values[ordered[index]])
            numbers[row, index] = number
            total += number
        sums[row, segment] = total


@inline
def _index_of_largest(values: Any, at_once: int) -> int:
    """The index of the first number of the largest magnitude. NaN is larger than all."""
    largest, position = np.int32(-1), 0
    for begin in range(0, len(values), at_once):
        end, block_largest = min(begin + at_once, len(values)), np.int32(0)
        for index in range(begin, end):
            block_largest = max(block_largest, bits_of(widen(values[index])) & _MAGNITUDE)
        if block_largest > largest:
            largest, position = block_largest, begin
    while bits_of(widen(values[position])) & _MAGNITUDE != largest:
        position += 1
    return position


@inline
def _round_group(values: Any, numbers: Any, count: int) -> tuple[np.float32, np.int32]:
    """Round the `count` numbers of a group, and fill it up with 0. Returns (scale, sum of the rounded numbers)."""
    largest = np.int32(0)
    for index in range(count):  # as bits, which order like the numbers; floats would be compared one by one
        largest = max(largest, bits_of(widen(values[index])) & _MAGNITUDE)
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


def _make_piece(form: PanelForm, narrow: bool) -> Any:
    """Make the function that computes the outputs of pairs of panels, those of one of `pieces`, for all rows."""
    made_for, smallest, streamed, tile, spread = _tiles_of(form, narrow)
    bits, summed, spreads = form.bits, form.summed, form.bits == 6 and SPREAD > 0
    chunk, chunk_bytes, exact = form.chunk, form.chunk_bytes, form.exact
    x_bytes, scales_bytes, sums_bytes = form.row_bytes

    def multiply_piece(
        piece: int, pieces: int, worker: int,
        panels: int, row_scales: int, bias: int, out: int, scratch: int, rows: int, chunks: int, outputs: int,
        stride: int, dtype: np.generic,
    ) -> None:  # fmt: skip
        pairs = -(-outputs // (PANELS * PANEL))
        first, last = pairs * piece // pieces, pairs * (piece + 1) // pieces
        panel, last_panel = chunks * chunk_bytes, -(-outputs // PANEL) - 1
        # `UNIT` is a constant: where it is False, no code for the unit is compiled, which LLVM would refuse
        by_unit = UNIT and rows >= matrix_unit.ROWS and not exact
        tile_rows = matrix_unit.ROWS if by_unit else MOST
        size, turns = size_of(dtype), -(-rows // tile_rows)
        padded_scales, padded_bias = room(_WIDTH, np.float32(0)), room(_WIDTH, np.float32(0))
        edge = room(_TILE, dtype)
        spread_once = bits < 8 if by_unit else spreads and turns >= SPREAD  # each turn then has three rows or more
        spread_memory = np.empty(PANELS * PANEL * chunks * chunk + LINE if spread_once else 1, np.uint8)
        numbers_at = -(-spread_memory.ctypes.data // LINE) * LINE if spread_once else 0
        at_once = 1 if rows <= streamed or 0 < smallest <= rows else PANELS
        if by_unit:
            matrix_unit.configure_unit(tile_rows, tile_rows, summed)
        for index in range(PANELS * first, min(PANELS * last, last_panel + 1), at_once):
            begin, weights = index * PANEL, panels + index * panel
            step = (min(index + 1, last_panel) - index) * panel if at_once > 1 else panel
            scale_row, bias_row = row_scales + begin * 4 if row_scales != 0 else 0, bias + begin * 4 if bias != 0 else 0
            width = min(at_once * PANEL, outputs - begin)
            whole = width == at_once * PANEL
            if not whole:
                scale_row, bias_row = _padded(scale_row, padded_scales, width), _padded(bias_row, padded_bias, width)
            if spread_once:
                spread(weights, step, chunks, numbers_at)
            for turn in range(turns):
                row, end = _rows_of(turn, turns, rows, tile_rows, smallest if at_once == 1 else 1)
                numbers = scratch + row * chunks * x_bytes
                scales = scratch + chunks * (rows * x_bytes + row * scales_bytes)
                sums = scratch + chunks * (rows * (x_bytes + scales_bytes) + row * sums_bytes)
                spared = scratch + chunks * rows * (x_bytes + scales_bytes + sums_bytes) + row * SPARED
                target, across = out + (row * stride + begin) * size, stride * size
                if not whole:
                    target, across = edge.ctypes.data, at_once * PANEL * size
                tile(
                    end - row, at_once, numbers, scales, sums, weights, step, chunks, turn, turns, numbers_at,
                    scale_row, bias_row, target, across, spared, dtype,
                )  # fmt: skip
                for lone_row in range(0 if whole else end - row):
                    results = array(pointer(out + ((row + lone_row) * stride + begin) * size, dtype), (width,))
                    for lane in range(width):
                        results[lane] = edge[lone_row * at_once * PANEL + lane]
        if by_unit:
            matrix_unit.release_unit()
        keep(spread_memory)

    multiply_piece.made_for = made_for  # type: ignore[attr-defined]
    return serial_in_order(allocates(multiply_piece))


def _tiles_of(form: PanelForm, narrow: bool) -> tuple[str, int, int, Any, Any]:
    """(a text for `made_for`; the fewest rows that are multiplied by one panel at a time, or 0; the most rows for which
    panels are read as one stream; the tile; the function that unpacks numbers)"""
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
def _rows_of(turn: int, turns: int, rows: int, tile_rows: int, smallest: int) -> tuple[int, int]:
    """The rows [row, end) of one of `turns`, at least `smallest`: some are computed twice if need be."""
    row, end = rows * turn // turns, rows * (turn + 1) // turns
    if UNIT and tile_rows == matrix_unit.ROWS:
        smallest = tile_rows
    if end - row < smallest:
        end = max(end, smallest)
        row = end - smallest
    return row, end


@inline
def _padded(source: int, target: Any, count: int) -> int:
    """The address of a copy, with room for whole vectors, of `count` float32; 0 if `source` is 0."""
    if source == 0:
        return 0
    values = array(pointer(source, np.float32(0)), (count,))
    for index in range(count):
        target[index] = values[index]
    address: int = target.ctypes.data
    return address
