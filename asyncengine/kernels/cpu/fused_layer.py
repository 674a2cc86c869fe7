"""What stands between one layer's attention and the next one's, in one call: for steps of a few tokens.

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
from asyncengine.kernels.cpu.gemm_quantized import multiply_rounded
from asyncengine.kernels.cpu.jit import array, kind_of, pointer, serial_in_order
from asyncengine.kernels.cpu.lora import add_adapters
from asyncengine.kernels.cpu.norm import add_norm
from asyncengine.kernels.cpu.packed import multiply, panel_block
from asyncengine.kernels.cpu.team import use_team

_FIELDS = 5
_PRODUCTS = 4


class Product(NamedTuple):
    """One x W^T + bias as `panels` or `quantized` take it."""

    weights: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    inputs: int
    outputs: int
    bits: int
    """Of a weight: 8, 4, or 0 for one in panels that is not rounded."""

    def fields(self) -> list[int]:
        addresses = [0 if part is None else part.data_ptr() for part in (self.weights, self.scales, self.bias)]
        return [*addresses, self.inputs, self.outputs]


class Span:
    """Output projection, merged gate and up, down and, unless the last norm is the model's, the projection after it.

    `products` are those, all of the same bits; `norms` weight and epsilon of the two, `form` that of the activation,
    `factor` what a branch is multiplied by before it is added.
    """

    def __init__(
        self, products: Sequence[Product], norms: Sequence[tuple[torch.Tensor, float]], form: int, factor: float
    ) -> None:
        self._held = (products, norms)  # an address keeps nothing where it is
        bits = products[0].bits
        self.bits = None if bits == 0 else np.uint8(8) if bits == 8 else np.int8(4)
        """As `run_span` takes it."""
        self.settings = (
            np.float32(factor),
            np.float32(norms[0][1]),
            np.float32(norms[1][1]),
            form,
            len(products) == _PRODUCTS,
        )
        """(factor, both epsilons, form, whether there is a projection at the end)"""
        self.outputs = products[-1].outputs if len(products) == _PRODUCTS else products[0].outputs
        out, both, down = products[:3]
        self._row = 2 * out.outputs + both.outputs + down.inputs
        self._inputs = max(product.inputs for product in products)
        fields = [number for product in products for number in product.fields()]
        fields += [0] * _FIELDS * (_PRODUCTS - len(products))
        self._record = np.array([*fields, *(weight.data_ptr() for weight, _ in norms)], dtype=np.int64)
        self.address: int = self._record.ctypes.data

    def scratch_bytes(self, rows: int, size: int) -> int:
        """What a call needs of `scratch`, for numbers of `size` bytes."""
        rounded = gemm_quantized.scratch_bytes(rows, self._inputs) if self.bits is not None else 0
        return rows * self._row * size + rounded

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """[rows, outputs] from attention's result [rows, heads * dim]; the residual [rows, width] is added to.

        All contiguous and of one type.
        """
        rows, size = residual.shape[0], residual.element_size()
        out = residual.new_empty((rows, self.outputs))
        run_span(
            self.address, attended.data_ptr(), residual.data_ptr(), out.data_ptr(), scratch.data_ptr(), rows,
            *self.settings, *packed.cut(rows), self.bits, kind_of(residual.dtype), size, 0, 0, 0, 0, use_team(),
        )  # fmt: skip
        return out


@serial_in_order
def run_span(
    record: int, attended: int, residual: int, out: int, scratch: int, rows: int, factor: np.float32,
    first_epsilon: np.float32, second_epsilon: np.float32, form: int, projects: bool, tile: int, tiles: int,
    bits: np.generic | None, kind: np.generic, size: int, adapters: int, product: int, adapter_rows: int, memory: int,
    team: int,
) -> None:  # fmt: skip
    """A `Span` by address. `bits` says by its type what weights are rounded to; None: they are not (and no code for
    rounded ones is compiled). `adapters`, `adapter_rows` and `memory` are `AdapterRecords` of all products (0: none),
    of which the first here is number `product`."""
    fields = array(pointer(record, np.int64(0)), (_PRODUCTS * _FIELDS + 2,))
    width, both_width = fields[4], fields[9]
    branch, normed = scratch, scratch + rows * width * size
    both = normed + rows * width * size
    inner = both + rows * both_width * size
    rounded = inner + rows * both_width // 2 * size
    for step in range(_PRODUCTS if projects else _PRODUCTS - 1):
        own = fields[step * _FIELDS : (step + 1) * _FIELDS]
        source = attended if step == 0 else inner if step == 2 else normed
        target = both if step == 1 else out if step == 3 else branch
        multiply_any(source, own, target, rounded, rows, tile, tiles, bits, kind, size, team)
        add_adapters(source, target, adapters, product + step, adapter_rows, memory, kind, team)
        if step == 0:
            add_norm(residual, branch, fields[20], residual, normed, rows, width, factor, first_epsilon, kind, team)
        elif step == 1:
            gate(both, inner, rows, both_width // 2, form, kind, team)
        elif step == 2:
            after = normed if projects else out
            add_norm(residual, branch, fields[21], residual, after, rows, width, factor, second_epsilon, kind, team)


@serial_in_order
def multiply_any(
    x: int, product: NDArray[np.int64], out: int, rounded: int, rows: int, tile: int, tiles: int,
    bits: np.generic | None, kind: np.generic, size: int, team: int,
) -> None:  # fmt: skip
    """The product whose `Product.fields` are given. `rounded` is where x goes when it is rounded."""
    if bits is None:
        row, count = product[3] * size, product[4] // packed.WIDTH
        block = panel_block(rows, row)
        multiply(x, product[0], product[2], out, rows, row, count, tile, tiles, block, kind, kind, size, team)
    else:
        multiply_rounded(
            x, product[0], product[1], product[2], out, rounded, rows, product[3], product[4], bits, kind, kind, size,
            team,
        )  # fmt: skip
