"""Everything between two attentions in one call: the bits that the kernels give one by one, and no memory beyond."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from asyncengine.kernels.cpu import activation, gemm_quantized, norm, packed, quantize
from asyncengine.kernels.cpu.fused_layer import DOWN, GATE_UP, NEXT, OUT, FusedLayerKernel
from asyncengine.kernels.cpu.linears import LinearWeights

ATTENDED, WIDTH, BETWEEN, AFTER = 96, 512, 320, 224
"""Numbers of a row: of attention's result, the residual, the gated half, the next projection."""
EPSILONS = (1e-6, 1e-5)
GUARD = 64
GATES = (activation.silu_and_mul, activation.gelu_tanh_and_mul, activation.gelu_and_mul)
ROWS = (1, 2, 13, 40)
"""One thread and several, for norms as for activations; one tile and several."""


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def product(outputs: int, inputs: int, bits: int, dtype: torch.dtype, bias: bool) -> LinearWeights:
    weight = random(outputs, inputs, dtype=dtype) * inputs**-0.5
    added = random(outputs, dtype=torch.float32) if bias else None
    if bits == 0:
        return LinearWeights(packed.pack_weight(weight), added, inputs, outputs)
    return LinearWeights(quantize.quantize(weight, bits), added, inputs, outputs)


def multiply(x: torch.Tensor, by: LinearWeights) -> torch.Tensor:
    out = x.new_empty((x.shape[0], by.outputs))
    if isinstance(by.weights, torch.Tensor):
        packed.gemm(x, by.weights, out, by.bias)
    else:
        gemm_quantized.gemm(x, by.weights, out, by.bias)
    return out


def by_place(linears: list[list[LinearWeights]]) -> dict[int, list[LinearWeights]]:
    return dict(zip((OUT, GATE_UP, DOWN, NEXT), linears, strict=False))


class Parts:
    """A span and the same one by one."""

    def __init__(self, bits: int, dtype: torch.dtype, gate: Any, projects: bool, bias: bool, factor: float) -> None:
        shapes = [(WIDTH, ATTENDED), (2 * BETWEEN, WIDTH), (WIDTH, BETWEEN), (AFTER, WIDTH)][: 4 if projects else 3]
        self.products = [product(*shape, bits, dtype, bias) for shape in shapes]
        self.norms = [random(WIDTH, dtype=torch.float32), random(WIDTH + 1, dtype=torch.float32)[:WIDTH].clone()]
        self.gate, self.factor = gate, factor
        form = activation.activation_id(gate)
        assert form is not None
        norms = list(zip(self.norms, EPSILONS, strict=True))
        self.span = FusedLayerKernel(by_place([[each] for each in self.products]), norms, form, factor, dtype)

    def one_by_one(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, both, down, *after = self.products
        total, x = norm.add_rms_norm(residual, multiply(attended, out), self.factor, self.norms[0], EPSILONS[0])
        branch = multiply(self.gate(multiply(x, both)), down)
        total, x = norm.add_rms_norm(total, branch, self.factor, self.norms[1], EPSILONS[1])
        return total, multiply(x, after[0]) if after else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize(
    ("gate", "projects", "bias", "factor"), [(0, True, False, 1.0), (1, False, True, 0.22), (2, True, True, 1.0)]
)
def test_the_bits_of_the_parts(
    dtype: torch.dtype, bits: int, gate: int, projects: bool, bias: bool, factor: float
) -> None:
    parts = Parts(bits, dtype, GATES[gate], projects, bias, factor)
    for rows in ROWS:
        attended, residual = random(rows, ATTENDED, dtype=dtype), random(rows, WIDTH, dtype=dtype)
        total, expected = parts.one_by_one(attended, residual)
        size = parts.span.scratch_bytes(rows, dtype.itemsize)
        scratch = torch.full((size + GUARD,), 77, dtype=torch.uint8)
        found = parts.span(attended, residual, scratch)
        assert torch.equal(found, expected)
        assert torch.equal(residual, total)
        assert (scratch[size:] == 77).all(), "more memory was used than was asked for"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_mixed_forms_side_by_side(dtype: torch.dtype) -> None:
    """Quantized and not, several in one linear: the bits that they give one by one."""
    shapes = [
        [(256, ATTENDED, 4), (256, ATTENDED, 8)], [(320, WIDTH, 0), (320, WIDTH, 4)], [(WIDTH, BETWEEN, 8)],
        [(64, WIDTH, 4), (32, WIDTH, 0), (128, WIDTH, 8)],
    ]  # fmt: skip
    linears, firsts = [], []
    for parts in shapes:
        made = [product(*part, dtype, True) for part in parts]
        firsts.append([sum(each.outputs for each in made[:place]) for place in range(len(made))])
        linears.append([each._replace(first=first) for each, first in zip(made, firsts[-1], strict=True)])
    norms = [(random(WIDTH, dtype=torch.float32), EPSILONS[0])] * 2
    span = FusedLayerKernel(by_place(linears), norms, 0, 1.0, dtype)
    for rows in (1, 13):
        attended, residual = random(rows, ATTENDED, dtype=dtype), random(rows, WIDTH, dtype=dtype)

        def all_of(x: torch.Tensor, place: int) -> torch.Tensor:
            return torch.cat([multiply(x, each) for each in linears[place]], dim=1)

        total, x = norm.add_rms_norm(residual, all_of(attended, 0), 1.0, *norms[0])
        branch = all_of(GATES[0](all_of(x, 1)), 2)
        total, x = norm.add_rms_norm(total, branch, 1.0, *norms[1])
        scratch = torch.empty(span.scratch_bytes(rows, dtype.itemsize), dtype=torch.uint8)
        assert torch.equal(span(attended, residual, scratch), all_of(x, 3))
        assert torch.equal(residual, total)


def test_weights_are_held() -> None:
    """The compiled code has addresses only."""
    parts = Parts(0, torch.float32, GATES[0], True, True, 1.0)
    attended, residual = random(2, ATTENDED, dtype=torch.float32), random(2, WIDTH, dtype=torch.float32)
    _, expected = parts.one_by_one(attended, residual)
    span = parts.span
    del parts
    taken = [torch.full((2**16,), float("nan")) for _ in range(64)]  # memory that was free would be taken by these
    scratch = torch.empty(span.scratch_bytes(2, 4), dtype=torch.uint8)
    assert torch.equal(span(attended, residual, scratch), expected)
    assert taken


def test_forms_of_activations() -> None:
    assert [activation.activation_id(gate) for gate in GATES] == [0, 1, 2]
    assert activation.activation_id(torch.nn.functional.silu) is None
    assert activation.activation_id(None) is None
