"""State layers on a real GPU: with recurrences in Triton as with torch's operations, and lone tokens in a graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.engines import captured
from support.forwards import relative_error
from support.segments import segments_of

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.gated_delta import GatedDeltaConfig
from asyncengine.execution.layers.kernels import LayerKernels
from asyncengine.execution.layers.kimi_delta import KimiDeltaConfig
from asyncengine.execution.layers.mamba2 import Mamba2Config
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.short_conv import ShortConvConfig
from asyncengine.execution.layers.states import LoneTokens, StatePools, StateSegments, StateStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

RULES: dict[str, Any] = {
    "large": GatedDeltaConfig(2, 4, 128, 128, 4, 1e-6),
    "interleaved": GatedDeltaConfig(2, 4, 128, 40, 4, 1e-6, interleaved=True),
    "apart": GatedDeltaConfig(3, 3, 96, 192, 4, 1e-5, apart=True, most_rate=2),
    "small": GatedDeltaConfig(3, 3, 12, 20, 3, 1e-6), "kimi": KimiDeltaConfig(3, 128, 4, 1e-6),
    "mamba": Mamba2Config(8, 64, 128, 2, 4, 1e-5),
    "bounded mamba": Mamba2Config(4, 12, 10, 2, 4, 1e-5, norm="before gate", limits=(0.2, 0.9)),
}  # fmt: skip
LAYERS = {**RULES, "short conv": ShortConvConfig(4)}
ROWS = [[(1, 0, 1)], [(70, 0, 2), (1, 2, 3)], [(1, 4, 4)], [(1, 5, 7)], [(1, 0, 2), (0, 2, 8)]]
NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make(name: str, dtype: torch.dtype) -> tuple[Any, StatePools]:
    options = LayerOptions(dtype, torch.device("cuda"), LayerKernels())
    layer = LAYERS[name].build(options, NormConfig(), "", 64, 0)
    generator = torch.Generator().manual_seed(2)
    for _, slot in layer.slots():
        slot.load(torch.randn(slot.shape, generator=generator) * 0.3)
    pools = StatePools([layer.spec], 9, dtype, torch.device("cuda"), padding=True)
    for pool in (*pools.recurrent, *pools.windows):
        if pool is not None:
            pool[1:] = torch.randn(pool[1:].shape, generator=generator).to("cuda", dtype)
    return layer, pools


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", RULES)
def test_the_kernel_gives_what_torch_gives(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(75, 64, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    others, alone = segments_of(ROWS).apart()
    found = []
    for kernel in (True, False):
        layer, pools = make(name, dtype)
        assert layer.rule is not None
        if not kernel:
            layer.rule = layer.conv.on_device = None
        step = StateStep(pools, others, LoneTokens(*torch.from_numpy(alone).cuda()))
        made = layer(x, SimpleNamespace(states=step, adapters=None))
        found.append((made, pools.recurrent[0][:-1], pools.windows[0][:-1]))
    for made, plain in zip(*found, strict=True):
        assert relative_error(plain.double().cpu(), made.double().cpu()) < NEAR[dtype]
    assert not found[0][1][0].any()


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_moves_the_states_of_any_step(name: str) -> None:
    """The graph is captured with padding rows only, then replayed with others, of which the last is padding."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    every, nobody = torch.arange(4, device="cuda"), torch.full((4,), 9, device="cuda")
    sources, targets = torch.tensor([[0, 3, 5, 0], [2, 3, 6, 9]], device="cuda")
    outputs = []
    for graphs in (False, True):
        layer, pools = make(name, torch.bfloat16)
        alone = LoneTokens(every, torch.zeros_like(nobody), nobody.clone())

        def work(layer: Any = layer, pools: StatePools = pools, alone: LoneTokens = alone) -> torch.Tensor:
            context = SimpleNamespace(states=StateStep(pools, StateSegments.none(), alone), adapters=None)
            made: torch.Tensor = layer(x, context)
            return made

        with torch.inference_mode():
            if graphs:
                work()
                graph, made = captured(work)
            alone.sources.copy_(sources)
            alone.targets.copy_(targets)
            if graphs:
                graph.replay()
            else:
                made = work()
            torch.cuda.synchronize()
        states = [pool[:-1].clone() for pool in (*pools.recurrent, *pools.windows) if pool is not None]
        outputs.append([made[:3].clone(), *states])
    for eager, replayed in zip(*outputs, strict=True):
        torch.testing.assert_close(replayed, eager, rtol=1e-2, atol=1e-2)
