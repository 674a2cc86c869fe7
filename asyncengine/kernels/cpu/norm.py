"""RMS and layer normalisation, alone or with the residual sum before them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.calls import team_kernel
from asyncengine.kernels.cpu.intrinsics import FLOAT32, INT64, TAG, emitted
from asyncengine.kernels.cpu.jit import array, narrow, pointer, serial_in_order, tag_of, widen
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.vectors import FLOAT, FLOATS, LANES, LONG, load, size_of, square_sum

_WORK = 8
"""Bytes that could be read while an element is computed."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside and rounded once. x [..., width].

    weight [width] is float32, so that Gemma's `1 + weight` loses nothing.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    width = weight.shape[0]
    rows = x.numel() // width
    addresses = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    norm(*addresses, rows, width, np.float32(epsilon), tag_of(x.dtype), use_team())
    return out


def add_rms_norm(
    residual: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, its `rms_norm`) of residual + branch * scale, all [..., width]. Both are rounded, as torch does."""
    residual, branch = residual.contiguous(), branch.contiguous()
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    width = weight.shape[0]
    rows = residual.numel() // width
    addresses = (residual.data_ptr(), branch.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr())
    numbers = (np.float32(scale), np.float32(epsilon), tag_of(residual.dtype))
    add_norm(*addresses, rows, width, *numbers, use_team())
    return total, out


def norm_heads(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, first: int, groups: int, epsilon: float,
    centred: bool,
) -> None:  # fmt: skip
    """Normalise `groups` neighbouring groups of columns of x [rows, all], in place, from column `first` on.

    `weight` and `bias` float32 [width] of all groups, or [groups, width]. `centred`: a layer norm; else an RMS norm.
    """
    width, (rows, stride) = weight.shape[-1], x.shape
    norm_columns(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), rows, stride, first, groups, width,
        0 if weight.dim() == 1 else width, np.float32(epsilon), centred, tag_of(x.dtype), use_team(),
    )  # fmt: skip


@team_kernel(lambda rows, groups, width: (rows * groups, rows * groups * width * _WORK))
@serial_in_order
def norm_columns(
    begin: int, end: int, x: int, weight: int, bias: int, rows: int, stride: int, first: int, groups: int,
    width: int, step: int, epsilon: np.float32, centred: bool, dtype: np.generic,
) -> None:  # fmt: skip
    """`norm_heads` by address; `step`: numbers from one group's weight to the next."""
    for unit in range(begin, end):
        row, group = unit // groups, unit % groups
        row_start = x + (row * stride + first + group * width) * size_of(dtype)
        values = array(pointer(row_start, dtype), (width,))
        weights = array(pointer(weight + group * step * 4, np.float32(0)), (width,))
        shifts = array(pointer(bias + group * step * 4, np.float32(0)), (width,))
        mean, total = np.float32(0), np.float32(0)
        if centred:
            for index in range(width):
                mean += widen(values[index])
            mean /= np.float32(width)
            for index in range(width):
                deviation = widen(values[index]) - mean
                total += deviation * deviation
        else:
            total = square_sum(row_start, width, dtype)
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
        for index in range(width):
            number = (widen(values[index]) - mean) * scale * weights[index]
            values[index] = narrow(number + shifts[index] if bias != 0 else number, dtype)


@team_kernel(lambda rows, width: (rows, rows * width * _WORK))
@serial_in_order
def norm(
    first: int, last: int, x: int, weight: int, out: int, rows: int, width: int, epsilon: np.float32, dtype: np.generic
) -> None:
    """`rms_norm` by address."""
    values = array(pointer(x, dtype), (last, width))
    weights = array(pointer(weight, np.float32(0)), (width,))
    results = array(pointer(out, dtype), (last, width))
    for row in range(first, last):
        total = square_sum(x + row * width * size_of(dtype), width, dtype)
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
        for index in range(width):
            results[row, index] = narrow(widen(values[row, index]) * scale * weights[index], dtype)


_norm_rows = norm.share


@team_kernel(lambda rows, width: (rows, rows * width * _WORK))
@serial_in_order
def add_norm(
    first: int, last: int, residual: int, branch: int, weight: int, total: int, out: int, rows: int, width: int,
    factor: np.float32, epsilon: np.float32, dtype: np.generic,
) -> None:  # fmt: skip
    """`add_rms_norm` by address; `total` may be `residual`."""
    left, right = array(pointer(residual, dtype), (last, width)), array(pointer(branch, dtype), (last, width))
    sums = array(pointer(total, dtype), (last, width))
    for row in range(first, last):
        for index in range(width):
            # torch rounds the product before it is added
            product = widen(narrow(widen(right[row, index]) * factor, dtype))
            sums[row, index] = narrow(widen(left[row, index]) + product, dtype)
    _norm_rows(first, last, total, weight, out, rows, width, epsilon, dtype)


# Layer normalisation (Ba et al. 2016), alone or with the residual sum before it.
#
# A row is read three times, for its mean, its variance and the result: after the first time it is in the nearest cache.
# Written in vectors: a numba loop over so many rows at once is left as it stands.

_LAYER_NORM_WORK = 12
"""The same as `_WORK`, of a layer norm."""


def fits(width: int) -> bool:
    """Whether rows of `width` numbers are whole vectors."""
    return width % LANES == 0


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """(x - mean) / deviation * weight + bias over the last dimension, in float32 inside and rounded once.

    x [..., width]; weight and bias float32 [width], whose width `fits`.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    width = weight.shape[0]
    normalise(
        x.data_ptr(), 0, weight.data_ptr(), bias.data_ptr(), 0, out.data_ptr(), x.numel() // width, width,
        np.float32(1), np.float32(epsilon), tag_of(x.dtype), use_team(),
    )  # fmt: skip
    return out


def add_layer_norm(
    residual: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor, bias: torch.Tensor,
    epsilon: float, keep_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(sum, its `layer_norm`) of residual + branch * scale, all [..., width]: the norm is of the sum before it is
    rounded. Without `keep_sum` it is (norm, norm)."""
    residual, branch = residual.contiguous(), branch.contiguous()
    out = torch.empty_like(residual)
    total = torch.empty_like(residual) if keep_sum else out
    width = weight.shape[0]
    normalise(
        residual.data_ptr(), branch.data_ptr(), weight.data_ptr(), bias.data_ptr(),
        total.data_ptr(), out.data_ptr(), residual.numel() // width, width, np.float32(scale), np.float32(epsilon),
        tag_of(residual.dtype), use_team(),
    )  # fmt: skip
    return total, out


def _write_row(
    builder: Any, residual: Any, branch: Any, weight: Any, bias: Any, total: Any, out: Any, width: Any, factor: Any,
    epsilon: Any, dtype: Any, *, alone: bool,
) -> None:  # fmt: skip
    """Write code for one row, by address. `alone`: without a branch; the sum is not stored."""
    size = dtype.bitwidth // 8
    factors = vectors.splat(builder, factor)
    count = builder.udiv(width, LONG(LANES))
    length = builder.uitofp(width, FLOAT)

    def at(base: Any, index: Any, bytes_each: int) -> Any:
        return builder.add(base, builder.mul(index, LONG(LANES * bytes_each)))

    def value(index: Any) -> Any:
        left = vectors.read(builder, at(residual, index, size), dtype)
        if alone:
            return left
        return vectors.multiply_add(builder, vectors.read(builder, at(branch, index, size), dtype), factors, left)

    mean = vectors.splat(builder, builder.fdiv(_sum(builder, count, value), length))

    def square(index: Any) -> Any:
        deviation = builder.fsub(value(index), mean)
        return builder.fmul(deviation, deviation)

    variance = builder.fadd(builder.fdiv(_sum(builder, count, square), length), epsilon)
    root = vectors.call(builder, "llvm.sqrt.f32", FLOAT, [variance])
    scale = vectors.splat(builder, builder.fdiv(FLOAT(1.0), root))
    with cgutils.for_range(builder, count) as loop:
        summed = value(loop.index)
        if not alone:
            vectors.write(builder, summed, at(total, loop.index, size), dtype)
        normed = builder.fmul(
            builder.fmul(builder.fsub(summed, mean), scale), load(builder, at(weight, loop.index, 4), FLOATS)
        )
        normed = builder.fadd(normed, load(builder, at(bias, loop.index, 4), FLOATS))
        vectors.write(builder, normed, at(out, loop.index, size), dtype)


def _sum(builder: Any, count: Any, value: Any) -> Any:
    """The sum of value(0) to value(count - 1), vectors all, in four chains: an addition waits for the one before it."""
    sums = [cgutils.alloca_once_value(builder, vectors.constant(FLOATS, 0.0)) for _ in range(4)]
    fours = builder.udiv(count, LONG(4))
    with cgutils.for_range(builder, fours) as loop:
        for chain, total in enumerate(sums):
            index = builder.add(builder.mul(loop.index, LONG(4)), LONG(chain))
            builder.store(builder.fadd(builder.load(total), value(index)), total)
    summed = builder.mul(fours, LONG(4))
    with cgutils.for_range(builder, builder.sub(count, summed)) as loop:
        builder.store(builder.fadd(builder.load(sums[0]), value(builder.add(summed, loop.index))), sums[0])
    return vectors.sum_all(builder, sums)


_norm_row, _add_norm_row = (
    emitted(*[INT64] * 7, FLOAT32, FLOAT32, TAG, alone=alone)(_write_row) for alone in (True, False)
)


@team_kernel(lambda rows, width: (rows, rows * width * _LAYER_NORM_WORK))
@serial_in_order
def normalise(
    first: int, last: int, residual: int, branch: int, weight: int, bias: int, total: int, out: int, rows: int,
    width: int, factor: np.float32, epsilon: np.float32, dtype: np.generic,
) -> None:  # fmt: skip
    """`layer_norm` and `add_layer_norm` by address; `branch` is 0 without one."""
    size = width * size_of(dtype)
    for row in range(first, last):
        at = row * size
        if branch == 0:
            _norm_row(residual + at, 0, weight, bias, 0, out + at, width, factor, epsilon, dtype)
        else:
            _add_norm_row(residual + at, branch + at, weight, bias, total + at, out + at, width, factor, epsilon, dtype)
