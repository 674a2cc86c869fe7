"""Layer normalisation (Ba et al. 2016), alone or with the residual sum before it."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.jit import array, kind_of, narrow, pointer, serial, serial_in_order, widen
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of

_WORK = 12
"""Bytes that could be read while an element is computed."""


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """(x - mean) / deviation * weight + bias over the last dimension, in float32 inside and rounded once.

    x [..., width]; weight and bias float32 [width].
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    width = weight.shape[0]
    scales = (weight.data_ptr(), 0 if bias is None else bias.data_ptr())
    numbers = (np.float32(1), np.float32(epsilon), kind_of(x.dtype))
    normalise(x.data_ptr(), 0, *scales, 0, out.data_ptr(), x.numel() // width, width, *numbers, use_team())
    return out


def add_layer_norm(
    residual: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor, bias: torch.Tensor | None,
    epsilon: float, kept: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(sum, its `layer_norm`) of residual + branch * scale, all [..., width]: the norm is of the sum before it is
    rounded. Not `kept`: the norm in place of the sum."""
    residual, branch = residual.contiguous(), branch.contiguous()
    out = torch.empty_like(residual)
    total = torch.empty_like(residual) if kept else out
    width = weight.shape[0]
    normalise(
        residual.data_ptr(), branch.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        total.data_ptr() if kept else 0, out.data_ptr(), residual.numel() // width, width, np.float32(scale),
        np.float32(epsilon), kind_of(residual.dtype), use_team(),
    )  # fmt: skip
    return total, out


@serial
def _normalise_part(
    piece: int, pieces: int, worker: int,
    residual: int, branch: int, weight: int, bias: int, total: int, out: int, rows: int, width: int,
    factor: np.float32, epsilon: np.float32, kind: np.generic,
) -> None:  # fmt: skip
    """A row is read again for each sum over it, from the nearest cache. Without a branch, its place is the row's own
    and its factor 0 would not do for infinities: the sum is the row."""
    first, last = rows * piece // pieces, rows * (piece + 1) // pieces
    left = array(pointer(residual, kind), (last, width))
    right = array(pointer(branch if branch != 0 else residual, kind), (last, width))
    weights = array(pointer(weight, np.float32(0)), (width,))
    added = array(pointer(bias if bias != 0 else weight, np.float32(0)), (width,))
    sums = array(pointer(total if total != 0 else out, kind), (last, width))
    results = array(pointer(out, kind), (last, width))
    alone, biased = branch == 0, bias != 0
    for row in range(first, last):
        mean, variance = np.float32(0), np.float32(0)
        if alone:
            for index in range(width):
                mean += widen(left[row, index])
        else:
            for index in range(width):
                mean += widen(left[row, index]) + widen(right[row, index]) * factor
        mean = mean / np.float32(width)
        if alone:
            for index in range(width):
                apart = widen(left[row, index]) - mean
                variance += apart * apart
        else:
            for index in range(width):
                apart = widen(left[row, index]) + widen(right[row, index]) * factor - mean
                variance += apart * apart
        scale = np.float32(1) / np.sqrt(variance / np.float32(width) + epsilon)
        if alone and biased:
            for index in range(width):
                results[row, index] = narrow(
                    (widen(left[row, index]) - mean) * scale * weights[index] + added[index], kind
                )
        elif alone:
            for index in range(width):
                results[row, index] = narrow((widen(left[row, index]) - mean) * scale * weights[index], kind)
        elif biased:
            for index in range(width):
                value = widen(left[row, index]) + widen(right[row, index]) * factor
                sums[row, index] = narrow(value, kind)
                results[row, index] = narrow((value - mean) * scale * weights[index] + added[index], kind)
        else:
            for index in range(width):
                value = widen(left[row, index]) + widen(right[row, index]) * factor
                sums[row, index] = narrow(value, kind)
                results[row, index] = narrow((value - mean) * scale * weights[index], kind)


@serial_in_order
def normalise(
    residual: int, branch: int, weight: int, bias: int, total: int, out: int, rows: int, width: int,
    factor: np.float32, epsilon: np.float32, kind: np.generic, team: int,
) -> None:  # fmt: skip
    """The same by address. No branch, no bias, no place for the sum: 0."""
    parallel_for(
        _normalise_part, team, pieces_of(rows * width * _WORK, rows, team),
        (residual, branch, weight, bias, total, out, rows, width, factor, epsilon, kind),
    )  # fmt: skip
