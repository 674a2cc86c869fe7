"""Linears as compiled code reads them: one x W^T + bias or several side by side, packed or quantized, by address."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.kernels.cpu import gemm_quantized, packed
from asyncengine.kernels.cpu.gemm_quantized import (
    MATRIX_FIELDS,
    PANELS_AT,
    QuantizedMatrix,
    code_for,
    multiply_rounded,
)
from asyncengine.kernels.cpu.jit import array, pointer, serial_in_order
from asyncengine.kernels.cpu.packed import multiply, panels_at_once

# What is known of a product: int64 by place. The address of its code (0: a packed weight, which is not rounded), that
# of its bias (0: none), the column of the result where its outputs begin; then the fields of its matrix.
CODE, BIAS, FIRST, MATRIX = range(4)
PRODUCT_FIELDS = MATRIX + MATRIX_FIELDS
# What is known of a linear, one or several products of the same x side by side: the address of the first, and sizes.
PRODUCTS, COUNT, INPUTS, OUTPUTS = range(4)
LINEAR_FIELDS = 4


class LinearWeights(NamedTuple):
    """The weights of one x W^T + bias: panels of `packed`, or a matrix of `gemm_quantized`."""

    weights: torch.Tensor | QuantizedMatrix
    bias: torch.Tensor | None
    inputs: int
    outputs: int
    first: int = 0
    """The column of the result where these outputs begin."""

    def fields(self, dtype: torch.dtype) -> list[int]:
        """CODE .. and those of the matrix, for results of that type."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        if isinstance(self.weights, QuantizedMatrix):
            return [code_for(self.weights.form, dtype), bias, self.first, *self.weights.fields().tolist()]
        matrix = [0] * MATRIX_FIELDS
        matrix[PANELS_AT], matrix[gemm_quantized.INPUTS] = self.weights.data_ptr(), self.inputs
        matrix[gemm_quantized.OUTPUTS] = self.outputs
        return [0, bias, self.first, *matrix]


class LinearRecord:
    """One linear as compiled code reads it: `parts` are side by side in its result."""

    def __init__(self, parts: Sequence[LinearWeights], dtype: torch.dtype) -> None:
        self.parts = tuple(parts)  # an address keeps nothing where it is
        self.inputs, self.outputs = parts[0].inputs, sum(part.outputs for part in parts)
        self._products = np.array([part.fields(dtype) for part in parts], dtype=np.int64)
        self.fields = [self._products.ctypes.data, len(parts), self.inputs, self.outputs]
        """PRODUCTS .. OUTPUTS."""


def forms_of(parts: Iterable[LinearWeights]) -> tuple[np.generic | None, np.generic | None]:
    """Which products there are, (quantized, packed): None for none, for which no code is compiled then."""
    rounded = {isinstance(part.weights, QuantizedMatrix) for part in parts}
    return np.uint8(0) if True in rounded else None, np.uint8(0) if False in rounded else None


@serial_in_order
def multiply_any(
    x: int, linear: NDArray[np.int64], out: int, rounded: int, rows: int, tile: int, tiles: int,
    rounds: np.generic | None, packs: np.generic | None, kind: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    """x W^T + bias of a `LinearRecord`. `rounds` and `packs` are what `forms_of` says, `rounded` is where x goes
    when it is rounded."""
    stride = linear[OUTPUTS]
    products = array(pointer(linear[PRODUCTS], np.int64(0)), (linear[COUNT], PRODUCT_FIELDS))
    for index in range(linear[COUNT]):
        product = products[index]
        target = out + product[FIRST] * size
        if rounds is None:
            _multiply_packed(x, product, target, stride, rows, tile, tiles, kind, size, team)
        elif packs is None or product[CODE] != 0:
            multiply_rounded(
                x, product[MATRIX:], product[CODE], product[BIAS], target, stride, rounded, rows, kind, kind, size, team
            )
        else:
            _multiply_packed(x, product, target, stride, rows, tile, tiles, kind, size, team)


@serial_in_order
def _multiply_packed(
    x: int, product: NDArray[np.int64], out: int, stride: int, rows: int, tile: int, tiles: int, kind: np.generic,
    size: int, team: int,
) -> None:  # fmt: skip
    matrix = product[MATRIX:]
    row, count = matrix[gemm_quantized.INPUTS] * size, matrix[gemm_quantized.OUTPUTS] // packed.WIDTH
    multiply(
        x, matrix[PANELS_AT], product[BIAS], out, stride * size, rows, row, count, tile, tiles,
        panels_at_once(rows, row), kind, size, team,
    )  # fmt: skip
