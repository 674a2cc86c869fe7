"""Products by weights in 4 and 8 bits, dequantized while they are read (as in the kernels of GPTQ and AWQ).

A chunk is `width` bytes of every output, and a byte belongs to one group of inputs, or to two:

    8 bits   byte j of chunk c is input c * width + j, of group c
    4 bits   its lower half is input 2 c * width + j, of group 2 c; its upper half input (2 c + 1) * width + j

so that one scale serves each row of a tile, and the tile of a chunk is one piece of memory. Few rows of x are
multiplied without tensor cores, more with them; for many, slices of the weight are dequantized for torch's product.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

FEW, SOME = 4, 64
"""Rows of x up to which a product is made without tensor cores, and up to which without a dequantized copy."""
_SLICE = 2**24
"""Numbers of a weight that are dequantized at once: 32 MiB, most of which stay in a second-level cache."""
_NARROW, _TILE, _WARPS = 8, 4096, 4
"""Shape of a program without tensor cores: half of its outputs, bytes that it takes of these at once, warps."""
_MANY = 16384
"""Outputs of a matrix below which such a program makes half as many, so that there are enough of them."""
_WIDE, _DEPTH = 64, 3
"""Shape of a program with tensor cores: outputs, tiles that are read ahead."""
_PROGRAMS = 528
"""Programs that fill a GPU: four for each of 132 multiprocessors."""
_BIG = 0x4B000000
"""Bits of the float 2^23, whose lowest are a whole number: the cheapest way to a float. A kernel is given them, since a
constant would be put into a register for each number again."""


class Planes(NamedTuple):
    """Tensors of a matrix [outputs, inputs], in memory of the device; None: it has none such.

    Scales and minima are [groups, outputs], or [blocks, outputs] of numbers that `steps` [groups, outputs] multiply.
    """

    numbers: torch.Tensor
    """uint8 [chunks, outputs, width]"""
    row_scales: torch.Tensor
    """float32 [outputs]"""
    scales: torch.Tensor | None = None
    steps: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    minimum_steps: torch.Tensor | None = None
    table: torch.Tensor | None = None
    """float32 [16]: what each number stands for."""


class ChunkedMatrix(NamedTuple):
    """w = row_scale * (scale * (number - zero) - minimum)."""

    planes: Planes
    inputs: int
    bits: int
    block: int
    """Inputs of a block; 0: there are none."""
    middle: int
    """The zero of all groups, where there are no `zeros`."""


@triton.jit
def _values(planes, packed, group, output, outputs, big, half: tl.constexpr, bits: tl.constexpr, middle: tl.constexpr):
    """float32: the numbers of one half of each byte, or of all of it, less the zero of their group; without a table,
    those of an upper half are 16 times too large. Groups and outputs have a dimension less, the last."""
    number = packed.to(tl.int32)
    zero = middle + 0.0
    if planes.zeros is not None:
        zero = tl.expand_dims(tl.load(planes.zeros + (group * outputs + output)).to(tl.float32), -1)
    if planes.table is not None:
        found = tl.load(planes.table + ((number >> (4 * half)) & 15))
    elif bits == 8:
        found = (number | big).to(tl.float32, bitcast=True) - (zero + 8388608.0)
    elif half == 0:
        found = ((number & 15) | big).to(tl.float32, bitcast=True) - (zero + 8388608.0)
    else:
        found = ((number & 240) | big).to(tl.float32, bitcast=True) - (zero * 16.0 + 8388608.0)
    return found


@triton.jit
def _of_group(values, steps, group, output, outputs, width: tl.constexpr, block: tl.constexpr):
    """float32: the scales or minima of groups."""
    if steps is None:
        found = tl.load(values + (group * outputs + output)).to(tl.float32)
    else:
        found = tl.load(values + (group * width // block * outputs + output)).to(tl.float32)
        found *= tl.load(steps + (group * outputs + output)).to(tl.float32)
    return found


@triton.jit
def _scaled(
    planes, part, whole, group, output, outputs, half: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Scale * part - minimum * whole, of what `_values` gives; both have a last dimension that groups have not."""
    if half == 1 and planes.table is None:
        part *= 0.0625
    if planes.scales is not None:
        scale = _of_group(planes.scales, planes.steps, group, output, outputs, width, block)
        part *= tl.expand_dims(scale, -1)
    if planes.minima is not None:
        minimum = _of_group(planes.minima, planes.minimum_steps, group, output, outputs, width, block)
        part -= whole * tl.expand_dims(minimum, -1)
    return part


@triton.jit
def _inputs(x, place, inputs, even: tl.constexpr):
    """Inputs at `place`; 0 beyond the last, which cannot be if `even`."""
    return tl.load(x + place) if even else tl.load(x + place, mask=place < inputs, other=0.0)


@triton.jit
def _sums(
    planes, packed, own, group, output, outputs, big, half: tl.constexpr, bits: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, middle: tl.constexpr,
):  # fmt: skip
    """float32 [chunks, outputs, 1]: of each group, the product with the inputs `own` [chunks, outputs, width]."""
    number = _values(planes, packed, group, output, outputs, big, half, bits, middle)
    part, whole = tl.sum(number * own, axis=2)[:, :, None], tl.sum(own, axis=2)[:, :, None]
    return _scaled(planes, part, whole, group, output, outputs, half, width, block)


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    planes, x, out, bias, x_stride, out_stride, rows, inputs, outputs, chunks, big, even: tl.constexpr,
    most: tl.constexpr, narrow: tl.constexpr, tile: tl.constexpr, bits: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, middle: tl.constexpr,
):  # fmt: skip
    """Twice `narrow` outputs of up to `most` rows, by sums over each group: the scale is multiplied once. What is
    beyond the last row or output is the last again, and is not stored."""
    lane = tl.arange(0, width)[None, None, :]
    column = tl.arange(0, 2 * most)[None, None, :]
    total = tl.zeros([tile, narrow, 2 * most], tl.float32)
    for begin in range(0, chunks, tile):
        place = begin + tl.arange(0, tile)[:, None]
        chunk = tl.minimum(place, chunks - 1)
        for part in tl.static_range(2):  # what both load is loaded once
            output = (2 * tl.program_id(0) + part) * narrow + tl.arange(0, narrow)[None, :]
            output = tl.minimum(output, outputs - 1)
            packed = tl.load(planes.numbers + ((chunk * outputs + output).to(tl.int64)[:, :, None] * width + lane))
            for half in tl.static_range(8 // bits):
                group = chunk * (8 // bits) + half
                # all outputs load the same inputs, so that these lie in registers as the numbers do
                inner = ((place * (8 // bits) + half) * width + tl.zeros([1, narrow], tl.int32))[:, :, None] + lane
                for each in tl.static_range(most):
                    own = _inputs(x + tl.minimum(each, rows - 1).to(tl.int64) * x_stride, inner, inputs, even)
                    own = own.to(tl.float32)
                    found = _sums(planes, packed, own, group, output, outputs, big, half, bits, width, block, middle)
                    total += tl.where(column == part * most + each, found, 0.0)
    column = tl.arange(0, 2 * most)[None, :]
    output = (2 * tl.program_id(0) + column // most) * narrow + tl.arange(0, narrow)[:, None]
    row = column % most
    found = tl.sum(total, axis=0) * tl.load(planes.row_scales + output, mask=output < outputs, other=0.0)
    if bias is not None:
        found += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    at = row.to(tl.int64) * out_stride + output
    tl.store(out + at, found.to(out.dtype.element_ty), mask=(output < outputs) & (row < rows))


@triton.jit(do_not_specialize=["rows"])
def _some_rows(
    planes, x, out, x_stride, rows, inputs, outputs, chunks, big, each, even: tl.constexpr, most: tl.constexpr,
    wide: tl.constexpr, tile: tl.constexpr, bits: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    middle: tl.constexpr,
):  # fmt: skip
    """float32 sums over `each` chunks, [parts, rows, outputs], of weights that are rounded to x's dtype."""
    real = tl.program_id(0) * wide + tl.arange(0, wide)
    output = tl.minimum(real, outputs - 1)[:, None]
    lane = tl.arange(0, width)[None, None, :]
    inner = tl.arange(0, tile * width)
    row = tl.arange(0, most)[None, :]
    given = x + tl.minimum(row, rows - 1) * x_stride
    total = tl.zeros([wide, most], tl.float32)
    first = tl.program_id(1) * each
    for begin in range(first, tl.minimum(first + each, chunks), tile):
        chunk = tl.minimum(begin + tl.arange(0, tile)[None, :], chunks - 1)
        packed = tl.load(planes.numbers + ((chunk * outputs + output).to(tl.int64)[:, :, None] * width + lane))
        for half in tl.static_range(8 // bits):
            group = chunk * (8 // bits) + half
            number = _values(planes, packed, group, output, outputs, big, half, bits, middle)
            number = _scaled(planes, number, 1.0, group, output, outputs, half, width, block).to(x.dtype.element_ty)
            place = ((begin + inner // width) * (8 // bits) + half) * width + inner % width
            own = _inputs(given, place[:, None], inputs, even)
            total += tl.dot(tl.reshape(number, [wide, tile * width]), own)
    total *= tl.load(planes.row_scales + output)
    at = (tl.program_id(1) * rows + row).to(tl.int64) * outputs + real[:, None]
    tl.store(out + at, total, mask=(real[:, None] < outputs) & (row < rows))


@triton.jit(do_not_specialize=["rows"])
def _join(parts, out, bias, out_stride, rows, outputs, count: tl.constexpr, wide: tl.constexpr):
    """Sums of parts, in their order, in the type of `out`."""
    output = tl.program_id(0) * wide + tl.arange(0, wide)
    row = tl.program_id(1)
    there = output < outputs
    found = tl.zeros([wide], tl.float32)
    for part in tl.static_range(count):
        found += tl.load(parts + ((part * rows + row).to(tl.int64) * outputs + output), mask=there, other=0.0)
    if bias is not None:
        found += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    tl.store(out + (row.to(tl.int64) * out_stride + output), found.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "first"])
def _dequantize(
    planes, ids, out, first, rows, inputs, outputs, chunks, big, narrow: tl.constexpr, tile: tl.constexpr,
    bits: tl.constexpr, width: tl.constexpr, block: tl.constexpr, middle: tl.constexpr,
):  # fmt: skip
    """Rows of the matrix: from `first` on, or those of `ids`."""
    row = (tl.program_id(0) * narrow + tl.arange(0, narrow))[None, :]
    output = tl.minimum(row, rows - 1) + first
    if ids is not None:
        output = tl.load(ids + tl.minimum(row, rows - 1))
    real = (tl.program_id(1) * tile + tl.arange(0, tile))[:, None]
    chunk = tl.minimum(real, chunks - 1)
    lane = tl.arange(0, width)[None, None, :]
    packed = tl.load(planes.numbers + ((chunk * outputs + output).to(tl.int64)[:, :, None] * width + lane))
    for half in tl.static_range(8 // bits):
        group = chunk * (8 // bits) + half
        number = _values(planes, packed, group, output, outputs, big, half, bits, middle)
        number = _scaled(planes, number, 1.0, group, output, outputs, half, width, block)
        number *= tl.load(planes.row_scales + output)[:, :, None]
        place = ((real * (8 // bits) + half) * width)[:, :, None] + lane
        at = row.to(tl.int64)[:, :, None] * inputs + place
        tl.store(out + at, number.to(out.dtype.element_ty), mask=(row[:, :, None] < rows) & (place < inputs))


def read_rows(
    matrix: ChunkedMatrix, out: torch.Tensor, first: int = 0, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """`out` [n, inputs], contiguous, of any float dtype = rows [first, first + n), or the rows `ids` (int64 [n])."""
    planes, inputs, bits, block, middle = matrix
    chunks, outputs, width = planes.numbers.shape
    tile = max(1, _TILE // _NARROW // width)
    if len(out):
        _dequantize[triton.cdiv(len(out), _NARROW), triton.cdiv(chunks, tile)](
            planes, ids, out, first, len(out), inputs, outputs, chunks, _BIG, _NARROW, tile, bits, width, block, middle
        )
    return out


def multiply(
    x: torch.Tensor, matrix: ChunkedMatrix, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`out` [rows, outputs] = x W^T + bias. Both have neighbours along their last dimension; rows may lie apart.

    `out` may be float32 for x of another dtype where there are at most `SOME` rows.
    """
    planes, inputs, bits, block, middle = matrix
    rows, (chunks, outputs, width) = len(x), planes.numbers.shape
    if rows > SOME:
        return _many_rows(x, matrix, out, bias)
    if 0 < rows <= FEW:
        narrow = _NARROW if outputs >= _MANY else _NARROW // 2
        tile = max(1, _TILE // narrow // width)
        even = inputs % (8 // bits * width * tile) == 0
        _few_rows[(triton.cdiv(outputs, 2 * narrow),)](
            planes, x, out, bias, x.stride(0), out.stride(0), rows, inputs, outputs, chunks, _BIG, even,
            triton.next_power_of_2(rows), narrow, tile, bits, width, block, middle, num_warps=_WARPS,
        )  # fmt: skip
    elif rows:
        blocks, tile = triton.cdiv(outputs, _WIDE), max(1, 128 // width)
        tiles = triton.cdiv(chunks, tile)
        each = tile * triton.cdiv(tiles, max(1, min(8, tiles // 2, _PROGRAMS // blocks)))
        count = triton.cdiv(chunks, each)
        even = inputs % (8 // bits * width * tile) == 0
        parts = torch.empty((count, rows, outputs), dtype=torch.float32, device=x.device)
        _some_rows[blocks, count](
            planes, x, parts, x.stride(0), rows, inputs, outputs, chunks, _BIG, each, even,
            max(16, triton.next_power_of_2(rows)), _WIDE, tile, bits, width, block, middle, num_warps=4,
            num_stages=_DEPTH if rows <= 32 else 2,
        )  # fmt: skip
        _join[triton.cdiv(outputs, 1024), rows](parts, out, bias, out.stride(0), rows, outputs, count, 1024)
    return out


def _many_rows(x: torch.Tensor, matrix: ChunkedMatrix, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by torch, one slice of dequantized outputs after the other."""
    outputs = matrix.planes.numbers.shape[1]
    step = min(outputs, max(256, _SLICE // matrix.inputs // 256 * 256))
    memory = x.new_empty((step, matrix.inputs))
    for first in range(0, outputs, step):
        part = read_rows(matrix, memory[: min(step, outputs - first)], first)
        torch.mm(x, part.T, out=out[:, first : first + step])
    return out if bias is None else out.add_(bias)
