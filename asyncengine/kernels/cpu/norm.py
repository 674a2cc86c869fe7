"""RMS normalisation, alone or with the residual sum before it."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.jit import array, kind_of, narrow, pointer, serial_in_order, widen
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of
from asyncengine.kernels.cpu.vectors import size_of, square_sum

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
    where = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    norm(*where, rows, width, np.float32(epsilon), kind_of(x.dtype), use_team())
    return out


def add_rms_norm(
    residual: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, its `rms_norm`) of residual + branch * scale, all [..., width]. Both are rounded, as torch does."""
    residual, branch = residual.contiguous(), branch.contiguous()
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    width = weight.shape[0]
    rows = residual.numel() // width
    where = (residual.data_ptr(), branch.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr())
    numbers = (np.float32(scale), np.float32(epsilon), kind_of(residual.dtype))
    add_norm(*where, rows, width, *numbers, use_team())
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
        0 if weight.dim() == 1 else width, np.float32(epsilon), centred, kind_of(x.dtype), use_team(),
    )  # fmt: skip


@serial_in_order
def norm_columns(
    x: int, weight: int, bias: int, rows: int, stride: int, first: int, groups: int, width: int, step: int,
    epsilon: np.float32, centred: bool, kind: np.generic, team: int,
) -> None:  # fmt: skip
    """`norm_heads` by address; `step`: numbers from one group's weight to the next."""
    parallel_for(
        _columns_part, team, pieces_of(rows * groups * width * _WORK, rows * groups, team),
        (x, weight, bias, rows, stride, first, groups, width, step, epsilon, centred, kind),
    )  # fmt: skip


@serial_in_order
def _columns_part(
    piece: int, pieces: int, worker: int,
    x: int, weight: int, bias: int, rows: int, stride: int, first: int, groups: int, width: int, step: int,
    epsilon: np.float32, centred: bool, kind: np.generic,
) -> None:  # fmt: skip
    for unit in range(rows * groups * piece // pieces, rows * groups * (piece + 1) // pieces):
        row, group = unit // groups, unit % groups
        at = x + (row * stride + first + group * width) * size_of(kind)
        values = array(pointer(at, kind), (width,))
        weights = array(pointer(weight + group * step * 4, np.float32(0)), (width,))
        shifts = array(pointer(bias + group * step * 4, np.float32(0)), (width,))
        mean, total = np.float32(0), np.float32(0)
        if centred:
            for index in range(width):
                mean += widen(values[index])
            mean /= np.float32(width)
            for index in range(width):
                apart = widen(values[index]) - mean
                total += apart * apart
        else:
            total = square_sum(at, width, kind)
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
        for index in range(width):
            number = (widen(values[index]) - mean) * scale * weights[index]
            values[index] = narrow(number + shifts[index] if bias != 0 else number, kind)


@serial_in_order
def _norm_rows(
    x: int, weight: int, out: int, first: int, last: int, width: int, epsilon: np.float32, kind: np.generic
) -> None:
    values = array(pointer(x, kind), (last, width))
    weights = array(pointer(weight, np.float32(0)), (width,))
    results = array(pointer(out, kind), (last, width))
    for row in range(first, last):
        total = square_sum(x + row * width * size_of(kind), width, kind)
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
        for index in range(width):
            results[row, index] = narrow(widen(values[row, index]) * scale * weights[index], kind)


@serial_in_order
def norm(
    x: int, weight: int, out: int, rows: int, width: int, epsilon: np.float32, kind: np.generic, team: int
) -> None:
    parallel_for(
        _norm_part, team, pieces_of(rows * width * _WORK, rows, team), (x, weight, out, rows, width, epsilon, kind)
    )


@serial_in_order
def _norm_part(
    piece: int, pieces: int, worker: int,
    x: int, weight: int, out: int, rows: int, width: int, epsilon: np.float32, kind: np.generic,
) -> None:  # fmt: skip
    _norm_rows(x, weight, out, rows * piece // pieces, rows * (piece + 1) // pieces, width, epsilon, kind)


@serial_in_order
def _add_norm_part(
    piece: int, pieces: int, worker: int,
    residual: int, branch: int, weight: int, total: int, out: int, rows: int, width: int,
    factor: np.float32, epsilon: np.float32, kind: np.generic,
) -> None:  # fmt: skip
    first, last = rows * piece // pieces, rows * (piece + 1) // pieces
    left, right = array(pointer(residual, kind), (last, width)), array(pointer(branch, kind), (last, width))
    sums = array(pointer(total, kind), (last, width))
    for row in range(first, last):
        for index in range(width):
            product = widen(narrow(widen(right[row, index]) * factor, kind))
            sums[row, index] = narrow(widen(left[row, index]) + product, kind)
    _norm_rows(total, weight, out, first, last, width, epsilon, kind)


@serial_in_order
def add_norm(
    residual: int, branch: int, weight: int, total: int, out: int, rows: int, width: int, factor: np.float32,
    epsilon: np.float32, kind: np.generic, team: int,
) -> None:  # fmt: skip
    """`add_rms_norm` by address; `total` may be `residual`."""
    pieces = pieces_of(rows * width * _WORK, rows, team)
    parallel_for(
        _add_norm_part, team, pieces, (residual, branch, weight, total, out, rows, width, factor, epsilon, kind)
    )
