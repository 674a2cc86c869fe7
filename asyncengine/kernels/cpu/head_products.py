"""Products of each head with a matrix of its own: what latent attention has around its pages.

Matrices of all heads lie one below the other as one packed weight, each from a panel of its own on. What multiplies
panels is that of `packed`: a row's result depends neither on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.kernels.cpu.calls import call, team_kernel
from asyncengine.kernels.cpu.jit import array, pointer, serial_in_order, tag_of
from asyncengine.kernels.cpu.packed import WIDTH, multiply_part
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import reads_worth

_EVEN = 16
"""Rows whose arithmetic takes as long as reading a panel."""
_ROWS = 256
"""Rows that are computed at once."""


def rows_of_head(outputs: int) -> int:
    """Rows of the packed weight for each head."""
    return -(-outputs // WIDTH) * WIDTH


def multiply_heads(x: torch.Tensor, panels: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Multiply the first `inputs` numbers of each head of x [rows, heads, inputs + behind] by the head's matrix
    [outputs, inputs]. Returns [rows, heads, behind + outputs]: the numbers behind the inputs, copied, then the product.

    `panels`: a packed weight [heads * rows_of_head(outputs), inputs] of x's type. In x a head's numbers are neighbours.
    """
    rows, heads, width = x.shape
    size, padded = x.element_size(), rows_of_head(outputs)
    out = torch.empty((rows, heads, width - inputs + outputs), dtype=x.dtype)
    scratch = torch.empty((heads, min(rows, _ROWS), inputs + (padded if padded > outputs else 0)), dtype=x.dtype)
    steps = x.stride(0) * size, x.stride(1) * size
    for first in range(0, rows, _ROWS):
        count = min(rows - first, _ROWS)
        multiply_each(
            x.data_ptr() + first * steps[0], *steps, panels.data_ptr(), out.data_ptr() + first * out.stride(0) * size,
            scratch.data_ptr(), count, heads, inputs, width - inputs, outputs, tag_of(x.dtype), size, use_team(),
        )  # fmt: skip
    return out


@team_kernel(
    lambda rows, heads, inputs, outputs, size: (heads, heads * inputs * outputs * size * reads_worth(rows, _EVEN))
)
@serial_in_order
def multiply_each(
    first: int, last: int, x: int, row_size: int, head_size: int, panels: int, out: int, scratch: int, rows: int,
    heads: int, inputs: int, behind: int, outputs: int, dtype: np.generic, size: int,
) -> None:  # fmt: skip
    """`multiply_heads` by address, of heads [first, last); sizes of x in bytes from a row or head to the next."""
    count = (outputs + WIDTH - 1) // WIDTH
    fits = (
        count * WIDTH == outputs
    )  # else the product, of whole panels, goes to scratch memory and is copied from there
    row, padded, out_row = inputs * size, 0 if fits else count * WIDTH * size, (behind + outputs) * size
    for head in range(first, last):
        source, target = x + head * head_size, out + head * out_row
        gathered = scratch + head * rows * (row + padded)
        _copy(source + row, row_size, target, heads * out_row, rows, behind * size)
        _copy(source, row_size, gathered, row, rows, row)
        product, stride = target + behind * size, heads * out_row
        if not fits:
            product, stride = gathered + rows * row, padded
        matrix = panels + head * count * WIDTH * row
        call(multiply_part, (0, 1, 0, gathered, matrix, 0, product, stride, rows, row, count, dtype, size))
        if not fits:
            _copy(product, padded, target + behind * size, heads * out_row, rows, outputs * size)


@serial_in_order
def _copy(source: int, source_size: int, target: int, target_size: int, rows: int, size: int) -> None:
    """Copy rows of `size` bytes, an even number; their beginnings are `source_size` and `target_size` bytes apart."""
    for row in range(rows):
        from_row = array(pointer(source + row * source_size, np.uint16(0)), (size // 2,))
        to_row = array(pointer(target + row * target_size, np.uint16(0)), (size // 2,))
        for index in range(size // 2):
            to_row[index] = from_row[index]
