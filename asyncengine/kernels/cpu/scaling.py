"""Numbers multiplied and branches added, in place and by address, each rounded as torch's operations round it."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.activation import exponential
from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.jit import array, kind_of, narrow, pointer, serial_in_order, widen
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of
from asyncengine.kernels.cpu.vectors import size_of

_WORK = 8
"""Bytes that could be read while a number is computed."""


def add_gated(y: torch.Tensor, shared: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """y + shared / (1 + exp(-gate of the row)), in float32 and rounded once. y, shared [rows, width], contiguous.

    `gates` float32 [rows], perhaps a column of a wider matrix. y is overwritten and given back.
    """
    rows, width = y.shape
    add_shared(
        y.data_ptr(), shared.data_ptr(), gates.data_ptr(), gates.stride(0), y.data_ptr(), rows, width, kind_of(y.dtype),
        use_team(),
    )  # fmt: skip
    return y


def add(y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """y + other, both [rows, width] and contiguous. y is overwritten and given back."""
    rows, width = y.shape
    add_shared(y.data_ptr(), other.data_ptr(), 0, 0, y.data_ptr(), rows, width, kind_of(y.dtype), use_team())
    return y


def add_both(residual: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """residual + first + second in float32, rounded once; all [rows, width] and contiguous."""
    out, (rows, width) = torch.empty_like(residual), residual.shape
    where = (residual.data_ptr(), first.data_ptr(), second.data_ptr(), out.data_ptr())
    add_branches(*where, rows, width, kind_of(residual.dtype), use_team())
    return out


def add_scaled(left: torch.Tensor, factor: float, right: torch.Tensor) -> torch.Tensor:
    """left * factor + right, both [rows, width] and contiguous; product and sum are rounded. left is overwritten."""
    rows, width = left.shape
    add_beside(
        left.data_ptr(), np.float32(factor), right.data_ptr(), rows, width, kind_of(left.dtype), use_team()
    )  # fmt: skip
    return left


def scale_each(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x [rows, width], contiguous, with its first columns times `factors`, float32. x is overwritten and given back."""
    rows, width = x.shape
    scale_columns(x.data_ptr(), factors.data_ptr(), rows, width, len(factors), kind_of(x.dtype), use_team())
    return x


def scale_rows(x: torch.Tensor, factors: torch.Tensor, columns: int) -> torch.Tensor:
    """x [rows, width], contiguous, with the first `columns` of each row times its factor, float32 [rows], contiguous.
    x is overwritten and given back."""
    rows, width = x.shape
    multiply_rows(
        x.data_ptr(), factors.data_ptr(), x.data_ptr(), rows, 1, width, columns, kind_of(x.dtype), use_team()
    )  # fmt: skip
    return x


def scaled_rows(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """[rows * count, width]: each row of x [rows, width] times each of its factors, float32 [rows, count]; both
    contiguous."""
    (rows, width), count = x.shape, factors.shape[1]
    out = torch.empty((rows * count, width), dtype=x.dtype)
    where = x.data_ptr(), factors.data_ptr(), out.data_ptr()
    multiply_rows(*where, rows * count, count, width, width, kind_of(x.dtype), use_team())
    return out


@serial_in_order
def multiply_rows(
    x: int, factors: int, out: int, rows: int, count: int, stride: int, columns: int, kind: np.generic, team: int
) -> None:
    """`scaled_rows` by address, of the first `columns` of rows that are `stride` numbers apart: `rows` are those of the
    result, `count` have one of x."""
    pieces = pieces_of(rows * columns * _WORK, rows, team)
    parallel_for(_rows_part, team, pieces, (x, factors, out, rows, count, stride, columns, kind))


@serial_in_order
def _rows_part(
    piece: int, pieces: int, worker: int,
    x: int, factors: int, out: int, rows: int, count: int, stride: int, columns: int, kind: np.generic,
) -> None:  # fmt: skip
    factor = array(pointer(factors, np.float32(0)), (rows,))
    for row in range(rows * piece // pieces, rows * (piece + 1) // pieces):
        numbers = array(pointer(x + row // count * stride * size_of(kind), kind), (columns,))
        results = array(pointer(out + row * stride * size_of(kind), kind), (columns,))
        for index in range(columns):
            results[index] = narrow(widen(numbers[index]) * factor[row], kind)


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in float32; contiguous."""
    if x.dtype == torch.float32:
        return x
    out = torch.empty(x.shape, dtype=torch.float32)
    widen_all(x.data_ptr(), out.data_ptr(), len(x), x.numel() // max(1, len(x)), kind_of(x.dtype), use_team())
    return out


@serial_in_order
def widen_all(x: int, out: int, rows: int, width: int, kind: np.generic, team: int) -> None:
    """`widened` by address."""
    parallel_for(_widen_part, team, pieces_of(rows * width * _WORK, rows, team), (x, out, rows, width, kind))


@serial_in_order
def _widen_part(
    piece: int, pieces: int, worker: int, x: int, out: int, rows: int, width: int, kind: np.generic
) -> None:
    first, last = rows * width * piece // pieces, rows * width * (piece + 1) // pieces
    values, numbers = array(pointer(x, kind), (last,)), array(pointer(out, np.float32(0)), (last,))
    for index in range(first, last):
        numbers[index] = widen(values[index])


@serial_in_order
def add_branches(
    residual: int, first: int, second: int, out: int, rows: int, width: int, kind: np.generic, team: int
) -> None:
    """`add_both` by address."""
    pieces = pieces_of(rows * width * _WORK, rows, team)
    parallel_for(_branches_part, team, pieces, (residual, first, second, out, rows, width, kind))


@serial_in_order
def _branches_part(
    piece: int, pieces: int, worker: int,
    residual: int, first: int, second: int, out: int, rows: int, width: int, kind: np.generic,
) -> None:  # fmt: skip
    begin, end = rows * width * piece // pieces, rows * width * (piece + 1) // pieces
    stream, sums = array(pointer(residual, kind), (end,)), array(pointer(out, kind), (end,))
    one, other = array(pointer(first, kind), (end,)), array(pointer(second, kind), (end,))
    for index in range(begin, end):
        sums[index] = narrow(widen(stream[index]) + widen(one[index]) + widen(other[index]), kind)


@serial_in_order
def add_shared(
    y: int, shared: int, gates: int, stride: int, out: int, rows: int, width: int, kind: np.generic, team: int
) -> None:
    """`add_gated` by address; the gates are `stride` numbers apart, 0: there are none."""
    pieces = pieces_of(rows * width * _WORK, rows, team)
    parallel_for(_shared_part, team, pieces, (y, shared, gates, stride, out, rows, width, kind))


@serial_in_order
def _shared_part(
    piece: int, pieces: int, worker: int,
    y: int, shared: int, gates: int, stride: int, out: int, rows: int, width: int, kind: np.generic,
) -> None:  # fmt: skip
    for row in range(rows * piece // pieces, rows * (piece + 1) // pieces):
        share = np.float32(1)
        if gates != 0:
            share /= np.float32(1) + exponential(-array(pointer(gates + row * stride * 4, np.float32(0)), (1,))[0])
        place = row * width * size_of(kind)
        left, right = array(pointer(y + place, kind), (width,)), array(pointer(shared + place, kind), (width,))
        sums = array(pointer(out + place, kind), (width,))
        for index in range(width):
            sums[index] = narrow(widen(left[index]) + widen(right[index]) * share, kind)


@serial_in_order
def scale_columns(x: int, factors: int, rows: int, stride: int, columns: int, kind: np.generic, team: int) -> None:
    """The first `columns` of x [rows, stride] times `factors`, float32 [columns]."""
    pieces = pieces_of(rows * columns * _WORK, rows, team)
    parallel_for(_columns_part, team, pieces, (x, factors, rows, stride, columns, kind))


@serial_in_order
def _columns_part(
    piece: int, pieces: int, worker: int, x: int, factors: int, rows: int, stride: int, columns: int, kind: np.generic
) -> None:
    factor = array(pointer(factors, np.float32(0)), (columns,))
    for row in range(rows * piece // pieces, rows * (piece + 1) // pieces):
        numbers = array(pointer(x + row * stride * size_of(kind), kind), (columns,))
        for index in range(columns):
            numbers[index] = narrow(widen(numbers[index]) * factor[index], kind)


@serial_in_order
def add_beside(left: int, factor: np.float32, right: int, rows: int, width: int, kind: np.generic, team: int) -> None:
    """left = left * factor + right, both [rows, width]; the product is rounded, and so is the sum."""
    pieces = pieces_of(rows * width * _WORK, rows, team)
    parallel_for(_beside_part, team, pieces, (left, factor, right, rows, width, kind))


@serial_in_order
def _beside_part(
    piece: int, pieces: int, worker: int,
    left: int, factor: np.float32, right: int, rows: int, width: int, kind: np.generic,
) -> None:  # fmt: skip
    first, last = rows * width * piece // pieces, rows * width * (piece + 1) // pieces
    sums, added = array(pointer(left, kind), (last,)), array(pointer(right, kind), (last,))
    for index in range(first, last):
        product = widen(narrow(widen(sums[index]) * factor, kind))
        sums[index] = narrow(product + widen(added[index]), kind)
