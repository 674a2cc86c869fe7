"""Compiled layer norms and activations give torch's numbers, and a row's are the same bits whatever is beside it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from asyncengine.execution.layers.kernels import ACTIVATIONS, PARAMETRIC, CompiledKernels, LayerKernels
from asyncengine.kernels.cpu.activation import elementwise
from asyncengine.kernels.cpu.norm import add_layer_norm, layer_norm
from asyncengine.kernels.cpu.team import Team

TYPES = [torch.float32, torch.bfloat16]


def inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(width)
    x, branch = (torch.randn(rows, width) * 3 + 5 for _ in range(2))
    return x.to(dtype), branch.to(dtype), torch.randn(width), torch.randn(width)


def near(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Checks that a result is within a rounding of the exact number, and of float32."""
    step = 2.0**-8 if found.dtype == torch.bfloat16 else 2e-6
    assert (found.double() - exact).abs().max() <= step * exact.abs().max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [16, 48, 64, 400])
def test_layer_norm(width: int, dtype: torch.dtype) -> None:
    x, branch, weight, bias = inputs(37, width, dtype)
    wide = [part.double() for part in (x, branch, weight, bias)]
    near(layer_norm(x, weight, bias, 1e-5), functional.layer_norm(wide[0], (width,), wide[2], wide[3], 1e-5))
    sums = wide[0] + wide[1] * 0.5
    total, normed = add_layer_norm(x, branch, 0.5, weight, bias, 1e-5, keep_sum=True)
    near(total, sums)
    near(normed, functional.layer_norm(sums, (width,), wide[2], wide[3], 1e-5))
    assert torch.equal(add_layer_norm(x, branch, 0.5, weight, bias, 1e-5, keep_sum=False)[1], normed)
    with Team(2, piece=1).joined():
        assert torch.equal(add_layer_norm(x, branch, 0.5, weight, bias, 1e-5, keep_sum=True)[1], normed)
    for row in (0, 7, 36):
        assert torch.equal(layer_norm(x[row], weight, bias, 1e-5), layer_norm(x, weight, bias, 1e-5)[row])


def test_a_width_of_no_whole_vectors_is_torchs() -> None:
    x, branch, weight, bias = inputs(5, 20, torch.float32)
    for name, more in (("layer_norm", (x,)), ("add_layer_norm", (x, branch, 1.0))):
        end = () if name == "layer_norm" else (True,)
        found, expected = (
            getattr(kernels, name)(*more, weight, bias, 1e-5, *end) for kernels in (CompiledKernels(), LayerKernels())
        )
        assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [20, 64])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu", "relu2"])
def test_activations_in_place(name: str, width: int, dtype: torch.dtype) -> None:
    x = torch.linspace(-12, 12, 50 * width).view(50, width).to(dtype)
    x[3, :4] = torch.tensor([math.nan, math.inf, -1e-30, 0.0])
    activate = elementwise(name)
    assert activate is not None
    alone = activate(x[3:4].clone())[0]
    exact = ACTIVATIONS[name](x.double())
    found = x.clone()
    assert activate(found) is found
    assert torch.equal(found[3].nan_to_num(9.0), alone.nan_to_num(9.0))
    assert found[3, 0].isnan()
    assert found[3, 1] == math.inf
    plain = torch.arange(50) != 3
    near(found[plain], exact[plain])
    assert elementwise("tanh") is None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "parameters"), [("clip", [3.7]), ("xielu", [0.8, 0.3, 0.5, -1e-6])])
def test_activations_with_parameters(name: str, parameters: list[float], dtype: torch.dtype) -> None:
    """NaN stays, and small numbers have digits of their own."""
    own, x = torch.tensor(parameters), torch.linspace(-9, 9, 1000).view(20, 50).to(dtype)
    activate = elementwise(name, own)
    assert activate is not None
    for part in (x, x * 2.0**-12):
        near(activate(part.clone()), PARAMETRIC[name](own, part).double())
    near(activate(x.clone())[10:11], PARAMETRIC[name](own, x[10:11]).double())
    assert activate(torch.full((1, 4), math.nan, dtype=dtype)).isnan().all()
