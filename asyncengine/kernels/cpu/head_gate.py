"""Gates of attention's heads (`layers.head_gate`): taking queries out from between them, and multiplying by them."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.activation import exponential
from asyncengine.kernels.cpu.calls import team_kernel
from asyncengine.kernels.cpu.jit import array, narrow, pointer, serial_in_order, tag_of, widen
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.vectors import size_of

_COPY, _WORK = 4, 16
"""Bytes that could be read while a number is copied, or multiplied."""


def split_queries(projected: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """The columns [T, width - heads * dim] of projections [T, width] that are not gates: a head's follow its query."""
    rows, width = projected.shape
    out = torch.empty((rows, width - heads * dim), dtype=projected.dtype)
    split(projected.data_ptr(), out.data_ptr(), rows, width, heads, dim, tag_of(projected.dtype), use_team())
    return out


def gate_heads(
    attended: torch.Tensor, projected: torch.Tensor, heads: int, dim: int, one_each: bool = False
) -> torch.Tensor:
    """`attended` [T, heads * dim] times the sigmoid of the gates in `projected` [T, width]. `one_each`: a head has one
    gate, in the last columns."""
    attended = attended.contiguous()
    out = torch.empty_like(attended)
    rows, width = projected.shape
    addresses = (attended.data_ptr(), projected.data_ptr(), out.data_ptr())
    multiply_gates(*addresses, rows, width, heads, dim, one_each, tag_of(projected.dtype), use_team())
    return out


@team_kernel(lambda rows, width: (rows, rows * width * _COPY))
@serial_in_order
def split(
    first: int, last: int, projected: int, out: int, rows: int, width: int, heads: int, dim: int, dtype: np.generic
) -> None:
    """`split_queries` by address."""
    size = heads * dim
    sources = array(pointer(projected, dtype), (rows, width))
    results = array(pointer(out, dtype), (rows, width - size))
    for row in range(first, last):
        for head in range(heads):
            for index in range(dim):
                results[row, head * dim + index] = sources[row, 2 * head * dim + index]
        for index in range(size, width - size):
            results[row, index] = sources[row, index + size]


@team_kernel(lambda rows, heads, dim: (rows * heads, rows * heads * dim * _WORK))
@serial_in_order
def multiply_gates(
    first: int, last: int, attended: int, projected: int, out: int, rows: int, width: int, heads: int, dim: int,
    one_each: bool, dtype: np.generic,
) -> None:  # fmt: skip
    """`gate_heads` by address; `out` may be `attended`."""
    size = size_of(dtype)
    for unit in range(first, last):
        row, head = unit // heads, unit % heads
        values = array(pointer(attended + unit * dim * size, dtype), (dim,))
        column = width - heads + head if one_each else (2 * head + 1) * dim
        gates = array(pointer(projected + (row * width + column) * size, dtype), (dim,))
        results = array(pointer(out + unit * dim * size, dtype), (dim,))
        for index in range(dim):
            sigmoid = np.float32(1) / (np.float32(1) + exponential(-widen(gates[0 if one_each else index])))
            results[index] = narrow(widen(values[index]) * sigmoid, dtype)
