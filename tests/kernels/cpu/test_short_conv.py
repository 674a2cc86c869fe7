"""The compiled short convolution gives the bits of torch's operations, in any chunks and company."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.segments import Part, assert_same_bits, forward, memory_of

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.kernels import layer_kernels
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.short_conv import ShortConv, ShortConvConfig
from asyncengine.execution.layers.states import StatePools

CPU = torch.device("cpu")
WIDTH = 320
"""More than a block of channels."""


def make(dtype: torch.dtype, bias: bool) -> ShortConv:
    options = LayerOptions(dtype, CPU, layer_kernels("auto", dtype, CPU))
    layer = ShortConvConfig(4, bias).build(options, NormConfig(), "", WIDTH, 0)
    generator = torch.Generator().manual_seed(3)
    for _, slot in layer.slots():
        slot.load(torch.randn(slot.shape, generator=generator) * (0.3 if len(slot.shape) == 1 else 0.1))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_torch_in_any_chunks_and_company(dtype: torch.dtype, bias: bool) -> None:
    layer, x = make(dtype, bias), torch.randn(130, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    pools = partial(StatePools, [layer.spec], 19, dtype, CPU)
    states, plain = pools(), pools()
    rows: list[list[Part]] = [[(1, 0, 1)], [(20, 0, 2), (70, 2, 3), (0, 3, 4)], [(39, 0, 5)]]
    assert_same_bits(partial(forward, layer), pools, x[1:91], 20)
    found = forward(layer, x, rows, states)
    layer.kernel = None
    assert torch.equal(found, forward(layer, x, rows, plain))
    assert torch.equal(*memory_of(states), *memory_of(plain))
