"""Tokens that are alone in their rows: state layers move all their states at once as they move them one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.layer_options import CPU, options
from support.segments import segments_of

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.gated_delta import GatedDeltaConfig
from asyncengine.execution.layers.kimi_delta import KimiDeltaConfig
from asyncengine.execution.layers.mamba2 import Mamba2Config
from asyncengine.execution.layers.short_conv import ShortConvConfig
from asyncengine.execution.layers.states import LoneTokens, StatePools, StateSegments, StateStep

LAYERS: dict[str, Any] = {
    "gated delta": GatedDeltaConfig(2, 4, 16, 24, 4, 1e-6),
    "apart": GatedDeltaConfig(2, 2, 16, 24, 4, 1e-5, apart=True, most_rate=2),
    "interleaved": GatedDeltaConfig(3, 3, 12, 20, 3, 1e-6, interleaved=True),
    "kimi": KimiDeltaConfig(3, 20, 4, 1e-6),
    "mamba": Mamba2Config(4, 12, 10, 2, 4, 1e-5, scales=(0.5, 1.5, 0.7, 2.0, 1.2)),
    "norm before": Mamba2Config(4, 12, 10, 2, 4, 1e-5, norm="before gate"),
    "short conv": ShortConvConfig(4, bias=True),
}
ROWS = [[(1, 0, 1)], [(4, 0, 2), (1, 2, 3)], [(1, 4, 4)], [(3, 0, 6)], [(1, 5, 7)], [(1, 0, 2), (0, 2, 8)]]
"""Three tokens are alone: the first, the one of state 4, and the one that takes another's state."""


def test_they_go_apart() -> None:
    others, alone = segments_of(ROWS).apart()
    assert alone.tolist() == [[0, 6, 10], [0, 4, 5], [1, 4, 7]]
    assert others.rows.tolist() == [0, 2, 3, 5]
    assert others.begins.tolist() == [1, 5, 7, 11, 12]
    assert others.ends.tolist() == [5, 6, 10, 12, 12]
    assert others.sources.tolist() == [0, 2, 0, 0, 2]
    assert others.targets.tolist() == [2, 3, 6, 2, 8]
    none, every = segments_of([[(1, 3, 3)], [(1, 0, 2)]]).apart()
    assert none.rows.tolist() == [0]
    assert not len(none.begins)
    assert every.tolist() == [[0, 1], [3, 0], [3, 2]]
    assert StateSegments.none().apart()[1].shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_states_and_results_are_those_of_segments(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncengine.execution.layers.options.compiler_missing", lambda *_: "not here")
    generator = torch.Generator().manual_seed(2)
    layer = LAYERS[name].build(options(dtype, plain=True), NormConfig(), "", 32, 0)
    for _, slot in layer.slots():
        slot.load(torch.randn(slot.shape, generator=generator) * 0.3)
    x = torch.randn(12, 32, generator=generator).to(dtype)
    found = []
    for apart in (False, True):
        pools = StatePools([layer.spec], 9, dtype, CPU)
        kept = [pool for pool in (*pools.recurrent, *pools.windows) if pool is not None]
        start = torch.Generator().manual_seed(5)
        for pool in kept:
            pool[1:] = torch.randn(pool[1:].shape, generator=start)
        segments = segments_of(ROWS)
        step = StateStep(pools, segments)
        if apart:
            others, alone = segments.apart()
            step = StateStep(pools, others, LoneTokens(*torch.from_numpy(alone)))
        found.append([layer(x, SimpleNamespace(states=step, adapters=None)), *kept])
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(many, one, rtol=1e-6, atol=1e-6)
    assert not found[1][1][0].any()
