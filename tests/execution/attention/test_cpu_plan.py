"""Plans of steps of any rows: by any number of threads the same results, at one address."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.teams import team_of

from asyncengine.execution.attention.base import LayerSpec, StepView
from asyncengine.kernels.cpu import compiler_missing

if compiler_missing(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("no compiler here", allow_module_level=True)

from asyncengine.execution.attention.cpu import CompiledBackend, StepPlan

SPECS = {
    "plain": LayerSpec(0, 4, 2, 16, 16, 0.25),
    "one kv head": LayerSpec(0, 8, 1, 16, 16, 0.25),
    "window": LayerSpec(0, 4, 2, 16, 16, 0.25, window=700),
    "chunks": LayerSpec(0, 4, 4, 16, 16, 0.25, chunk=8),
    "window and chunks": LayerSpec(0, 2, 1, 16, 16, 0.25, window=40, chunk=600),
    "both ways": LayerSpec(0, 4, 4, 16, 16, 0.25, window=9, both=True),
}


def random_step(draw: random.Random) -> StepView:
    rows = draw.choice([1, 1, 2, 3, 4, 9])
    counts = np.array([draw.choice([1, 1, 1, 2, 5, 9]) for _ in range(rows)])
    if draw.random() < 0.1:
        counts[0] = 40
    starts = np.array([draw.choice([0, 3, 511, 512, 1500, 4000, draw.randrange(6000)]) for _ in range(rows)])
    indptr = np.concatenate(([0], np.cumsum(counts)))
    width = int((starts + counts).max()) // 16 + 1
    tables = np.array([[draw.randrange(50) for _ in range(width)] for _ in range(rows)], dtype=np.int32)
    return StepView(starts, counts, indptr, tables, torch.arange(int(indptr[-1])))


def filled(spec: LayerSpec) -> CompiledBackend:
    """A backend whose 50 pages hold random numbers."""
    backend, count = CompiledBackend([spec], 50, 16, torch.float32), 50 * 16
    draw = torch.Generator().manual_seed(1)
    key, value = (torch.randn(count, spec.num_kv_heads, 16, generator=draw) for _ in range(2))
    whole = np.array([0, count])
    backend.plan(StepView(whole[:1], whole[1:], whole, np.arange(50, dtype=np.int32)[None], torch.arange(count)))
    backend.write(0, key, value)
    return backend


@pytest.mark.parametrize("name", SPECS)
def test_threads_change_no_bit(name: str) -> None:
    """One backend for all steps: what a longer plan left behind is not seen. Long rows are split among threads."""
    spec, draw, filling = SPECS[name], random.Random(name), torch.Generator().manual_seed(2)
    backend, alone = filled(spec), filled(spec)
    for _ in range(60):
        step = random_step(draw)
        query = torch.randn((step.kv_slots.numel(), spec.num_heads, 16), generator=filling)
        with team_of(draw.choice([2, 4]), draw.choice([2**10, 2**14, 2**17])):
            backend.plan(step)
            found = backend.attend(0, query)
        alone.plan(step)
        assert torch.equal(found, alone.attend(0, query))


def test_plans_are_at_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group has its plans at one address: a record (`layers.recorded`) reads every step there."""
    near = replace(SPECS["window"], index=1, window=600)
    backend = CompiledBackend([SPECS["one kv head"], near], 60, 16, torch.float32)
    draw, filled, fill = random.Random(7), set(), StepPlan.fill
    monkeypatch.setattr(StepPlan, "fill", lambda plan, *given: filled.add(plan.step) or fill(plan, *given))
    for _ in range(50):
        backend.plan(random_step(draw))
    assert len(filled) == 2
