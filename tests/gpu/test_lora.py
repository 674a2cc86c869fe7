"""Adapters on a real GPU: Triton's kernels against products by torch, in a graph whose rows change their slots.

Skipped without an NVIDIA GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.engines import captured

from asyncengine.execution.layers.step import LoraTarget
from asyncengine.lora.layers.slots import KernelStack, MaskedStack, MaskedStep
from asyncengine.lora.layers.stack import LoraStack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SLOTS = 6
RANKS = {0: 16, 1: 3, 2: 40, 4: 8}
"""Ranks by slot, for the slots that hold something."""
NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CUDA = torch.device("cuda")
PLACES = {"one": LoraTarget(1024, (("o", 2048),)), "merged": LoraTarget(768, (("q", 512), ("k", 256), ("v", 136)))}


def filled(kind: type[LoraStack], target: LoraTarget, dtype: torch.dtype) -> LoraStack:
    stack = kind(target, SLOTS, 40, dtype, CUDA)
    generator = torch.Generator().manual_seed(3)
    for slot, rank in RANKS.items():
        for part, (_, width) in enumerate(target.modules):
            a = torch.randn(rank, target.in_features, generator=generator) / target.in_features**0.5
            stack.write(slot, part, a.to(dtype), torch.randn(width, rank, generator=generator).to(dtype))
    return stack


def slots_of(rows: int, seed: int) -> torch.Tensor:
    choices = torch.tensor([-1, *RANKS])
    return choices[torch.randint(0, len(choices), (rows,), generator=torch.Generator().manual_seed(seed))].cuda()


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("rows", [3, 40, 300])
@pytest.mark.parametrize("target", PLACES)
def test_kernels_give_what_torch_gives(target: str, rows: int, dtype: torch.dtype) -> None:
    at, made = PLACES[target], []
    x, y = torch.randn(rows, at.in_features), torch.randn(rows, sum(width for _, width in at.modules))
    slots = slots_of(rows, 1)
    for kind in (KernelStack, MaskedStack):
        out = y.to(CUDA, dtype)
        filled(kind, at, dtype).add(x.to(CUDA, dtype), out, MaskedStep(SLOTS, slots))
        made.append(out)
    change = (made[1].double() - y.to(CUDA, dtype).double()).norm()
    if bool((slots >= 0).any()):
        assert float((made[0].double() - made[1].double()).norm() / change) < NEAR[dtype]
    without = slots < 0
    assert torch.equal(made[0][without], y.to(CUDA, dtype)[without])


@pytest.mark.parametrize("rows", [2, 64])
def test_a_replayed_graph_follows_the_slots(rows: int) -> None:
    """The graph is captured with rows that have none, behind a product, as in a model's layer."""
    target = PLACES["merged"]
    stack = filled(KernelStack, target, torch.bfloat16)
    x = torch.randn(rows, 768, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(904, 768, device=CUDA, dtype=torch.bfloat16) / 30
    slots = torch.full((rows,), -1, device=CUDA)

    def work() -> Any:
        y = x @ weight.T
        step = MaskedStep(SLOTS, slots)
        for _ in range(3):
            stack.add(x, y, step)
        return y

    work()
    graph, made = captured(work)
    for seed in range(4):
        slots.copy_(slots_of(rows, seed))
        graph.replay()
        assert torch.equal(made, work())
    assert not torch.equal(made, x @ weight.T)


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    stack = filled(KernelStack, PLACES["one"], torch.bfloat16)
    x, slots = torch.randn(64, 1024, device=CUDA, dtype=torch.bfloat16), slots_of(64, 2)
    slots[5] = 2
    made = []
    for turn in range(2):
        if turn:
            slots[:5], slots[6:] = slots_of(5, 7), slots_of(58, 8)
            x[:5], x[6:] = torch.inf, 0.0
        y = torch.zeros(64, 2048, device=CUDA, dtype=torch.bfloat16)
        stack.add(x, y, MaskedStep(SLOTS, slots))
        made.append(y[5])
    assert torch.equal(*made)
