"""The causal convolution in Triton, by its interpreter: results and windows are those of torch's operations."""

from __future__ import annotations

import pytest
import torch
from support.forwards import relative_error
from support.layer_options import options

from asyncengine.execution.layers.causal_conv import CausalConv
from asyncengine.kernels.cuda.recurrence import convolve

NEAR = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize(
    ("sequences", "count", "channels", "taps", "bias", "silu", "dtype"),
    [(1, 40, 300, 4, True, True, torch.float32), (3, 17, 20, 3, False, False, torch.bfloat16),
     (2, 2, 7, 4, True, False, torch.float32), (1, 1, 257, 2, False, True, torch.bfloat16)],
)  # fmt: skip
def test_convolves_as_torch(
    sequences: int, count: int, channels: int, taps: int, bias: bool, silu: bool, dtype: torch.dtype
) -> None:
    conv = CausalConv(options(dtype), "", channels, taps, bias=bias, activation="silu" if silu else None)
    generator = torch.Generator().manual_seed(count)
    conv.weight.copy_(torch.randn(taps, channels, generator=generator))
    if conv.bias is not None:
        conv.bias.copy_(torch.randn(channels, generator=generator))
    x = torch.randn(sequences * count, channels + 9, generator=generator).to(dtype)[:, 4:-5]
    windows = torch.randn(sequences, taps - 1, channels, generator=generator).to(dtype)
    wanted, after = conv.advance(x, windows, None)
    made, moved = convolve(x, windows, None, conv.weight, conv.bias, silu)
    assert relative_error(wanted.double(), made.double()) < NEAR[dtype]
    assert torch.equal(moved, after)


def test_moves_windows_where_they_lie() -> None:
    """A token each, of a window that stays in its place, of one that goes elsewhere and of none before."""
    conv = CausalConv(options(), "", 5, 4)
    conv.weight.copy_(torch.randn(4, 5, generator=torch.Generator().manual_seed(1)))
    pool = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(2))
    pool[0] = 0.0
    x, slots = torch.randn(3, 5, generator=torch.Generator().manual_seed(3)), torch.tensor([[2, 4, 0], [2, 1, 6]])
    wanted, after = conv.advance(x, pool.clone(), (slots[0], slots[1]))
    made, moved = convolve(x, pool, (slots[0], slots[1]), conv.weight, None, False)
    assert relative_error(wanted.double(), made.double()) < 1e-6
    assert moved is pool
    assert torch.equal(moved, after)
