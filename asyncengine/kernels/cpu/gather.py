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


def copy_rows(places: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """out [n, width] = rows `places` (int64 [n], in range) of a table [rows, width] of 16 or 32 bits, all contiguous.

    For a few rows: the interpreter's lock is kept.
    """
    width = out.shape[-1] * out.itemsize // 2
    _copy_few_rows(places.data_ptr(), table.data_ptr(), out.data_ptr(), places.numel(), width)
