"""The compiled Mamba-2 layer against torch's operations, and to the bit against itself in any chunks and company."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.segments import assert_same_bits, forward, memory_of

from asyncengine.execution.layers.kernels import layer_kernels
from asyncengine.execution.layers.mamba2 import Mamba2, Mamba2Config
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.states import StatePools

CPU = torch.device("cpu")
WIDTH, SLOTS = 64, 20
LENGTH = 150
"""Tokens of a sequence: more than a block of the kernel."""


def make(dtype: torch.dtype, **changes: Any) -> Mamba2:
    sizes = {"heads": 6, "head_dim": 32, "state_size": 48, "groups": 2, "taps": 4, "epsilon": 1e-5, "norm_groups": 2}
    config = Mamba2Config(**{**sizes, **changes})  # type: ignore[arg-type]
    layer = Mamba2(LayerOptions(dtype, CPU, layer_kernels("auto", dtype, CPU)), config, "mamba.", WIDTH, 0)
    generator = torch.Generator().manual_seed(3)
    for name, slot in layer.slots():
        spread = 0.3 if len(slot.shape) == 1 else slot.shape[-1] ** -0.5
        slot.load(torch.randn(slot.shape, generator=generator) * spread + name.endswith("norm.weight"))
    return layer


def pools(layer: Mamba2, dtype: torch.dtype) -> StatePools:
    made = StatePools([layer.spec], SLOTS, dtype, CPU)
    for pool in memory_of(made):
        pool[1:] = 7.0  # whatever others have left there
    return made


def sequence(dtype: torch.dtype, seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "before gate", "limits": (0.4, 0.8), "conv_bias": False},
        {"norm": None, "groups": 1, "out_scale": 0.7, "scales": (0.7, 1.2, 0.8, 1.3, 0.9)},
        {"heads": 5, "groups": 5, "norm_groups": 1, "head_dim": 16, "state_size": 16, "bias": True, "out_bias": True},
    ],
)
def test_equals_torch(changes: dict[str, Any]) -> None:
    """Outputs and states, of rows of which one starts from another's state in the middle of the step."""
    layer, x = make(torch.float32, **changes), torch.cat([sequence(torch.float32), sequence(torch.float32, 1, 9)])
    rows = [[(20, 0, 3), (LENGTH - 20, 3, 4), (0, 4, 5)], [(9, 0, 6)]]
    compiled, plain = pools(layer, torch.float32), pools(layer, torch.float32)
    found = forward(layer, x, rows, compiled)
    assert layer.kernel is not None
    layer.kernel = None
    expected = forward(layer, x, rows, plain)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-6 * float(expected.abs().max()))
    for kept, known in zip(memory_of(compiled), memory_of(plain), strict=True):
        torch.testing.assert_close(kept, known, rtol=1e-5, atol=1e-5)
        assert not kept[0].any()
        assert torch.equal(kept[4], kept[5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("compiled", "changes"), [(True, {}), (True, {"heads": 16, "state_size": 128}), (False, {})])
def test_bits_do_not_depend_on_chunks_company_or_threads(
    dtype: torch.dtype, compiled: bool, changes: dict[str, Any]
) -> None:
    layer, x = make(dtype, **changes), sequence(dtype, length=LENGTH if compiled else 40)
    if not compiled:
        layer.kernel = None
    assert_same_bits(partial(forward, layer), partial(pools, layer, dtype), x, 11)


def test_what_is_no_number_stays_in_its_row() -> None:
    layer, x = make(torch.float32), sequence(torch.float32)
    states = pools(layer, torch.float32)
    other = sequence(torch.float32, 1, 9)
    expected = forward(layer, other, [[(9, 0, 1)]], states)
    found = forward(layer, torch.cat([torch.full_like(x, torch.nan), other]), [[(len(x), 0, 2)], [(9, 0, 3)]], states)
    assert torch.equal(found[len(x) :], expected)
    assert found[: len(x)].isnan().all()


def test_other_sizes_run_without_it() -> None:
    assert make(torch.float32, head_dim=12).kernel is None
    assert make(torch.float32, state_size=10).kernel is None
