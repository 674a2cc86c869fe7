"""Plans of short steps, item by item, against those worked out with arrays: the same numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from asyncengine.attention.base import LayerSpec, StepView
from asyncengine.kernels.cpu import compiler_missing

if compiler_missing(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("no compiler here", allow_module_level=True)

from asyncengine.attention import cpu as arrays
from asyncengine.attention.cpu import CompiledBackend
from asyncengine.attention.cpu_short import FEW
from asyncengine.kernels.cpu import attention_fields as fields

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


@pytest.mark.parametrize("name", SPECS)
def test_the_numbers_are_those_of_arrays(name: str) -> None:
    """One backend for all steps: what a longer plan left behind is not seen."""
    spec, draw = SPECS[name], random.Random(name)
    backend = CompiledBackend([spec], 60, 16, torch.float32)
    group = next(iter(backend._groups))
    short = split = 0
    for _ in range(300):
        step = random_step(draw)
        backend._threads, backend._piece = draw.choice([1, 2, 4]), draw.choice([2**10, 2**14, 2**17])
        plan = backend._plan_group(group, spec, step, arrays._short_rows(step))
        items, joins = backend._items(spec, step)
        if plan is not backend._short[group]:
            assert max(len(items), step.kv_slots.numel()) > FEW
            continue
        short += 1
        split += len(joins) > 0
        heads = spec.num_heads // spec.num_kv_heads
        keys = items[:, fields.END] - items[:, fields.BEGIN]
        cost = keys * (arrays.LOAD + heads * items[:, fields.COUNT]) + arrays.START
        bounds = arrays._even_pieces(cost, spec.num_kv_heads, backend._threads, backend._piece // arrays._BYTES)
        found = backend._short[group].arrays
        assert [part.tolist() for part in found] == [items.tolist(), joins.tolist(), bounds.tolist()]
        assert plan.joins == len(joins)
        known = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * fields.STEP_FIELDS).from_address(plan.step))
        assert known[fields.NUM_ITEMS] == len(items)
        assert known[fields.PIECES] == len(bounds) - 1
        assert known[fields.NUM_JOINS] == len(joins)
        assert known[fields.WIDTH] == step.page_tables.shape[1]
        assert known[fields.TOKENS] == step.kv_slots.numel()
        assert known[fields.SLOTS] == step.kv_slots.data_ptr()
    assert short > 200
    assert split or spec.num_kv_heads > 2 or spec.window == 9


def test_where_layers_look_is_new_exactly_when_it_may_have_changed() -> None:
    """`placed` is what fused layers go by, who ask for places once."""
    near = replace(SPECS["window"], index=1, window=600)
    backend = CompiledBackend([SPECS["one kv head"], near], 60, 16, torch.float32)
    draw, seen = random.Random(7), []
    for _ in range(200):
        backend._threads = 1
        backend.plan(random_step(draw))
        seen.append((backend.placed, [backend.place(layer) for layer in range(2)]))
    for (placed, places), (later, others) in pairwise(seen):
        assert (placed is later) == (places == others)
    assert len({id(placed) for placed, _ in seen}) < 20, "short steps of one kind are at one place"
