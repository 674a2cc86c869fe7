"""Recurrences in Triton, by its interpreter: layers with them are those without, for segments and lone tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forwards import relative_error
from support.layer_options import CPU, options
from support.segments import segments_of

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here: tests/gpu", allow_module_level=True)

from asyncengine.layers import states
from asyncengine.layers.gated_delta import GatedDeltaConfig
from asyncengine.layers.kimi_delta import KimiDeltaConfig
from asyncengine.layers.mamba2 import Mamba2Config
from asyncengine.layers.norm import NormConfig
from asyncengine.layers.states import LoneTokens, StatePools, StateStep

LARGE = GatedDeltaConfig(2, 4, 128, 40, 4, 1e-6)
LAYERS: dict[str, Any] = {
    "large": LARGE, "interleaved": replace(LARGE, key_dim=16, interleaved=True),
    "small": GatedDeltaConfig(3, 3, 12, 20, 3, 1e-6), "kimi": KimiDeltaConfig(3, 20, 4, 1e-6),
    "mamba": Mamba2Config(6, 40, 10, 2, 4, 1e-5),
    "bounded mamba": Mamba2Config(4, 12, 32, 1, 4, 1e-5, norm="before gate", limits=(0.2, 0.9)),
}  # fmt: skip
ROWS = [[(1, 0, 1)], [(9, 0, 2), (1, 2, 3)], [(1, 4, 4)], [(1, 5, 7)], [(1, 0, 2), (0, 2, 8)]]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in LAYERS), ("small", torch.bfloat16), ("bounded mamba", torch.float16)],
)
def test_layers_by_the_kernel_are_those_by_torch(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncengine.layers.options.compiler_missing", lambda *_: "not here")
    own = options(dtype, plain=True)
    found = []
    for triton in (False, True):
        monkeypatch.setattr(states, "triton_missing", lambda device, triton=triton: None if triton else "no")
        layer = LAYERS[name].build(own, NormConfig(), "", 32, 0)
        assert (layer.rule is not None) == triton
        generator = torch.Generator().manual_seed(2)
        for _, slot in layer.slots():
            slot.load(torch.randn(slot.shape, generator=generator) * 0.3)
        bias = layer.step_bias if name.endswith("mamba") else layer.dt_bias
        bias[0] = 40.0  # softplus is the number itself there
        pools = StatePools([layer.spec], 9, dtype, CPU)
        assert pools.recurrent[0] is not None
        pools.recurrent[0][1:] = torch.randn(pools.recurrent[0][1:].shape, generator=generator)
        others, alone = segments_of(ROWS).apart()
        step = StateStep(pools, others, LoneTokens(*torch.from_numpy(alone)))
        x = torch.randn(14, 32, generator=generator).to(dtype)
        found.append((layer(x, SimpleNamespace(states=step, adapters=None)), pools.recurrent[0], pools.windows[0]))
        assert not pools.recurrent[0][0].any()
    for plain, made in zip(*found, strict=True):
        assert relative_error(plain.double(), made.double()) < NEAR[dtype]
    assert torch.equal(found[0][2], found[1][2])
