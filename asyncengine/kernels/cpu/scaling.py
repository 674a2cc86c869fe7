"""Numbers multiplied and branches added, in place and by address, each rounded as torch's operations round it."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.activation import exponential
from asyncengine.kernels.cpu.calls import team_kernel
from asyncengine.kernels.cpu.jit import array, narrow, pointer, serial_in_order, tag_of, widen
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.vectors import size_of

_WORK = 8
"""Bytes that could be read while a number is computed."""


def add_gated(y: torch.Tensor, shared: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """y + shared / (1 + exp(-gate of the row)), in float32 and rounded once. y, shared [rows, width], contiguous.

    `gates` float32 [rows], perhaps a column of a wider matrix. y is overwritten and given back.
    """
    rows, width = y.shape
    add_shared(
        y.data_ptr(), shared.data_ptr(), gates.data_ptr(), gates.stride(0), y.data_ptr(), rows, width, tag_of(y.dtype),
        use_team(),
    )  # fmt: skip
    return y


def add(y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """y + other, both [rows, width] and contiguous. y is overwritten and given back."""
    rows, width = y.shape
    add_shared(y.data_ptr(), other.data_ptr(), 0, 0, y.data_ptr(), rows, width, tag_of(y.dtype), use_team())
    return y


def add_both(residual: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """residual + first + second in float32, rounded once; all [rows, width] and contiguous."""
    out, (rows, width) = torch.empty_like(residual), residual.shape
    addresses = (residual.data_ptr(), first.data_ptr(), second.data_ptr(), out.data_ptr())
    add_branches(*addresses, rows, width, tag_of(residual.dtype), use_team())
    return out


def add_scaled(left: torch.Tensor, factor: float, right: torch.Tensor) -> torch.Tensor:
    """left * factor + right, both [rows, width] and contiguous; product and sum are rounded. left is overwritten."""
    rows, width = left.shape
    add_beside(left.data_ptr(), np.float32(factor), right.data_ptr(), rows, width, tag_of(left.dtype), use_team())
    return left


def scale_each(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x [rows, width], contiguous, with its first columns times `factors`, float32. x is overwritten and given back."""
    rows, width = x.shape
    scale_columns(x.data_ptr(), factors.data_ptr(), rows, width, len(factors), tag_of(x.dtype), use_team())
    return x


def scale_rows(x: torch.Tensor, factors: torch.Tensor, columns: int) -> torch.Tensor:
    """x [rows, width], contiguous, with the first `columns` of each row times its factor, float32 [rows], contiguous.
    x is overwritten and given back."""
    rows, width = x.shape
    multiply_rows(x.data_ptr(), factors.data_ptr(), x.data_ptr(), rows, 1, width, columns, tag_of(x.dtype), use_team())
    return x


def scaled_rows(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """[rows * count, width]: each row of x [rows, width] times each of its factors, float32 [rows, count]; both
    contiguous."""
    (rows, width), count = x.shape, factors.shape[1]
    out = torch.empty((rows * count, width), dtype=x.dtype)
    addresses = x.data_ptr(), factors.data_ptr(), out.data_ptr()
    multiply_rows(*addresses, rows * count, count, width, width, tag_of(x.dtype), use_team())
    return out


@team_kernel(lambda rows, columns: (rows, rows * columns * _WORK))
@serial_in_order
def multiply_rows(
    first: int, last: int, x: int, factors: int, out: int, rows: int, count: int, stride: int, columns: int,
    dtype: np.generic,
) -> None:  # fmt: skip
    """`scaled_rows` by address, of the first `columns` of rows that are `stride` numbers apart: `rows` are those of the
    result, `count` have one of x."""
    factor = array(pointer(factors, np.float32(0)), (rows,))
    for row in range(first, last):
        numbers = array(pointer(x + row // count * stride * size_of(dtype), dtype), (columns,))
        results = array(pointer(out + row * stride * size_of(dtype), dtype), (columns,))
        for index in range(columns):
            results[index] = narrow(widen(numbers[index]) * factor[row], dtype)


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in float32; contiguous."""
    if x.dtype == torch.float32:
        return x
    out = torch.empty(x.shape, dtype=torch.float32)
    widen_all(x.data_ptr(), out.data_ptr(), len(x), x.numel() // max(1, len(x)), tag_of(x.dtype), use_team())
    return out


@team_kernel(lambda rows, width: (rows * width, rows * width * _WORK))
@serial_in_order
def widen_all(first: int, last: int, x: int, out: int, rows: int, width: int, dtype: np.generic) -> None:
    """`widened` by address."""
    values, numbers = array(pointer(x, dtype), (last,)), array(pointer(out, np.float32(0)), (last,))
    for index in range(first, last):
        numbers[index] = widen(values[index])


@team_kernel(lambda rows, width: (rows * width, rows * width * _WORK))
@serial_in_order
def add_branches(
    begin: int, end: int, residual: int, first: int, second: int, out: int, rows: int, width: int, dtype: np.generic
) -> None:
    """`add_both` by address."""
    stream, sums = array(pointer(residual, dtype), (end,)), array(pointer(out, dtype), (end,))
    left, right = array(pointer(first, dtype), (end,)), array(pointer(second, dtype), (end,))
    for index in range(begin, end):
        sums[index] = narrow(widen(stream[index]) + widen(left[index]) + widen(right[index]), dtype)


@team_kernel(lambda rows, width: (rows, rows * width * _WORK))
@serial_in_order
def add_shared(
    first: int, last: int, y: int, shared: int, gates: int, stride: int, out: int, rows: int, width: int,
    dtype: np.generic,
) -> None:  # fmt: skip
    """`add_gated` by address; the gates are `stride` numbers apart, 0: there are none."""
    for row in range(first, last):
        share = np.float32(1)
        if gates != 0:
            share /= np.float32(1) + exponential(-array(pointer(gates + row * stride * 4, np.float32(0)), (1,))[0])
        offset = row * width * size_of(dtype)
        left, right = array(pointer(y + offset, dtype), (width,)), array(pointer(shared + offset, dtype), (width,))
        sums = array(pointer(out + offset, dtype), (width,))
        for index in range(width):
            sums[index] = narrow(widen(left[index]) + widen(right[index]) * share, dtype)


@team_kernel(lambda rows, columns: (rows, rows * columns * _WORK))
@serial_in_order
def scale_columns(
    first: int, last: int, x: int, factors: int, rows: int, stride: int, columns: int, dtype: np.generic
) -> None:
    """The first `columns` of x [rows, stride] times `factors`, float32 [columns]."""
    factor = array(pointer(factors, np.float32(0)), (columns,))
    for row in range(first, last):
        numbers = array(pointer(x + row * stride * size_of(dtype), dtype), (columns,))
        for index in range(columns):
            numbers[index] = narrow(widen(numbers[index]) * factor[index], dtype)


@team_kernel(lambda rows, width: (rows * width, rows * width * _WORK))
@serial_in_order
def add_beside(
    first: int, last: int, left: int, factor: np.float32, right: int, rows: int, width: int, dtype: np.generic
) -> None:
    """left = left * factor + right, both [rows, width]; the product is rounded, and so is the sum."""
    sums, added = array(pointer(left, dtype), (last,)), array(pointer(right, dtype), (last,))
    for index in range(first, last):
        product = widen(narrow(widen(sums[index]) * factor, dtype))
        sums[index] = narrow(product + widen(added[index]), dtype)
