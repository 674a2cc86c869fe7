"""Products as compiled code reads them by address: x W^T + bias, packed or quantized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from asyncengine.kernels.cpu import gemm_quantized
from asyncengine.kernels.cpu.gemm_quantized import MATRIX_FIELDS, PANELS_AT, QuantizedMatrix, code_for

# What is known of a product: int64 by place. The address of its code (0: a packed weight, which is not rounded), that
# of its bias (0: none); then the fields of its matrix.
CODE, BIAS, MATRIX = range(3)
PRODUCT_FIELDS = MATRIX + MATRIX_FIELDS


class LinearWeights(NamedTuple):
    """The weights of one x W^T + bias: panels of `packed`, or a matrix of `gemm_quantized`."""

    weights: torch.Tensor | QuantizedMatrix
    bias: torch.Tensor | None
    inputs: int
    outputs: int

    def fields(self, dtype: torch.dtype) -> list[int]:
        """CODE .. and those of the matrix, for results of that type."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        if isinstance(self.weights, QuantizedMatrix):
            return [code_for(self.weights.form, dtype), bias, *self.weights.fields().tolist()]
        matrix = [0] * MATRIX_FIELDS
        matrix[PANELS_AT], matrix[gemm_quantized.INPUTS] = self.weights.data_ptr(), self.inputs
        matrix[gemm_quantized.OUTPUTS] = self.outputs
        return [0, bias, *matrix]


def forms_of(parts: Iterable[LinearWeights]) -> tuple[np.generic | None, np.generic | None]:
    """Kinds of products that there are, (quantized, packed): None for none, for which no code is compiled then."""
    rounded = {isinstance(part.weights, QuantizedMatrix) for part in parts}
    return np.uint8(0) if True in rounded else None, np.uint8(0) if False in rounded else None
