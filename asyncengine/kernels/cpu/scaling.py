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
def scale(x: int, factor: np.float32, rows: int, stride: int, columns: int, kind: np.generic, team: int) -> None:
    """The first `columns` of x [rows, stride] times one factor."""
    pieces = pieces_of(rows * columns * _WORK, rows, team)
    parallel_for(_scale_part, team, pieces, (x, factor, rows, stride, columns, kind))


@serial_in_order
def _scale_part(
    piece: int, pieces: int, worker: int,
    x: int, factor: np.float32, rows: int, stride: int, columns: int, kind: np.generic,
) -> None:  # fmt: skip
    for row in range(rows * piece // pieces, rows * (piece + 1) // pieces):
        numbers = array(pointer(x + row * stride * size_of(kind), kind), (columns,))
        for index in range(columns):
            numbers[index] = narrow(widen(numbers[index]) * factor, kind)


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
