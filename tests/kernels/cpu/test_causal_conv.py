"""Causal convolution by compiled kernels: torch's numbers, to the same bits in any chunk, company and team."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.layer_options import fill, options
from support.segments import Part, segments_of
from torch.nn import functional

from asyncengine.execution.layers.causal_conv import CausalConv
from asyncengine.execution.layers.states import StatePools, StateSpec, StateStep

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(48, 3), (300, 4), (5, 2), (600, 4)]
"""Channels and taps; the last ones are of several blocks."""


def make_layer(channels: int, taps: int, dtype: torch.dtype, plain: bool = False, own: bool = True) -> CausalConv:
    torch.manual_seed(channels)
    weight, bias = torch.randn(channels, 1, taps), torch.randn(channels)
    layer = CausalConv(options(dtype), "conv", channels, taps, bias=own, activation="silu" if own else None)
    fill(layer, {"conv.weight": weight, **({"conv.bias": bias} if own else {})})
    if plain:
        layer.kernel = None
    return layer


def run(layer: CausalConv, x: torch.Tensor, rows: Sequence[Sequence[Part]], pools: StatePools) -> torch.Tensor:
    return layer(x, StateStep(pools, segments_of(rows)), 0)


def pools_of(layer: CausalConv, dtype: torch.dtype) -> StatePools:
    return StatePools([StateSpec(window=layer.window)], 19, dtype, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("channels", "taps"), SHAPES)
def test_equals_torchs_convolution(channels: int, taps: int, own: bool, dtype: torch.dtype) -> None:
    """Compiled and reference layers are equal, with bias and activation or without, also in rows of longer ones."""
    x = torch.randn(40, channels + 7).to(dtype)[:, 3 : channels + 3]
    for plain in (True, False):
        layer = make_layer(channels, taps, dtype, plain, own)
        found = run(layer, x, [[(40, 0, 1)]], pools_of(layer, dtype))
        padded = functional.pad(x.double().T[None], (taps - 1, 0))
        weight, bias = layer.weight.T[:, None].double(), None if layer.bias is None else layer.bias.double()
        wanted = functional.conv1d(padded, weight, bias, groups=channels)[0].T
        wanted = functional.silu(wanted) if own else wanted
        tolerance = 2e-6 if dtype == torch.float32 else 4e-3
        assert torch.allclose(found.double(), wanted, rtol=tolerance, atol=tolerance)
