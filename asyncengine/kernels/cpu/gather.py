"""Copies: rows of a table by their numbers, which a step of a few tokens looks up, and columns side by side."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.calls import team_kernel
from asyncengine.kernels.cpu.jit import array, pointer, serial, with_gil
from asyncengine.kernels.cpu.team import use_team


@serial
def _copy_rows(places: int, table: int, out: int, count: int, width: int) -> None:
    """`width` is halves of a row."""
    wanted = array(pointer(places, np.int64(0)), (count,))
    results = array(pointer(out, np.uint16(0)), (count, width))
    for index in range(count):
        row = array(pointer(table + wanted[index] * width * 2, np.uint16(0)), (width,))
        for place in range(width):
            results[index, place] = row[place]


copy_few_rows = with_gil(_copy_rows)


class RowCopies:
    """Copies of a few rows of a table [rows, width] of 16 or 32 bits, contiguous; each overwrites the one before."""

    def __init__(self, table: torch.Tensor, most: int) -> None:
        """`most` rows at once."""
        self._table, self._memory = table, table.new_empty((most, table.shape[1]))
        self._at = table.data_ptr(), self._memory.data_ptr()
        self._width = table.shape[1] * table.itemsize // 2
        self._parts: dict[int, torch.Tensor] = {}

    def __call__(self, places: torch.Tensor) -> torch.Tensor:
        """[n, width]: rows `places` (int64 [n], contiguous, in range). The interpreter's lock is kept."""
        count = places.shape[0]
        copy_few_rows(places.data_ptr(), *self._at, count, self._width)
        found = self._parts.get(count)
        if found is None:
            found = self._parts[count] = self._memory[:count]
        return found


def joined(*parts: torch.Tensor) -> torch.Tensor:
    """[rows, all] or [rows, heads, all]: parts of 16 or 32 bits [rows, (heads,) columns of each] side by side.

    Columns lie one behind the other; rows and heads may be any distance apart.
    """
    first, *others = parts
    out = first.new_empty((*first.shape[:-1], first.shape[-1] + sum(part.shape[-1] for part in others)))
    at, size, heads = out.data_ptr(), out.element_size(), first.shape[1] if first.dim() == 3 else 1
    for part in parts:
        steps = part.stride(0) * size, part.stride(1) * size, out.shape[-1] * size
        bytes_of_row = part.shape[-1] * size
        copy_columns(part.data_ptr(), at, *steps, len(part), heads, bytes_of_row // 2, use_team())
        at += bytes_of_row
    return out


@team_kernel(lambda rows, heads, width: (rows * heads, rows * heads * width * 4))
@serial
def copy_columns(
    first: int, last: int, source: int, out: int, row_size: int, head_size: int, out_size: int, rows: int,
    heads: int, width: int,
) -> None:  # fmt: skip
    """One part of `joined` by address; `width` is halves of its columns, sizes are bytes to the next."""
    for row in range(first, last):
        numbers = array(pointer(source + row // heads * row_size + row % heads * head_size, np.uint16(0)), (width,))
        results = array(pointer(out + row * out_size, np.uint16(0)), (width,))
        for index in range(width):
            results[index] = numbers[index]
