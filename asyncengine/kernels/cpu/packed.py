"""x W^T with a packed weight: panels of thirty-two outputs, read from memory once, in the order they lie there.

The innermost part, a tile, is up to twelve rows of x by one panel: all its sums stay in registers, a vector holds
sixteen outputs, and each number (of bfloat16: pair) of x is spread over a vector (Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008). Memory is asked for ahead, evenly over the tiles, so that arithmetic
and reading overlap: with a few dozen rows both take about as long. Every sum is made in one order, input by input: a
row's result depends neither on the rows beside it nor on the number of threads.

Memory: [outputs / 32 (rounded up), inputs / step, 2, 16, step], where `step` is 2 for bfloat16 and 1 for float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.calls import parallel_for, team_kernel
from asyncengine.kernels.cpu.gather import copy_columns
from asyncengine.kernels.cpu.intrinsics import INT64, TAG, emitted
from asyncengine.kernels.cpu.jit import array, inline, pointer, serial, serial_in_order, tag_of, with_gil
from asyncengine.kernels.cpu.matrix_unit import STEP, multiply_by_unit
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of, reads_worth
from asyncengine.kernels.cpu.vectors import FLOATS, LANES, LINE, LONG, WIDE, WORD, WORDS, at, cpu_has, load
from asyncengine.kernels.cpu.widened import PANELS, multiply_widened

_VECTORS = 2
WIDTH = _VECTORS * LANES
"""Outputs of a panel."""
_STEPS = {torch.bfloat16: 2, torch.float32: 1}
SIZES = (1, 2, 3, 4, 6, 8, 12) if WIDE else (1, 2, 4)
"""Rows of x in a tile: as many as their sums have registers for. Other numbers of rows use tiles that overlap.
AVX2 and NEON have registers for equally many numbers, and half of them hold the sums of four rows."""
_MOST = SIZES[-1]
_NARROW = WIDTH // 8
"""Vectors of eight in a panel."""
_PAIRED = not WIDE
"""One row has two panels at a time."""
MANY = 21
"""Rows from which on products go through widened blocks, where there are vectors of eight."""
_STRETCH = 64
"""Words of x that are widened at a time, for tiles that have no registers left for it: they stay in the first cache."""
_AHEAD = 4096
"""Bytes that a panel is prefetched before it is read, where no other panel is read meanwhile."""
_BLOCK = 2**19
"""Bytes of panels that are done for all rows before the next, if there are many: what stays in the second-level cache.
"""
_EVEN = 16
"""Rows whose arithmetic takes as long as reading a panel."""
_AT_ONCE = 2**14
"""Lines of memory up to which rows are read with the interpreter's lock kept: some hundred microseconds."""
_NEAR = 2**18
"""Bytes of x up to which one panel at a time is done for all rows: both stay in the second-level cache."""


def why_not_packed(dtype: torch.dtype) -> str | None:
    """The reason why products of this type are left to oneDNN or torch, with the settings that avoid it; None: weights
    are packed here.

    Every 64-bit ARM CPU has what panels need, and x86 has it with AVX2. bfloat16 goes through the matrix unit where
    there is one (`matrix_unit`). Where no instruction takes pairs of bfloat16 they are widened as they are read; torch
    computes them number by number without AVX-512, and with it oneDNN imitates the instruction.
    """
    if not (cpu_has("avx2", "fma") or cpu_has("neon")):
        return 'this CPU has no AVX2 (quantization="int8" does without)'
    return None if dtype in _STEPS else f"none are packed in {str(dtype).removeprefix('torch.')}"


def packing_pays(dtype: torch.dtype) -> bool:
    """Whether weights of this type are packed."""
    return why_not_packed(dtype) is None


def packing_fits(dtype: torch.dtype, inputs: int) -> bool:
    """True if a weight [any number of outputs, inputs] can be packed."""
    return dtype in _STEPS and inputs % _STEPS[dtype] == 0


def empty_panels(
    outputs: int, inputs: int, dtype: torch.dtype, empty: Callable[..., torch.Tensor] = torch.empty
) -> torch.Tensor:
    """Memory for a weight [outputs, inputs] that `packing_fits`, to be filled by `pack_rows`; no row of the last panel
    that is beyond them is ever read into a result."""
    step = _STEPS[dtype]
    return empty((-(-outputs // WIDTH), inputs // step, _VECTORS, LANES, step), dtype=dtype)


def pack_rows(weight: torch.Tensor, panels: torch.Tensor, first: int) -> None:
    """Put weight [n, inputs], of any float dtype, as rows `first` to `first + n` of the packed matrix."""
    steps, step = panels.shape[1], panels.shape[-1]
    words = weight.to(panels.dtype).contiguous().view(-1).view(torch.int32).view(-1, steps)
    packed = panels.view(len(panels), steps, WIDTH * step).view(torch.int32)
    copied, last = 0, first + len(words)
    while first < last:
        panel, lane = divmod(first, WIDTH)
        if lane == 0 and last - first >= WIDTH:
            count = (last - first) // WIDTH * WIDTH
            source = words[copied : copied + count].view(-1, WIDTH, steps)
            packed[panel : panel + len(source)] = source.transpose(1, 2)
        else:
            count = min(WIDTH - lane, last - first)
            packed[panel, :, lane : lane + count] = words[copied : copied + count].T
        first, copied = first + count, copied + count


def gemm(x: torch.Tensor, panels: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """out = x W^T + bias; x [..., inputs], `out` [..., outputs] float32 or of x's type.

    `out` may be columns of a wider matrix: its rows are `out.stride(-2)` apart, and contiguous each. `panels`
    is the weight from `pack_rows`, `bias` float32 [outputs]. Raises `ValueError` if x is of another type or
    width than the weight.
    """
    x = x.contiguous()
    inputs, outputs = x.shape[-1], out.shape[-1]
    if x.dtype != panels.dtype or inputs != panels.shape[1] * panels.shape[-1]:
        raise ValueError(
            f"x is {x.dtype} of {inputs}, the weight {panels.dtype} of {panels.shape[1] * panels.shape[-1]}"
        )
    rows = x.numel() // inputs
    if rows == 0:
        return
    size, across = inputs * x.element_size(), (out.stride(-2) if out.dim() > 1 else outputs) * out.element_size()
    whole, rest = divmod(outputs, WIDTH)
    if whole:
        multiply(
            x.data_ptr(), panels.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), across, rows, size,
            whole, tag_of(x.dtype), out.element_size(), use_team(),
        )  # fmt: skip
    if rest:
        first = outputs - rest
        _multiply_rest(x, panels[whole:], out[..., first:], across, None if bias is None else bias[first:])


def _multiply_rest(
    x: torch.Tensor, panel: torch.Tensor, out: torch.Tensor, across: int, bias: torch.Tensor | None
) -> None:
    """The last outputs, which fill no panel: a whole panel is multiplied into a buffer, and copied from there."""
    columns, size = out.shape[-1], out.element_size()
    products = out.new_empty((*x.shape[:-1], WIDTH))
    if bias is not None:
        whole = bias.new_empty(WIDTH)
        copy_columns(bias.data_ptr(), whole.data_ptr(), 0, 0, 0, 1, 1, 2 * columns, 0)
        bias = whole
    gemm(x, panel, products, bias)
    rows = products.numel() // WIDTH
    copy_columns(products.data_ptr(), out.data_ptr(), WIDTH * size, 0, across, rows, 1, columns * size // 2, 0)


def read_rows(ids: torch.Tensor, panels: torch.Tensor, out: torch.Tensor) -> None:
    """out [..., inputs] = rows `ids` (int64, contiguous, in range) of the weight."""
    steps = panels.shape[1]
    few = ids.numel() * steps <= _AT_ONCE
    read, team = (_read_few_rows, 0) if few else (_read_rows, use_team())
    read(ids.data_ptr(), panels.data_ptr(), out.data_ptr(), ids.numel(), steps, team)


@inline
def tiles_for(rows: int) -> tuple[int, int]:
    """(rows of a tile, tiles) for `rows` rows of x: the fewest tiles, then the smallest."""
    tiles = (rows + _MOST - 1) // _MOST
    while True:
        for size in SIZES:
            if size <= rows <= size * tiles:
                return size, tiles
        tiles += 1


@inline
def _panels_at_once(rows: int, size: int) -> int:
    """Panels that are done for all rows of `size` bytes before the next."""
    if _PAIRED and rows >= MANY:
        return PANELS
    return 1 if rows * size <= _NEAR else max(1, _BLOCK // (size * WIDTH))


@serial_in_order
def multiply(
    x: int, panels: int, bias: int, out: int, across: int, rows: int, size: int, count: int, dtype: np.generic,
    out_size: int, team: int,
) -> None:  # fmt: skip
    """`count` panels for `rows` rows of x. `across` is bytes from a row of `out` to the next, `out_size` those of a
    number there: 4, or as many as x's have."""
    most = -(-count // _panels_at_once(rows, size))
    parallel_for(
        multiply_part, team, pieces_of(count * WIDTH * size * reads_worth(rows, _EVEN), most, team),
        (x, panels, bias, out, across, rows, size, count, dtype, out_size),
    )  # fmt: skip


@serial_in_order
def multiply_part(
    piece: int, pieces: int, worker: int,
    x: int, panels: int, bias: int, out: int, across: int, rows: int, size: int, count: int, dtype: np.generic,
    out_size: int,
) -> None:  # fmt: skip
    """The panels of one of `pieces`, for all rows. `size` is the bytes of a row of x. The last tile is moved back."""
    first, last = count * piece // pieces, count * (piece + 1) // pieces
    block = _panels_at_once(rows, size)
    if vectors.UNIT and vectors.size_of(dtype) == 2 and size % STEP == 0:
        multiply_by_unit(x, panels, bias, out, across, rows, size, first, last, block, out_size)
        return
    if _PAIRED and rows >= MANY:
        multiply_widened(x, panels, bias, out, across, rows, size, first, last, dtype, out_size)
        return
    lines = size * WIDTH // (_VECTORS * LINE)
    tile, tiles = tiles_for(rows)
    if _PAIRED and rows == 1:
        for panel in range(first, last - 1, 2):
            target, weights = out + panel * WIDTH * out_size, panels + panel * size * WIDTH
            added = bias + panel * WIDTH * 4 if bias != 0 else 0
            _pair(1, x, size, weights, lines, weights + _AHEAD, _VECTORS * LINE, added, target, across, out_size, dtype)
        first = last - (last - first) % 2
    for begin in range(first, last, block):
        for turn in range(tiles):
            # moved back, the last tile computes some rows again, to the same bits
            row = min(turn * tile, rows - tile)
            share = _VECTORS * LINE
            if tiles > 1 and block == 1:  # each tile asks for its part of the next panel
                share //= tiles
                ahead = size * WIDTH + turn * lines * share
            else:
                ahead = _AHEAD if turn == 0 else 0
            for panel in range(begin, min(begin + block, last)):
                target = out + row * across + panel * WIDTH * out_size
                added = bias + panel * WIDTH * 4 if bias != 0 else 0
                weights, x_row = panels + panel * size * WIDTH, x + row * size
                _tile(tile, x_row, size, weights, lines, weights + ahead, share, added, target, across, out_size, dtype)


def _make_tile(sizes: Sequence[int], panels: int = 1) -> Any:
    """tile(rows, x, x_size, panel, lines, ahead, share, bias, out, across, out_size, dtype): out [rows, 32] = x W^T +
    bias, for as many rows as one of `sizes`.

    Addresses, bytes of a row of x and of `out` (`across`) and of a number there, and the panel's pairs of vectors. No
    bias: address 0. For each of those pairs, the next `share` bytes from `ahead` on are asked for. `panels`: that many
    at once, one behind the other.
    """

    @emitted(*[INT64] * 11, TAG)
    def tile(builder: Any, rows: Any, x: Any, x_size: Any, panel: Any, lines: Any, ahead: Any, share: Any, bias: Any,
             out: Any, across: Any, out_size: Any, dtype: Any) -> None:  # fmt: skip
        arguments = x, x_size, panel, lines, ahead, share, bias, out, across, out_size
        for size in sizes:
            write = write_tile if WIDE else write_narrow_tile if size * panels <= 2 else write_narrow_block
            with builder.if_then(builder.icmp_signed("==", rows, LONG(size))):
                write(builder, size, panels, dtype, *arguments)

    return tile


def write_tile(
    builder: Any, rows: int, panels: int, dtype: Any, x: Any, x_size: Any, panel: Any, lines: Any,
    ahead: Any, share: Any, bias: Any, out: Any, across: Any, out_size: Any,
) -> None:  # fmt: skip
    zero, accumulate = vectors.constant(FLOATS, 0.0), vectors.ACCUMULATE[dtype]
    cells = [(row, vector) for row in range(rows) for vector in range(_VECTORS)]
    sums = {cell: cgutils.alloca_once_value(builder, zero) for cell in cells}
    with cgutils.for_range(builder, lines) as loop:
        address = builder.add(panel, builder.mul(loop.index, LONG(_VECTORS * LINE)))
        starts = [builder.add(address, LONG(vector * LINE)) for vector in range(_VECTORS)]
        weights = [load(builder, start, WORDS) for start in starts]
        target = builder.add(ahead, builder.mul(loop.index, share))
        # a share of two lines of memory takes two prefetches; of a smaller one both are often of the same line
        for half in (target, builder.add(target, builder.lshr(share, LONG(1)))):
            vectors.prefetch(builder, half)
        for row in range(rows):
            word = load(builder, at(builder, x, x_size, row, builder.mul(loop.index, LONG(4))), WORD)
            values = vectors.splat(builder, word)
            for vector in range(_VECTORS):
                cell = sums[row, vector]
                builder.store(accumulate(builder, values, weights[vector], builder.load(cell)), cell)
    totals = {cell: builder.load(sums[cell]) for cell in cells}
    _store_tile(builder, totals, FLOATS, dtype, bias, out, across, out_size)


def write_narrow_tile(
    builder: Any, rows: int, panels: int, dtype: Any, x: Any, x_size: Any, panel: Any, lines: Any,
    ahead: Any, share: Any, bias: Any, out: Any, across: Any, out_size: Any,
) -> None:  # fmt: skip
    """For vectors of eight, of which there are sixteen: eight sums, and one vector of a panel at a time.
    A product waits for the one before it in its sum, so that fewer sums would leave the CPU idle."""
    eights, size = range(_NARROW * panels), builder.mul(lines, LONG(_VECTORS * LINE))
    cells = [(row, eight) for row in range(rows) for eight in eights]
    sums = {cell: cgutils.alloca_once_value(builder, vectors.constant(vectors.EIGHT_FLOATS, 0.0)) for cell in cells}
    with cgutils.for_range(builder, lines) as loop:
        begin = builder.mul(loop.index, LONG(_VECTORS * LINE))
        target = builder.add(ahead, builder.mul(loop.index, share))
        for index in range(panels):
            for half in (target, builder.add(target, builder.lshr(share, LONG(1)))):
                vectors.prefetch(builder, at(builder, half, size, index, LONG(0)))
        values = []
        for row in range(rows):
            word = load(builder, at(builder, x, x_size, row, builder.mul(loop.index, LONG(4))), WORD)
            values.append(vectors.sides(builder, vectors.splat(builder, word, 8), dtype))
        for eight in eights:
            index, column = divmod(eight, _NARROW)
            address = at(builder, panel, size, index, builder.add(begin, LONG(column * LINE // 2)))
            weights = vectors.sides(builder, load(builder, address, vectors.EIGHT_WORDS), dtype)
            for row in range(rows):
                total = builder.load(sums[row, eight])
                for value, weight in zip(values[row], weights, strict=True):
                    total = vectors.multiply_add(builder, value, weight, total)
                builder.store(total, sums[row, eight])
    totals = {cell: builder.load(sums[cell]) for cell in cells}
    _store_tile(builder, totals, vectors.EIGHT_FLOATS, dtype, bias, out, across, out_size)


def write_narrow_block(
    builder: Any, rows: int, panels: int, dtype: Any, x: Any, x_size: Any, panel: Any, lines: Any,
    ahead: Any, share: Any, bias: Any, out: Any, across: Any, out_size: Any,
) -> None:  # fmt: skip
    """The same for four rows: sixteen outputs, one half of a panel, after the other (six rows, as BLIS has it, Van Zee
    and van de Geijn 2015, leave no registers to widen bfloat16). A line of memory belongs to one half: none is read
    twice. bfloat16 in x is widened a stretch at a time, for both halves: then it is spread as it comes from memory.
    """
    zero, halves = vectors.constant(FLOATS, 0.0), len(vectors.sides(builder, WORD(0), dtype))
    cells = [(row, vector) for row in range(rows) for vector in range(_VECTORS)]
    sums = {cell: cgutils.alloca_once_value(builder, zero) for cell in cells}
    room = ir.ArrayType(ir.FloatType(), rows * halves * _STRETCH)
    wide = builder.ptrtoint(cgutils.alloca_once(builder, room), LONG)
    stretches = builder.udiv(builder.add(lines, LONG(_STRETCH - 1)), LONG(_STRETCH))
    with cgutils.for_range(builder, stretches) as outer:
        first = builder.mul(outer.index, LONG(_STRETCH))
        remaining = builder.sub(lines, first)
        count = builder.select(builder.icmp_signed("<", remaining, LONG(_STRETCH)), remaining, LONG(_STRETCH))
        for row in range(rows if halves > 1 else 0):
            source = at(builder, x, x_size, row, builder.mul(first, LONG(4)))
            runs = [builder.add(wide, LONG((row * halves + half) * _STRETCH * 4)) for half in range(halves)]
            _widen(builder, dtype, source, count, runs)
        for vector in range(_VECTORS):
            with cgutils.for_range(builder, count) as loop:
                line = builder.add(first, loop.index)
                offset = builder.add(builder.mul(line, LONG(_VECTORS * LINE)), LONG(vector * LINE))
                words = load(builder, builder.add(panel, offset), WORDS)
                target = builder.add(ahead, builder.mul(line, share))
                vectors.prefetch(builder, builder.add(target, builder.lshr(share, LONG(1))) if vector else target)
                for half, weights in enumerate(vectors.sides(builder, words, dtype)):
                    for row in range(rows):
                        if halves > 1:
                            run = builder.add(wide, LONG((row * halves + half) * _STRETCH * 4))
                            source = builder.add(run, builder.mul(loop.index, LONG(4)))
                        else:
                            source = at(builder, x, x_size, row, builder.mul(line, LONG(4)))
                        value = vectors.splat(builder, load(builder, source, ir.FloatType()))
                        total = vectors.multiply_add(builder, value, weights, builder.load(sums[row, vector]))
                        builder.store(total, sums[row, vector])
    _store_tile(builder, {cell: builder.load(sums[cell]) for cell in cells}, FLOATS, dtype, bias, out, across, out_size)


def _widen(builder: Any, dtype: Any, source: Any, count: Any, runs: list[Any]) -> None:
    """`count` words from `source` on as float32: the first number of each in the first of `runs`, and so on."""
    whole = builder.lshr(count, LONG(4))
    for times, start, word_type, size in (
        (whole, LONG(0), WORDS, LINE),
        (builder.sub(count, builder.shl(whole, LONG(4))), builder.shl(whole, LONG(6)), WORD, 4),
    ):
        with cgutils.for_range(builder, times) as loop:
            offset = builder.add(start, builder.mul(loop.index, LONG(size)))
            words = load(builder, builder.add(source, offset), word_type)
            for side, run in zip(vectors.sides(builder, words, dtype), runs, strict=True):
                vectors.store(builder, side, builder.add(run, offset))


def _store_tile(
    builder: Any, totals: dict[tuple[int, int], Any], vector_type: Any, dtype: Any, bias: Any, out: Any, across: Any,
    out_size: Any,
) -> None:  # fmt: skip
    """Results by (row, vector), each a vector of the type `vector_type`, with the bias."""
    cells = {cell: cgutils.alloca_once_value(builder, value) for cell, value in totals.items()}
    with builder.if_then(builder.icmp_signed("!=", bias, LONG(0))):
        for (_, vector), cell in cells.items():
            added = load(builder, builder.add(bias, LONG(vector * vector_type.count * 4)), vector_type)
            builder.store(builder.fadd(builder.load(cell), added), cell)

    def store(size: int) -> None:
        for (row, vector), cell in cells.items():
            target, value = at(builder, out, across, row, LONG(vector * vector_type.count * size)), builder.load(cell)
            vectors.store(builder, vectors.narrow(builder, value) if size == 2 else value, target)

    if dtype != numba.types.uint16:
        store(4)
        return
    # asked for while the program runs: all tiles twice, once for each type, would take a compiler twice as long
    with builder.if_else(builder.icmp_signed("==", out_size, LONG(2))) as (narrow, wide):
        with narrow:
            store(2)
        with wide:
            store(4)


_tile, _pair = _make_tile(SIZES), _make_tile((1,), 2)


@team_kernel(lambda count, steps: (count, count * steps * LINE))
@serial
def _read_rows(first: int, last: int, ids: int, panels: int, out: int, count: int, steps: int) -> None:
    """A step of a row is four bytes, whatever the type."""
    row_ids = array(pointer(ids, np.int64(0)), (last,))
    for index in range(first, last):
        panel, lane = row_ids[index] // WIDTH, row_ids[index] % WIDTH
        words = array(pointer(panels + panel * steps * WIDTH * 4, np.uint32(0)), (steps, WIDTH))
        result = array(pointer(out + index * steps * 4, np.uint32(0)), (steps,))
        for column in range(steps):
            result[column] = words[column, lane]


_read_few_rows = with_gil(_read_rows)
