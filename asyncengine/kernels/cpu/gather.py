"""Copies: rows of a table by index, which a step of a few tokens looks up, and columns side by side."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.calls import team_kernel
from asyncengine.kernels.cpu.jit import array, pointer, serial, with_gil
from asyncengine.kernels.cpu.team import use_team


@serial
def _copy_rows(indices: int, table: int, out: int, count: int, width: int) -> None:
    """Copy `count` rows of `width` numbers of 16 bits; `indices` is the address of their int64 row numbers."""
    row_indices = array(pointer(indices, np.int64(0)), (count,))
    results = array(pointer(out, np.uint16(0)), (count, width))
    for index in range(count):
        row = array(pointer(table + row_indices[index] * width * 2, np.uint16(0)), (width,))
        for column in range(width):
            results[index, column] = row[column]


copy_few_rows = with_gil(_copy_rows)


class RowCopies:
    """Lookups of a few rows of a contiguous table [rows, width] of 16 or 32 bits; each overwrites the one before."""

    def __init__(self, table: torch.Tensor, most_rows: int) -> None:
        """`most_rows`: the most rows of one lookup."""
        self._table, self._memory = table, table.new_empty((most_rows, table.shape[1]))
        self._at = table.data_ptr(), self._memory.data_ptr()
        self._width = table.shape[1] * table.itemsize // 2
        self._views = [self._memory[:count] for count in range(most_rows + 1)]  # made once: slicing takes microseconds

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows [n, width] of the table at `indices`, int64 [n], contiguous, in range, n at most `most_rows`. The
        interpreter's lock is kept."""
        count = indices.shape[0]
        copy_few_rows(indices.data_ptr(), *self._at, count, self._width)
        return self._views[count]


def joined(*tensors: torch.Tensor) -> torch.Tensor:
    """Concatenation in the last dimension of tensors of 16 or 32 bits, [rows, columns] or [rows, heads, columns].

    Columns lie one behind the other; rows and heads may be any distance apart.
    """
    first, *others = tensors
    out = first.new_empty((*first.shape[:-1], first.shape[-1] + sum(tensor.shape[-1] for tensor in others)))
    at, size, heads = out.data_ptr(), out.element_size(), first.shape[1] if first.dim() == 3 else 1
    for tensor in tensors:
        strides = tensor.stride(0) * size, tensor.stride(1) * size, out.shape[-1] * size
        bytes_of_row = tensor.shape[-1] * size
        copy_columns(tensor.data_ptr(), at, *strides, len(tensor), heads, bytes_of_row // 2, use_team())
        at += bytes_of_row
    return out


@team_kernel(lambda rows, heads, width: (rows * heads, rows * heads * width * 4))
@serial
def copy_columns(
    first: int, last: int, source: int, out: int, row_size: int, head_size: int, out_size: int, rows: int,
    heads: int, width: int,
) -> None:  # fmt: skip
    """One tensor's columns of `joined` by address: `width` numbers of 16 bits; sizes are bytes to the next."""
    for row in range(first, last):
        numbers = array(pointer(source + row // heads * row_size + row % heads * head_size, np.uint16(0)), (width,))
        results = array(pointer(out + row * out_size, np.uint16(0)), (width,))
        for index in range(width):
            results[index] = numbers[index]
