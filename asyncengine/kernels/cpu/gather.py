"""Rows of a table, by their numbers: what a step of a few tokens looks up."""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.jit import array, pointer, serial, with_gil


@serial
def _copy_rows(places: int, table: int, out: int, count: int, width: int) -> None:
    """`width` is halves of a row."""
    wanted = array(pointer(places, np.int64(0)), (count,))
    results = array(pointer(out, np.uint16(0)), (count, width))
    for index in range(count):
        row = array(pointer(table + wanted[index] * width * 2, np.uint16(0)), (width,))
        for place in range(width):
            results[index, place] = row[place]


_copy_few_rows = with_gil(_copy_rows)


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
        _copy_few_rows(places.data_ptr(), *self._at, count, self._width)
        found = self._parts.get(count)
        if found is None:
            found = self._parts[count] = self._memory[:count]
        return found
