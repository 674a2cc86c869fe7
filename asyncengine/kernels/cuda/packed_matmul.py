"""Products by weights in 4 and 8 bits, dequantized while they are read (as in the kernels of GPTQ and AWQ).

A chunk is `width` bytes of every output, and a byte belongs to one group of inputs, or to two:

    8 bits   byte j of chunk c is input c * width + j, of group c
    4 bits   its lower half is input 2 c * width + j, of group 2 c; its upper half input (2 c + 1) * width + j

so that one scale serves each row of a tile, and the tile of a chunk is one piece of memory. Tensor cores multiply the
numbers themselves, which 16 bits hold exactly, and what they give is scaled; for many rows of x, slices of the weight
are dequantized for torch's product. Four bits become 16 by permuting bytes (as in FasterTransformer and Marlin).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.launching import starts_early

SOME = 64
"""Rows of x up to which a product needs no dequantized copy of the weight."""
_INPUTS = 2**16
"""Bytes of x that one of its programs holds at once: wide chunks allow fewer rows."""
_SLICE = 2**26
"""Numbers of a weight that are dequantized at once, of two bytes each: 2^24 stay in a second-level cache, but take a
sixth longer."""
_NARROW, _TILE, WARPS = 8, 4096, 4
"""Rows of a matrix that a program dequantizes, and bytes that it reads of these at once; warps of a few-row program."""
FLOATS = -1
"""`ChunkedMatrix.middle` of a matrix whose numbers are e4m3 floats."""
BIG = 0x4B000000
"""Bits of the float 2^23, whose lowest are a whole number: the cheapest way to a float. A kernel is given them, since a
constant would be put into a register for each number again."""


class Planes(NamedTuple):
    """Tensors of a matrix [outputs, inputs], on the device; None for planes that its format does not have.

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
    """float32 [16]: the value of each 4-bit number."""


class ChunkedMatrix(NamedTuple):
    """w = row_scale * (scale * (number - zero) - minimum)."""

    planes: Planes
    inputs: int
    bits: int
    block: int
    """Inputs of a block; 0 for formats without blocks."""
    middle: int
    """The zero of all groups, where there are no `zeros`."""
    table: tuple[int, ...] = ()
    """The numbers of `Planes.table`."""


@triton.jit
def _values(planes, packed, group, output, outputs, big, half: tl.constexpr, bits: tl.constexpr, middle: tl.constexpr):
    """float32: the numbers of one half of each byte, or of all of it, less the zero of their group. `group` and
    `output` lack the last dimension of `packed`."""
    number = packed.to(tl.int32)
    zero = middle + 0.0
    if planes.zeros is not None:
        zero = tl.expand_dims(tl.load(planes.zeros + (group * outputs + output)).to(tl.float32), -1)
    if middle < 0:
        values = packed.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif planes.table is not None:
        values = tl.load(planes.table + ((number >> (4 * half)) & 15))
    elif bits == 8:
        values = (number | big).to(tl.float32, bitcast=True) - (zero + 8388608.0)
    elif half == 0:
        values = ((number & 15) | big).to(tl.float32, bitcast=True) - (zero + 8388608.0)
    else:
        values = ((number & 240) | big).to(tl.float32, bitcast=True) * 0.0625 - (zero + 524288.0)
    return values


@triton.jit
def _of_group(values, steps, group, output, outputs, width: tl.constexpr, block: tl.constexpr):
    """float32: the scales or minima of groups."""
    if steps is None:
        result = tl.load(values + (group * outputs + output)).to(tl.float32)
    else:
        result = tl.load(values + (group * width // block * outputs + output)).to(tl.float32)
        result *= tl.load(steps + (group * outputs + output)).to(tl.float32)
    return result


@triton.jit
def _scaled(planes, products, x_sums, group, output, outputs, width: tl.constexpr, block: tl.constexpr):
    """Scale * products - minimum * x_sums; both have a last dimension that groups have not."""
    if planes.scales is not None:
        scale = _of_group(planes.scales, planes.steps, group, output, outputs, width, block)
        products *= tl.expand_dims(scale, -1)
    if planes.minima is not None:
        minimum = _of_group(planes.minima, planes.minimum_steps, group, output, outputs, width, block)
        products -= x_sums * tl.expand_dims(minimum, -1)
    return products


@triton.jit
def _numbers(
    planes, packed, group, output, outputs, big, x, half: tl.constexpr, bits: tl.constexpr,
    middle: tl.constexpr, code: tl.constexpr,
):  # fmt: skip
    """`_values` in the type of x, by PTX of `unpacking` if there is `code`."""
    if code == "":
        numbers = _values(planes, packed, group, output, outputs, big, half, bits, middle).to(x.dtype.element_ty)
    elif planes.table is not None or (middle == 128 and x.dtype.element_ty == tl.bfloat16):
        numbers = tl.inline_asm_elementwise(code, "=r,=r,r", [packed], dtype=x.dtype.element_ty, is_pure=True, pack=4)
    else:
        zero = tl.full([1, 1], middle, tl.float32)
        if planes.zeros is not None:
            zero = tl.load(planes.zeros + (group * outputs + output)).to(tl.float32)
        negative = ((-128.0 if x.dtype.element_ty == tl.bfloat16 else -1024.0) - zero).to(x.dtype.element_ty)
        numbers = tl.inline_asm_elementwise(
            code, "=r,=r,r,r,r", [packed, tl.expand_dims(negative, -1)], dtype=x.dtype.element_ty, is_pure=True, pack=4
        )
    return numbers


@triton.jit
def product_of_few(
    planes, x, source, present, output, inputs, outputs, chunks, big, even: tl.constexpr, tile: tl.constexpr,
    bits: tl.constexpr, width: tl.constexpr, block: tl.constexpr, middle: tl.constexpr, low: tl.constexpr,
    high: tl.constexpr,
):  # fmt: skip
    """float32 [outputs, rows], of rows `output` of the matrix with those of x that begin at elements `source` and are
    `present`. Each warp has its own chunks, whose products are scaled before they are added: so no number is rounded.
    """
    block_n: tl.constexpr = output.shape[0]
    block_m: tl.constexpr = source.shape[0]
    output = output[None, :]
    lane_chunks = tl.arange(0, tile)[:, None]
    lane = tl.arange(0, width)[None, :]
    packs = planes.numbers + ((lane_chunks * outputs + output).to(tl.int64)[:, :, None] * width + lane[:, None, :])
    inner = lane_chunks * (8 // bits * width) + lane
    x_addresses = x + (source[None, None, :] + inner[:, :, None])
    present = present[None, None, :]
    total = tl.zeros([tile, block_n, block_m], tl.float32)
    for begin in range(0, chunks, tile):
        chunk = tl.minimum(begin + lane_chunks, chunks - 1)
        packed = tl.load(packs) if even else tl.load(packs, mask=(begin + lane_chunks < chunks)[:, :, None], other=0)
        for half in tl.static_range(8 // bits):
            group = chunk * (8 // bits) + half
            number = _numbers(
                planes, packed, group, output, outputs, big, x, half, bits, middle,
                low if half == 0 else high,
            )  # fmt: skip
            mask = present
            if not even:
                mask = present & (begin * (8 // bits) * width + half * width + inner < inputs)[:, :, None]
            x_values = tl.load(x_addresses + half * width, mask=mask, other=0.0)
            products = tl.dot(number, x_values, input_precision="ieee")
            x_sums = 0.0
            if planes.minima is not None:
                x_sums = tl.sum(x_values.to(tl.float32), axis=1)[:, None, :]
            total += _scaled(planes, products, x_sums, group, output, outputs, width, block)
        packs += tile * width * outputs.to(tl.int64)
        x_addresses += tile * (8 // bits) * width
    result = tl.sum(total, axis=0)
    return result * tl.load(planes.row_scales + output).reshape(block_n, 1)


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    planes, x, out, bias, x_stride, out_stride, rows, inputs, outputs, chunks, big, block_m: tl.constexpr,
    block_n: tl.constexpr, gated: tl.constexpr, early: tl.constexpr, even: tl.constexpr, tile: tl.constexpr,
    bits: tl.constexpr, width: tl.constexpr, block: tl.constexpr, middle: tl.constexpr, low: tl.constexpr,
    high: tl.constexpr,
):  # fmt: skip
    """`block_n` outputs of up to `block_m` rows. Outputs behind the last are that one again, and not stored. Gated:
    without a bias, silu of the first half of the matrix's outputs times the second."""
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row, column = tl.arange(0, block_m), tl.program_id(0) * block_n + tl.arange(0, block_n)
    count = outputs // 2 if gated else outputs
    output = tl.minimum(column, count - 1)
    result = product_of_few(
        planes, x, row * x_stride, row < rows, output, inputs, outputs, chunks, big, even, tile, bits, width, block,
        middle, low, high,
    )  # fmt: skip
    if bias is not None:
        result += tl.load(bias + output).to(tl.float32)[:, None]
    if gated:
        up = product_of_few(
            planes, x, row * x_stride, row < rows, output + count, inputs, outputs, chunks, big, even, tile, bits,
            width, block, middle, low, high,
        )  # fmt: skip
        result = result / (1.0 + tl.exp(-result)) * up
    offsets = row.to(tl.int64)[None, :] * out_stride + column[:, None]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=(column < count)[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=["rows", "first"])
def _dequantize(
    planes, ids, out, first, rows, inputs, outputs, chunks, big, block_rows: tl.constexpr, tile: tl.constexpr,
    bits: tl.constexpr, width: tl.constexpr, block: tl.constexpr, middle: tl.constexpr,
):  # fmt: skip
    """Rows of the matrix: from `first` on, or those of `ids`."""
    row = (tl.program_id(0) * block_rows + tl.arange(0, block_rows))[None, :]
    output = tl.minimum(row, rows - 1) + first
    if ids is not None:
        output = tl.load(ids + tl.minimum(row, rows - 1))
    chunk_ids = (tl.program_id(1) * tile + tl.arange(0, tile))[:, None]
    chunk = tl.minimum(chunk_ids, chunks - 1)
    lane = tl.arange(0, width)[None, None, :]
    packed = tl.load(planes.numbers + ((chunk * outputs + output).to(tl.int64)[:, :, None] * width + lane))
    for half in tl.static_range(8 // bits):
        group = chunk * (8 // bits) + half
        number = _values(planes, packed, group, output, outputs, big, half, bits, middle)
        number = _scaled(planes, number, 1.0, group, output, outputs, width, block)
        number *= tl.load(planes.row_scales + output)[:, :, None]
        column = ((chunk_ids * (8 // bits) + half) * width)[:, :, None] + lane
        offsets = row.to(tl.int64)[:, :, None] * inputs + column
        tl.store(out + offsets, number.to(out.dtype.element_ty), mask=(row[:, :, None] < rows) & (column < inputs))


def read_rows(
    matrix: ChunkedMatrix, out: torch.Tensor, first: int = 0, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """`out` [n, inputs], contiguous, of any float dtype = rows [first, first + n), or the rows `ids` (int64 [n])."""
    planes, inputs, bits, block, middle, _ = matrix
    chunks, outputs, width = planes.numbers.shape
    tile = max(1, _TILE // _NARROW // width)
    if len(out):
        _dequantize[triton.cdiv(len(out), _NARROW), triton.cdiv(chunks, tile)](
            planes, ids, out, first, len(out), inputs, outputs, chunks, BIG, _NARROW, tile, bits, width, block, middle
        )
    return out


def few_form(matrix: ChunkedMatrix, x: torch.Tensor, rows: int) -> tuple[bool, int, int, int, int, int, str, str]:
    """The last parameters of `product_of_few` for such an x, of which a program multiplies `rows`."""
    width, codes = matrix.planes.numbers.shape[2], ("", "")
    tile = WARPS * max(1, 64 // width if rows <= 16 else 1)
    if x.is_cuda and matrix.middle != FLOATS:  # Triton's interpreter knows no PTX
        codes = unpacking(x.dtype == torch.bfloat16, matrix.bits, matrix.middle, matrix.table)
    even = matrix.inputs % (8 // matrix.bits * width * tile) == 0
    return even, tile, matrix.bits, width, matrix.block, matrix.middle, *codes


@cache
def unpacking(bf16: bool, bits: int, middle: int, table: tuple[int, ...]) -> tuple[str, str]:
    """PTX that makes bf16 (`bf16`) or float16 of the lower halves, and of the upper, of four bytes; ""
    for forms without such code.

    Bits are put behind those of 128 or 1,024, which a second operand subtracts again with the group's zero: bf16
    has room for seven bits, and with a middle of 128 the eighth says what is subtracted. Of a table whose second half
    is its first with another sign, both bytes of an entry are looked up by permuting them.
    """
    halves = ("mov.b32 t, $2;", "shl.b32 w, t, 4;"), ("shr.b32 t, $2, 4;", "mov.b32 w, $2;")
    big, one, pair = ("0x43434343", "0x3F803F80", "bf16x2") if bf16 else ("0x64646464", "0x3C003C00", "f16x2")
    spread = f"prmt.b32 u, t, {big}, 0x4140; prmt.b32 v, t, {big}, 0x4342;"
    subtract = "fma.rn.{0} $0, u, t, {1}; fma.rn.{0} $1, v, t, {2};"
    convert = f"{spread} mov.b32 t, {one}; {subtract.format(pair, '$3', '$4')}"
    if table:
        values = np.array(table, np.float32)
        if (values[8:] != -values[:8]).any():
            return "", ""
        words = values[:8].view(np.uint32) >> 16 if bf16 else values[:8].astype(np.float16).view(np.uint16)
        lows, highs = (np.ascontiguousarray(half, np.uint8).view("<u4") for half in (words & 255, words >> 8))
        convert = (
            "and.b32 t, t, 0x07070707; shr.b32 u, t, 4; or.b32 t, t, u; prmt.b32 t, t, 0, 0x4420; "
            f"mov.b32 u, {lows[0]}; mov.b32 v, {lows[1]}; prmt.b32 u, u, v, t; and.b32 w, w, 0x80808080; "
            f"mov.b32 v, {highs[0]}; mov.b32 s, {highs[1]}; prmt.b32 v, v, s, t; or.b32 v, v, w; "
            "prmt.b32 $0, u, v, 0x5140; prmt.b32 $1, u, v, 0x7362;"
        )
        low, high = (f"{begin} {sign} {convert}" for begin, sign in halves)
    elif bits == 4:
        low, high = (f"{begin} and.b32 t, t, 0x0F0F0F0F; {convert}" for begin, _ in halves)
    elif not bf16 or middle == 32:  # of six bits
        low = high = f"{halves[0][0]} {convert}"
    elif middle != 128:
        return "", ""
    else:
        low = high = (
            f"and.b32 t, $2, 0x7F7F7F7F; not.b32 w, $2; and.b32 w, w, 0x80808080; {spread} mov.b32 t, {one}; "
            "prmt.b32 s, w, 0xC3C3C3C3, 0x4140; prmt.b32 w, w, 0xC3C3C3C3, 0x4342; " + subtract.format(pair, "s", "w")
        )
    return f"{{ .reg .b32 s, t, u, v, w; {low} }}", f"{{ .reg .b32 s, t, u, v, w; {high} }}"


def gates(matrix: ChunkedMatrix, rows: int) -> bool:
    """Whether a gated activation is fused into the product: with more rows or wider chunks it takes so many registers
    that fewer programs run at once."""
    return rows <= 8 and matrix.planes.numbers.shape[2] <= 64


def few_enough(matrix: ChunkedMatrix, rows: int) -> bool:
    """Whether one kernel multiplies this many rows, without a dequantized copy of the matrix."""
    x_bytes = triton.next_power_of_2(max(rows, 1)) * WARPS * matrix.planes.numbers.shape[2] * (16 // matrix.bits)
    return rows <= SOME and x_bytes <= _INPUTS


def multiply(
    x: torch.Tensor, matrix: ChunkedMatrix, out: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """`out` [rows, outputs] = x W^T + bias. Both have neighbours along their last dimension; rows may lie apart.

    Where there are `few_enough` rows, `out` may be float32 for x of another dtype. `gated`, for what `gates`, without a
    bias: `out` is half as wide, silu of the first half times the second.
    """
    rows, (chunks, outputs, _) = len(x), matrix.planes.numbers.shape
    if not few_enough(matrix, rows):
        return _many_rows(x, matrix, out, bias)
    if rows:
        block_m, early = max(8, triton.next_power_of_2(rows)), starts_early(x.device)
        block_n = 16 if block_m <= 16 else 32
        options = {"launch_pdl": True} if early else {}
        _few_rows[(triton.cdiv(out.shape[1], block_n),)](
            matrix.planes, x, out, bias, x.stride(0), out.stride(0), rows, matrix.inputs, outputs, chunks, BIG, block_m,
            block_n, gated, early, *few_form(matrix, x, block_m), num_warps=WARPS, num_stages=3 if block_m <= 16 else 2,
            **options,
        )  # fmt: skip
    return out


def _many_rows(x: torch.Tensor, matrix: ChunkedMatrix, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by torch, one slice of dequantized outputs after the other, so that the copy stays small."""
    outputs = matrix.planes.numbers.shape[1]
    step = min(outputs, max(256, _SLICE // matrix.inputs // 256 * 256))
    buffer = x.new_empty((step, matrix.inputs))
    for first in range(0, outputs, step):
        weight = read_rows(matrix, buffer[: min(step, outputs - first)], first)
        torch.mm(x, weight.T, out=out[:, first : first + step])
    return out if bias is None else out.add_(bias)
