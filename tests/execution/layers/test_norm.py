"""Norms as float64 has them, rounded once; what is added to a weight is added in float32."""

from __future__ import annotations

import pytest
import torch
from support.layer_options import fill, options

from asyncengine.execution.layers.basic import Norm, NormConfig

WIDTH = 64
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
plain = pytest.mark.parametrize("plain", [False, True], ids=["kernels", "torch"])


def exact(x: torch.Tensor, weight: torch.Tensor, config: NormConfig, bias: torch.Tensor | None = None) -> torch.Tensor:
    wide = x.double()
    if config.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    found = (
        wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.epsilon) * (config.offset + weight.double())
    )
    return found if bias is None else found + bias.double()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that both are within one rounding to a narrow type, and a few of float32."""
    unit = max(torch.finfo(found.dtype).eps, 2e-6)
    torch.testing.assert_close(found.double(), expected, rtol=unit, atol=2 * unit)


@dtypes
@plain
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms(dtype: torch.dtype, plain: bool, offset: float) -> None:
    """Small weights beside Gemma's 1 show whether the sum was rounded."""
    config = NormConfig(epsilon=1e-3, offset=offset)
    norm = Norm(options(dtype, plain=plain), config, "norm", WIDTH)
    weight = (torch.randn(WIDTH) * (0.01 if offset else 1.0)).to(dtype)
    fill(norm, {"norm.weight": weight})
    x, branch = torch.randn(7, WIDTH).to(dtype), torch.randn(7, WIDTH).to(dtype)
    if offset or not plain:
        close(norm(x), exact(x, weight, config))
    else:  # torch's own kernel may round before it multiplies
        torch.testing.assert_close(norm(x).double(), exact(x, weight, config), rtol=1e-2, atol=1e-2)
    before = x.clone(), branch.clone()
    total, normed = norm.add(x, branch, 0.5)
    assert torch.equal(x, before[0])
    assert torch.equal(branch, before[1])
    torch.testing.assert_close(total, x + branch * 0.5)
    torch.testing.assert_close(normed, norm(total))


@dtypes
@pytest.mark.parametrize(
    "config", [NormConfig("layer", bias=True), NormConfig("layer"), NormConfig("layer", weight=False)]
)
def test_layer_norm(dtype: torch.dtype, config: NormConfig) -> None:
    norm = Norm(options(dtype), config, "norm", WIDTH)
    weight, bias = torch.randn(WIDTH).to(dtype), torch.randn(WIDTH).to(dtype)
    fill(norm, {**({"norm.weight": weight} if config.weight else {}), **({"norm.bias": bias} if config.bias else {})})
    x = 3 * torch.randn(7, WIDTH).to(dtype) + 1
    scale = weight if config.weight else torch.ones(WIDTH)
    close(norm(x), exact(x, scale, config, bias if config.bias else None))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_weight_for_each_head(kind: str) -> None:
    config = NormConfig(kind)  # type: ignore[arg-type]
    norm = Norm(options(), config, "norm", 16, heads=4)
    weight = torch.randn(4, 16)
    fill(norm, {"norm.weight": weight})
    x = torch.randn(5, 4, 16)
    close(norm(x), exact(x, weight, config))


@plain
def test_heads_in_a_wider_row(plain: bool) -> None:
    """Queries are a view of the merged projection."""
    config = NormConfig()
    norm = Norm(options(plain=plain), config, "norm", 16)
    weight = torch.randn(16)
    fill(norm, {"norm.weight": weight})
    x = torch.randn(5, 12 * 16)[:, : 4 * 16].unflatten(-1, (4, 16))
    close(norm(x), exact(x, weight, config))
