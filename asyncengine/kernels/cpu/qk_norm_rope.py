"""Heads of queries and keys before attention: their norms, and their rotation.

The norm's weight is float32 and its result is rounded once; the rotation's roundings are where the modules of
transformers have them, after each operation of theirs.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.calls import team_kernel
from asyncengine.kernels.cpu.intrinsics import FLOAT32, INT64, TAG, emitted
from asyncengine.kernels.cpu.jit import array, narrow, pointer, serial_in_order, tag_of, widen
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.vectors import FLOATS, LANES, LONG, load, size_of, square_sum

_WORK = 8
"""Bytes that could be read while a number is rotated."""


def rotate_heads(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, dim: int, interleaved: bool
) -> None:
    """Rotate the first dimensions of `heads` neighbouring heads of x [rows, all], in place and rounded once.

    cos and sin [rows, rotary dim] of x's type or float32, all contiguous. `interleaved`: a pair is (2 i, 2 i + 1), not
    (i, i + dim / 2).
    """
    rows, stride = x.shape
    rotate_columns(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, stride, heads, dim, cos.shape[-1], interleaved,
        tag_of(x.dtype), tag_of(cos.dtype), use_team(),
    )  # fmt: skip


@team_kernel(lambda rows, heads, rotary: (rows * heads, rows * heads * rotary * _WORK))
@serial_in_order
def rotate_columns(
    first: int, last: int, x: int, cos: int, sin: int, rows: int, stride: int, heads: int, dim: int, rotary: int,
    interleaved: bool, dtype: np.generic, angle_dtype: np.generic,
) -> None:  # fmt: skip
    """`rotate_heads` by address."""
    half = rotary // 2
    step, distance = (2, 1) if interleaved else (1, half)
    cosines, sines = array(pointer(cos, angle_dtype), (rows, rotary)), array(pointer(sin, angle_dtype), (rows, rotary))
    for unit in range(first, last):
        row, head = unit // heads, unit % heads
        values = array(pointer(x + (row * stride + head * dim) * size_of(dtype), dtype), (rotary,))
        for pair in range(half):
            low, high = pair * step, pair * step + distance
            first, second = widen(values[low]), widen(values[high])
            left = first * widen(cosines[row, low]) - second * widen(sines[row, low])
            right = second * widen(cosines[row, high]) + first * widen(sines[row, high])
            values[low], values[high] = narrow(left, dtype), narrow(right, dtype)


@serial_in_order
def prepare_head(
    source: int, out: int, dim: int, norm: int, epsilon: np.float32, cos: int, sin: int, rotary: int, dtype: Any
) -> None:
    """Normalise by the root of the mean square (`norm` 0: not), then rotate the first `rotary` dimensions by halves."""
    scale = np.float32(1)
    if norm != 0:
        scale = np.float32(1) / np.sqrt(square_sum(source, dim, dtype) / np.float32(dim) + epsilon)
    if dim % LANES == 0 and rotary % (2 * LANES) == 0:
        _rotate_vectors(source, out, dim, norm, scale, cos, sin, rotary, dtype)
    else:
        _rotate_numbers(source, out, dim, norm, scale, cos, sin, rotary, dtype)


@serial_in_order
def _rotate_numbers(
    source: int, out: int, dim: int, norm: int, scale: np.float32, cos: int, sin: int, rotary: int, dtype: Any
) -> None:
    values, results = array(pointer(source, dtype), (dim,)), array(pointer(out, dtype), (dim,))
    if norm != 0:
        weights = array(pointer(norm, np.float32(0)), (dim,))
        for index in range(dim):
            results[index] = narrow(widen(values[index]) * scale * weights[index], dtype)
    else:
        for index in range(dim):
            results[index] = values[index]
    half = rotary // 2
    cosines, sines = array(pointer(cos, dtype), (rotary,)), array(pointer(sin, dtype), (rotary,))
    for index in range(half):
        first, second = widen(results[index]), widen(results[index + half])
        by_cosine = narrow(first * widen(cosines[index]), dtype)
        by_sine = narrow(-second * widen(sines[index]), dtype)
        results[index] = narrow(widen(by_cosine) + widen(by_sine), dtype)
        by_cosine = narrow(second * widen(cosines[index + half]), dtype)
        by_sine = narrow(first * widen(sines[index + half]), dtype)
        results[index + half] = narrow(widen(by_cosine) + widen(by_sine), dtype)


@emitted(*[INT64] * 4, FLOAT32, *[INT64] * 3, TAG)
def _rotate_vectors(
    builder: Any, source: Any, out: Any, dim: Any, norm: Any, scale: Any, cos: Any, sin: Any, rotary: Any, dtype: Any
) -> None:
    """`_rotate_numbers` in vectors, where `dim` is a multiple of sixteen and `rotary` one of thirty-two."""
    with builder.if_else(builder.icmp_signed("!=", norm, LONG(0))) as (then, otherwise):
        with then:
            _write_rotation(builder, dtype, True, source, out, dim, norm, scale, cos, sin, rotary)
        with otherwise:
            _write_rotation(builder, dtype, False, source, out, dim, norm, scale, cos, sin, rotary)


def _write_rotation(
    builder: Any, dtype: Any, normed: bool, source: Any, out: Any, dim: Any, norm: Any, scale: Any, cos: Any, sin: Any,
    rotary: Any,
) -> None:  # fmt: skip
    factor = vectors.splat(builder, scale)

    def address(base: Any, index: Any) -> Any:
        return builder.add(base, builder.mul(index, LONG(dtype.bitwidth // 8)))

    def read(base: Any, index: Any) -> Any:
        return vectors.read(builder, address(base, index), dtype)

    def normal(index: Any) -> Any:
        value = read(source, index)
        if not normed:
            return value
        weights = load(builder, builder.add(norm, builder.mul(index, LONG(4))), FLOATS)
        return _rounded(builder, builder.fmul(builder.fmul(value, factor), weights), dtype)

    def product(left: Any, base: Any, index: Any) -> Any:
        return _rounded(builder, builder.fmul(left, read(base, index)), dtype)

    half = builder.lshr(rotary, LONG(1))
    with cgutils.for_range(builder, builder.udiv(half, LONG(LANES))) as loop:
        low = builder.mul(loop.index, LONG(LANES))
        high = builder.add(low, half)
        first, second = normal(low), normal(high)
        minus = builder.fsub(ir.Constant(FLOATS, [-0.0] * LANES), second)
        turned = builder.fadd(product(first, cos, low), product(minus, sin, low))
        vectors.write(builder, turned, address(out, low), dtype)
        turned = builder.fadd(product(second, cos, high), product(first, sin, high))
        vectors.write(builder, turned, address(out, high), dtype)
    rest = builder.udiv(builder.sub(dim, rotary), LONG(LANES))
    with cgutils.for_range(builder, rest) as loop:
        index = builder.add(rotary, builder.mul(loop.index, LONG(LANES)))
        vectors.write(builder, normal(index), address(out, index), dtype)


def _rounded(builder: Any, floats: Any, dtype: Any) -> Any:
    if dtype != numba.types.uint16:
        return floats
    return vectors.widen_halves(builder, vectors.narrow(builder, floats), "bfloat16")
