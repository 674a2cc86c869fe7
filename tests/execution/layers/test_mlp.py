"""Feed-forward layers, with a kernel for gates and without."""

from __future__ import annotations

import pytest
import torch
from support.forwards import relative_error
from support.layer_options import fill, options

from asyncengine.execution.layers.kernels import ACTIVATIONS
from asyncengine.execution.layers.mlp import MLP, MLPConfig

WIDTH, INNER = 32, 48


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", ["gated", "gate and up in one", "plain"])
def test_it_is_what_it_says(activation: str, form: str) -> None:
    """Numbers large enough that activations differ."""
    gated = form != "plain"
    names = ("gate", "up") if form == "gated" else ("up",)
    for plain in (False, True):
        mlp = MLP(options(plain=plain), MLPConfig(INNER, activation, names, "down", gated, bias=True), "mlp.", WIDTH)
        ups = torch.randn(2 * INNER if gated else INNER, WIDTH)
        offset, down, last = torch.randn(len(ups)), torch.randn(WIDTH, INNER), torch.randn(WIDTH)
        tensors = {"mlp.down.weight": down, "mlp.down.bias": last}
        for name, weight, bias in zip(names, ups.chunk(len(names)), offset.chunk(len(names)), strict=True):
            tensors |= {f"mlp.{name}.weight": weight, f"mlp.{name}.bias": bias}
        fill(mlp, tensors)
        x = torch.randn(5, WIDTH)
        inner = (x @ ups.T + offset).double()
        act = ACTIVATIONS[activation]
        inner = act(inner[:, :INNER]) * inner[:, INNER:] if gated else act(inner)
        expected = inner @ down.double().T + last.double()
        assert relative_error(expected, mlp(x, None)) < 1e-5
