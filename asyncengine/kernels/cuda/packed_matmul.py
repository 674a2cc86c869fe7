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
"""Of a program without tensor cores: half of its outputs, bytes that it takes of these at once, warps."""
_WIDE, _DEPTH = 32, 4
"""Of a program with tensor cores: outputs, tiles that are read ahead."""
_PROGRAMS = 264
"""Programs that fill a GPU: two for each of 132 multiprocessors."""
_BIG = 0x4B000000
"""Bits of the float 2^23, whose lowest are a whole number: the cheapest way to a float. A kernel is given them, since a
constant would be put into a register for each number again."""


class PackedMatrix(NamedTuple):
    """A matrix [outputs, inputs] in memory of the device: w = row_scale * (scale * (number - zero) - minimum).

    Scales and minima are [groups, outputs], or [blocks, outputs] of numbers that `steps` [groups, outputs] multiply.
    """

    inputs: int
    bits: int
    block: int
    """Inputs of a block; 0: there are none."""
    middle: int
    """The zero of all groups, where there are no `zeros`."""
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


@triton.jit
def _numbers_of(packed, table, zero, big, half: tl.constexpr, bits: tl.constexpr):
    """float32: the numbers of one half of each byte, or of all of it, less `zero`; without a table, those of an upper
    half are 16 times too large."""
    number = packed.to(tl.int32)
    if table is not None:
        found = tl.load(table + ((number >> (4 * half)) & 15))
    elif bits == 8:
        found = (number | big).to(tl.float32, bitcast=True) - (zero + 8388608.0)
    elif half == 0:
        found = ((number & 15) | big).to(tl.float32, bitcast=True) - (zero + 8388608.0)
    else:
        found = ((number & 240) | big).to(tl.float32, bitcast=True) - (zero * 16.0 + 8388608.0)
    return found


@triton.jit
def _zeros_of(zeros, at, there, middle: tl.constexpr):
    """float32: what is taken off the numbers of groups."""
    if zeros is not None:
        found = tl.load(zeros + at, mask=there, other=0).to(tl.float32)
    else:
        found = tl.zeros(there.shape, tl.float32) + middle
    return found


@triton.jit
def _of_group(values, steps, group, output, there, outputs, width: tl.constexpr, block: tl.constexpr):
    """float32: the scales or minima of groups."""
    if steps is None:
        found = tl.load(values + group * outputs + output, mask=there, other=0.0).to(tl.float32)
    else:
        found = tl.load(values + group * width // block * outputs + output, mask=there, other=0.0).to(tl.float32)
        found *= tl.load(steps + group * outputs + output, mask=there, other=0).to(tl.float32)
    return found


@triton.jit
def _sums(
    packed, own, table, scales, steps, zeros, minima, minimum_steps, group, output, there, outputs, big,
    half: tl.constexpr, bits: tl.constexpr, width: tl.constexpr, block: tl.constexpr, middle: tl.constexpr,
):  # fmt: skip
    """float32 [chunks, outputs]: of each group, the product with the inputs `own` [chunks, outputs, width]."""
    zero = _zeros_of(zeros, group * outputs + output, there, middle)
    part = tl.sum(_numbers_of(packed, table, zero[:, :, None], big, half, bits) * own, axis=2)
    if half == 1 and table is None:
        part *= 0.0625
    if scales is not None:
        part *= _of_group(scales, steps, group, output, there, outputs, width, block)
    if minima is not None:
        part -= tl.sum(own, axis=2) * _of_group(minima, minimum_steps, group, output, there, outputs, width, block)
    return part


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, out, bias, numbers, row_scales, scales, steps, zeros, minima, minimum_steps, table, x_stride, out_stride, rows,
    inputs, outputs, chunks, big, most: tl.constexpr, narrow: tl.constexpr, tile: tl.constexpr, bits: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr, middle: tl.constexpr,
):  # fmt: skip
    """Twice `narrow` outputs of up to `most` rows, by sums over each group: the scale is multiplied once."""
    output = (2 * tl.program_id(0) * narrow + tl.arange(0, narrow))[None, :]
    other = output + narrow
    lane = tl.arange(0, width)[None, None, :]
    row = tl.arange(0, most)[None, None, :]
    total = tl.zeros([tile, narrow, most], tl.float32)
    other_total = tl.zeros([tile, narrow, most], tl.float32)
    for first in range(0, chunks, tile):
        chunk = (first + tl.arange(0, tile))[:, None]
        there = (chunk < chunks) & (output < outputs)
        other_there = (chunk < chunks) & (other < outputs)
        at = numbers + (chunk * outputs + output).to(tl.int64)[:, :, None] * width + lane
        packed = tl.load(at, mask=there[:, :, None], other=0)
        other_packed = tl.load(at + narrow * width, mask=other_there[:, :, None], other=0)
        for half in tl.static_range(8 // bits):
            group = chunk * (8 // bits) + half
            # all outputs load the same inputs, so that these lie in registers as the numbers do
            place = group[:, :, None] * width + lane + tl.zeros([1, narrow, 1], tl.int32)
            for each in tl.static_range(most):
                given = x + tl.minimum(each, rows - 1).to(tl.int64) * x_stride  # the last one again is not written
                own = tl.load(given + place, mask=place < inputs, other=0.0).to(tl.float32)
                part = _sums(
                    packed, own, table, scales, steps, zeros, minima, minimum_steps, group, output, there, outputs,
                    big, half, bits, width, block, middle,
                )  # fmt: skip
                total += tl.where(row == each, part[:, :, None], 0.0)
                part = _sums(
                    other_packed, own, table, scales, steps, zeros, minima, minimum_steps, group, other, other_there,
                    outputs, big, half, bits, width, block, middle,
                )  # fmt: skip
                other_total += tl.where(row == each, part[:, :, None], 0.0)
    first = 2 * tl.program_id(0) * narrow
    _write(total, out, bias, row_scales, first, out_stride, rows, outputs, most, narrow)
    _write(other_total, out, bias, row_scales, first + narrow, out_stride, rows, outputs, most, narrow)


@triton.jit
def _write(
    total, out, bias, row_scales, first, out_stride, rows, outputs, most: tl.constexpr, narrow: tl.constexpr
):  # fmt: skip
    """Outputs from `first` on, of sums [chunks, outputs, rows]."""
    found = tl.sum(total, axis=0)
    output = (first + tl.arange(0, narrow))[:, None]
    row = tl.arange(0, most)[None, :]
    found *= tl.load(row_scales + output, mask=output < outputs, other=0.0)
    if bias is not None:
        found += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    at = row.to(tl.int64) * out_stride + output
    tl.store(out + at, found.to(out.dtype.element_ty), mask=(output < outputs) & (row < rows))


@triton.jit(do_not_specialize=["rows"])
def _some_rows(
    x, out, numbers, row_scales, scales, steps, zeros, minima, minimum_steps, table, x_stride, rows, inputs, outputs,
    chunks, big, each, most: tl.constexpr, wide: tl.constexpr, bits: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, middle: tl.constexpr,
):  # fmt: skip
    """float32 sums over `each` chunks, [parts, rows, outputs]: numbers less zeros are exact in x's dtype."""
    output = (tl.program_id(0) * wide + tl.arange(0, wide))[:, None]
    there = output < outputs
    lane = tl.arange(0, width)
    row = tl.arange(0, most)[None, :]
    total = tl.zeros([wide, most], tl.float32)
    ones = tl.full([wide, width], 1.0, x.dtype.element_ty)
    begin = tl.program_id(1) * each
    for chunk in range(begin, tl.minimum(begin + each, chunks)):
        at = (chunk * outputs + output).to(tl.int64) * width + lane[None, :]
        packed = tl.load(numbers + at, mask=there, other=0)
        for half in tl.static_range(8 // bits):
            group = chunk * (8 // bits) + half
            zero = _zeros_of(zeros, group * outputs + output, there, middle)
            number = _numbers_of(packed, table, zero, big, half, bits)
            place = group * width + lane[:, None]
            own = tl.load(x + row * x_stride + place, mask=(place < inputs) & (row < rows), other=0.0)
            part = tl.dot(number.to(x.dtype.element_ty), own)
            if half == 1 and table is None:
                part *= 0.0625
            if scales is not None:
                part *= _of_group(scales, steps, group, output, there, outputs, width, block)
            if minima is not None:
                minimum = _of_group(minima, minimum_steps, group, output, there, outputs, width, block)
                part -= tl.dot(ones, own) * minimum
            total += part
    total *= tl.load(row_scales + output, mask=there, other=0.0)
    at = (tl.program_id(1) * rows + row).to(tl.int64) * outputs + output
    tl.store(out + at, total, mask=there & (row < rows))


@triton.jit(do_not_specialize=["rows"])
def _join(parts, out, bias, out_stride, rows, outputs, count: tl.constexpr, wide: tl.constexpr):
    """Sums of parts, in their order, in the type of `out`."""
    output = tl.program_id(0) * wide + tl.arange(0, wide)
    row = tl.program_id(1)
    there = output < outputs
    found = tl.zeros([wide], tl.float32)
    for part in tl.static_range(count):
        found += tl.load(parts + (part * rows + row).to(tl.int64) * outputs + output, mask=there, other=0.0)
    if bias is not None:
        found += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_stride + output, found.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _dequantize(
    ids, out, numbers, row_scales, scales, steps, zeros, minima, minimum_steps, table, first, rows, inputs, outputs,
    chunks, big, narrow: tl.constexpr, tile: tl.constexpr, bits: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, middle: tl.constexpr,
):  # fmt: skip
    """Rows of the matrix: from `first` on, or those of `ids`."""
    row = (tl.program_id(0) * narrow + tl.arange(0, narrow))[None, :]
    output = row + first
    if ids is not None:
        output = tl.load(ids + row, mask=row < rows, other=0)
    chunk = (tl.program_id(1) * tile + tl.arange(0, tile))[:, None]
    lane = tl.arange(0, width)[None, None, :]
    there = (chunk < chunks) & (row < rows)
    at = (chunk * outputs + output).to(tl.int64) * width
    packed = tl.load(numbers + at[:, :, None] + lane, mask=there[:, :, None], other=0)
    row_scale = tl.load(row_scales + output, mask=row < rows, other=0.0)
    for half in tl.static_range(8 // bits):
        group = chunk * (8 // bits) + half
        zero = _zeros_of(zeros, group * outputs + output, there, middle)
        number = _numbers_of(packed, table, zero[:, :, None], big, half, bits)
        if half == 1 and table is None:
            number *= 0.0625
        if scales is not None:
            number *= _of_group(scales, steps, group, output, there, outputs, width, block)[:, :, None]
        if minima is not None:
            number -= _of_group(minima, minimum_steps, group, output, there, outputs, width, block)[:, :, None]
        number *= row_scale[:, :, None]
        place = group[:, :, None] * width + lane
        target = out + row.to(tl.int64)[:, :, None] * inputs + place
        tl.store(target, number.to(out.dtype.element_ty), mask=there[:, :, None] & (place < inputs))


def read_rows(matrix: PackedMatrix, out: torch.Tensor, first: int = 0, ids: torch.Tensor | None = None) -> torch.Tensor:
    """`out` [n, inputs], contiguous, of any float dtype = rows [first, first + n), or the rows `ids` (int64 [n])."""
    inputs, bits, block, middle, *planes = matrix
    chunks, outputs, width = matrix.numbers.shape
    tile = max(1, _TILE // _NARROW // width)
    if len(out):
        _dequantize[triton.cdiv(len(out), _NARROW), triton.cdiv(chunks, tile)](
            ids, out, *planes, first, len(out), inputs, outputs, chunks, _BIG, _NARROW, tile, bits, width, block, middle
        )
    return out


def multiply(
    x: torch.Tensor, matrix: PackedMatrix, out: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`out` [rows, outputs] = x W^T + bias. Both have neighbours along their last dimension; rows may lie apart.

    `out` may be float32 for x of another dtype where there are at most `SOME` rows.
    """
    rows, (chunks, outputs, width) = len(x), matrix.numbers.shape
    inputs, bits, block, middle, *planes = matrix
    if rows > SOME:
        return _many_rows(x, matrix, out, bias)
    if 0 < rows <= FEW:
        _few_rows[(triton.cdiv(outputs, 2 * _NARROW),)](
            x, out, bias, *planes, x.stride(0), out.stride(0), rows, inputs, outputs, chunks, _BIG,
            triton.next_power_of_2(rows), _NARROW, max(1, _TILE // _NARROW // width), bits, width, block, middle,
            num_warps=_WARPS,
        )  # fmt: skip
    elif rows:
        blocks = triton.cdiv(outputs, _WIDE)
        each = triton.cdiv(chunks, max(1, min(8, chunks // 4, _PROGRAMS // blocks)))
        count = triton.cdiv(chunks, each)
        parts = torch.empty((count, rows, outputs), dtype=torch.float32, device=x.device)
        _some_rows[blocks, count](
            x, parts, *planes, x.stride(0), rows, inputs, outputs, chunks, _BIG, each,
            max(16, triton.next_power_of_2(rows)), _WIDE, bits, width, block, middle, num_warps=4, num_stages=_DEPTH,
        )  # fmt: skip
        _join[triton.cdiv(outputs, 1024), rows](parts, out, bias, out.stride(0), rows, outputs, count, 1024)
    return out


def _many_rows(x: torch.Tensor, matrix: PackedMatrix, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """By torch, one slice of dequantized outputs after the other."""
    outputs = matrix.numbers.shape[1]
    step = min(outputs, max(256, _SLICE // matrix.inputs // 256 * 256))
    memory = x.new_empty((step, matrix.inputs))
    for first in range(0, outputs, step):
        part = read_rows(matrix, memory[: min(step, outputs - first)], first)
        torch.mm(x, part.T, out=out[:, first : first + step])
    return out if bias is None else out.add_(bias)
