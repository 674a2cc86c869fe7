"""The fused decoder layer: what stands between one layer's attention and the next one's, in one call, for short steps.

The output projection, the residual sum with its norm, the gated MLP, the next sum and norm, and the merged projection
of the layer that follows. The kernels are those of the other modules and give the same bits; what is saved is what
Python takes to call them one by one, which for one token is a tenth of a step (CUDA graphs save the same on a GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.kernels.cpu import gemm_quantized, packed
from asyncengine.kernels.cpu.activation import gate
from asyncengine.kernels.cpu.gemm_quantized import (
    MATRIX_FIELDS,
    PANELS_AT,
    QuantizedMatrix,
    code_for,
    multiply_rounded,
)
from asyncengine.kernels.cpu.jit import array, kind_of, pointer, serial_in_order
from asyncengine.kernels.cpu.lora import add_adapters
from asyncengine.kernels.cpu.norm import add_norm
from asyncengine.kernels.cpu.packed import multiply, panels_at_once
from asyncengine.kernels.cpu.team import use_team

# What is known of a product: int64 by place. The address of its code (0: a packed weight, which is not rounded), that
# of its bias (0: none), the column of the result where its outputs begin; then the fields of its matrix.
CODE, BIAS, FIRST, MATRIX = range(4)
PRODUCT_FIELDS = MATRIX + MATRIX_FIELDS
# What is known of a linear, one or several products of the same x side by side: the address of the first, and sizes.
PRODUCTS, COUNT, INPUTS, OUTPUTS = range(4)
LINEAR_FIELDS = 4
# The linears of a layer, in the order they run; NEXT_QKV is the next layer's, if there is one.
OUT_PROJECTION, GATE_UP, DOWN, NEXT_QKV = range(4)
_LINEARS = 4
# Behind them in a layer's record: addresses of the weights of the norm before the MLP, and of the one after it.
MLP_NORM, NEXT_NORM = range(2)
_NORMS = 2


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


def forms_of(records: Sequence[LinearRecord]) -> tuple[np.generic | None, np.generic | None]:
    """Which products there are, (quantized, packed): None for none, for which no code is compiled then."""
    rounded = {isinstance(part.weights, QuantizedMatrix) for record in records for part in record.parts}
    return np.uint8(0) if True in rounded else None, np.uint8(0) if False in rounded else None


class FusedLayerKernel:
    """One layer's linears and norms from attention's result to what the next attention reads, or the output layer.

    `linears` are OUT_PROJECTION .. NEXT_QKV, the last one left out where the model's last norm follows. `norms` are
    weight and epsilon of MLP_NORM and NEXT_NORM, `activation` is what `activation_id` says of that of the MLP, `factor`
    what a branch is multiplied by before it is added to the residual, `dtype` the type of all rows.
    """

    def __init__(
        self,
        linears: Sequence[Sequence[LinearWeights]],
        norms: Sequence[tuple[torch.Tensor, float]],
        activation: int,
        factor: float,
        dtype: torch.dtype,
    ) -> None:
        self.records = [LinearRecord(parts, dtype) for parts in linears]
        self._norms = norms
        projects = len(linears) == _LINEARS
        epsilons = np.float32(norms[MLP_NORM][1]), np.float32(norms[NEXT_NORM][1])
        self.settings = (np.float32(factor), *epsilons, activation, projects)
        """(factor, epsilons of MLP_NORM and NEXT_NORM, activation, whether there is a NEXT_QKV)"""
        out, gate_up, down = self.records[:NEXT_QKV]
        self.outputs = self.records[NEXT_QKV].outputs if projects else out.outputs
        self._row = 2 * out.outputs + gate_up.outputs + down.inputs
        self._inputs = max(linear.inputs for linear in self.records)
        self._record = np.zeros(_LINEARS * LINEAR_FIELDS + _NORMS, dtype=np.int64)
        for place, linear in enumerate(self.records):
            self._record[place * LINEAR_FIELDS : (place + 1) * LINEAR_FIELDS] = linear.fields
        self._record[-_NORMS:] = [weight.data_ptr() for weight, _ in norms]
        self.address: int = self._record.ctypes.data

    def scratch_bytes(self, rows: int, size: int) -> int:
        """What a call needs of `scratch`, for numbers of `size` bytes."""
        rounded = 0 if forms_of(self.records)[0] is None else gemm_quantized.scratch_bytes(rows, self._inputs)
        return rows * self._row * size + rounded

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """[rows, outputs] from attention's result [rows, heads * dim]; the residual [rows, width] is added to.

        All contiguous and of one type.
        """
        rows, size = residual.shape[0], residual.element_size()
        out = residual.new_empty((rows, self.outputs))
        run_fused_layer(
            self.address, attended.data_ptr(), residual.data_ptr(), out.data_ptr(), scratch.data_ptr(), rows,
            *self.settings, *packed.tiles_for(rows), *forms_of(self.records), kind_of(residual.dtype), size, 0, 0, 0, 0,
            use_team(),
        )  # fmt: skip
        return out


@serial_in_order
def run_fused_layer(
    record: int, attended: int, residual: int, out: int, scratch: int, rows: int, factor: np.float32,
    first_epsilon: np.float32, second_epsilon: np.float32, activation: int, projects: bool, tile: int, tiles: int,
    rounds: np.generic | None, packs: np.generic | None, kind: np.generic, size: int, adapters: int,
    first_linear: int, adapter_rows: int, memory: int, team: int,
) -> None:  # fmt: skip
    """A `FusedLayerKernel` by address. `rounds`, `packs` are what `forms_of` says. `adapters`, `adapter_rows`,
    `memory`: `AdapterRecords` of the model's linears (0: none), of which the first here is number `first_linear`."""
    linears = array(pointer(record, np.int64(0)), (_LINEARS, LINEAR_FIELDS))
    norms = array(pointer(record + _LINEARS * LINEAR_FIELDS * 8, np.int64(0)), (_NORMS,))
    width, inner_width = linears[OUT_PROJECTION, OUTPUTS], linears[GATE_UP, OUTPUTS] // 2
    branch, normed = scratch, scratch + rows * width * size
    gate_up = normed + rows * width * size
    inner = gate_up + rows * inner_width * 2 * size
    rounded = inner + rows * inner_width * size
    for place in range(_LINEARS if projects else NEXT_QKV):
        source = attended if place == OUT_PROJECTION else inner if place == DOWN else normed
        target = gate_up if place == GATE_UP else out if place == NEXT_QKV else branch
        multiply_any(source, linears[place], target, rounded, rows, tile, tiles, rounds, packs, kind, size, team)
        add_adapters(source, target, adapters, first_linear + place, adapter_rows, memory, kind, team)
        if place == OUT_PROJECTION:
            add_norm(
                residual, branch, norms[MLP_NORM], residual, normed, rows, width, factor, first_epsilon, kind, team
            )
        elif place == GATE_UP:
            gate(gate_up, inner, rows, inner_width, activation, kind, team)
        elif place == DOWN:
            after = normed if projects else out
            add_norm(
                residual, branch, norms[NEXT_NORM], residual, after, rows, width, factor, second_epsilon, kind, team
            )


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
        panels_at_once(rows, row), kind, kind, size, team,
    )  # fmt: skip
