"""Compiled delta rules: the same bits in any chunk, in any company and by a team of threads.

Other layers that keep a state are tested so beside their kernels (`test_mamba2`, `test_short_conv`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.layer_options import CPU, options
from support.segments import assert_same_bits, forward

pytest.importorskip("numba")

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.gated_delta import GatedDeltaConfig
from asyncengine.execution.layers.kimi_delta import KimiDeltaConfig
from asyncengine.execution.layers.states import StatePools

WIDTH = 320
"""More than a block of channels, of which convolutions have one each."""
LENGTH = 150
"""Tokens of a sequence: more than a block of any kernel."""
LAYERS: dict[str, Any] = {
    "gated delta": GatedDeltaConfig(2, 4, 128, 176, 4, 1e-6),
    "gated delta, apart": GatedDeltaConfig(2, 4, 16, 24, 4, 1e-5, apart=True, most_rate=2),
    "gated delta, no vectors": GatedDeltaConfig(3, 3, 12, 20, 3, 1e-6, interleaved=True),
    "kimi delta": KimiDeltaConfig(2, 176, 4, 1e-6),
}


@pytest.mark.parametrize("name", LAYERS)
def test_chunks_company_and_teams_change_no_bit(name: str) -> None:
    dtype, generator = torch.bfloat16, torch.Generator().manual_seed(3)
    layer = LAYERS[name].build(options(dtype), NormConfig(), "", WIDTH, 0)
    assert layer.kernel is not None
    for path, slot in layer.slots():
        spread = 0.3 if len(slot.shape) == 1 else slot.shape[-1] ** -0.5
        slot.load(torch.randn(slot.shape, generator=generator) * spread + path.endswith("norm.weight"))
    x = torch.randn(LENGTH, WIDTH, generator=generator).to(dtype)
    assert_same_bits(partial(forward, layer), partial(StatePools, [layer.spec], 19, dtype, CPU), x, 20)
