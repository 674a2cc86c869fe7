"""Inputs of a graph of decodes are the same whether a step is flattened anew or made of the one before."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.attention_pair import make_flashinfer
from support.fake_flashinfer import FakeFlashInfer, FakeMemory

from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.layers.states import FIRST, LoneTokens, StatePools, StateSpec
from asyncengine.execution.runner.graphs import DecodeGraphs
from asyncengine.execution.runner.step_buffers import GIVEN, NUMBERS, DecodeStep, StepBuffers
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Row, StateUse

from .graphs import Recall

CPU = torch.device("cpu")
SLOTS, PAGE, MOST = 8, 4, 100
BASE = LayerSpec(index=0, num_heads=4, num_kv_heads=2, key_dim=64, value_dim=64, scale=0.3)
LAYERS = [BASE, replace(BASE, index=1, chunk=8), replace(BASE, index=2, chunk=16)]
SPEC = RequestSpec(1, (5,), SamplingParams(), MOST, seed=0)


class Sequence:
    """One request that decodes. Its pages are appended to in place, or its table replaced, as the scheduler may."""

    def __init__(self, rng: random.Random, slot: int) -> None:
        self.rng, self.slot = rng, slot
        self.start = rng.randrange(1, 30)
        self.pages = [rng.randrange(1, 139) for _ in range(self.start // PAGE + 1)]

    def row(self) -> Row:
        while len(self.pages) * PAGE <= self.start:
            self.pages.append(self.rng.randrange(1, 139))
        if self.rng.random() < 0.05:
            self.pages = list(self.pages)
        self.start += 1
        state = StateUse(self.slot + 1, self.slot + 1, ())
        return Row(SPEC, self.slot, self.start - 1, 1, [5] * 120, True, self.pages, True, state=state)


def sent(graphs: DecodeGraphs, buffers: StepBuffers, rows: list[Row]) -> tuple[DecodeStep, list[int]]:
    """The step, and what lies where its graph reads: of page tables that which is in use."""
    step = buffers.decodes(tuple(rows))
    assert step is not None
    graphs.run(step)
    return step, graphs.inputs.sent[: num_sent(graphs)].tolist()


def num_sent(graphs: DecodeGraphs) -> int:
    """The numbers that were copied for the last step."""
    return len(graphs._last[2])


def nothing(ids: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.zeros(len(ids), 7)


def made(forward: Any = nothing, num_states: int = 0) -> tuple[DecodeGraphs, StepBuffers]:
    backend = make_flashinfer(LAYERS, FakeFlashInfer(FakeMemory()))
    graphs = DecodeGraphs(
        forward,
        backend,
        None,
        [1, 2, 4, SLOTS],
        SLOTS,
        Recall(),
        num_states=num_states,  # type: ignore[arg-type]
    )
    graphs.capture_all()
    return graphs, StepBuffers(SLOTS, PAGE, CPU)


@pytest.mark.parametrize("seed", range(4))
def test_steps_made_of_the_one_before(seed: int) -> None:
    rng = random.Random(seed)
    graphs, buffers = made()
    others, _ = made()
    running = [Sequence(rng, slot) for slot in range(rng.choice((1, 3, SLOTS)))]
    anew = 0
    for _ in range(60):
        if rng.random() < 0.1:  # one ends and another begins in its slot, or all are in another order
            place = rng.randrange(len(running))
            running[place] = Sequence(rng, running[place].slot)
            rng.shuffle(running)
        rows = [each.row() for each in running[: rng.choice((len(running), len(running), len(running), 1))]]
        if rng.random() < 0.1:
            rows[0] = rows[0]._replace(in_flight=False, tokens=[rng.randrange(7)] * (rows[0].start + 1))
        if rng.random() < 0.1:  # a step that is flattened, and then not run
            buffers.decodes(tuple(row._replace(start=row.start + 1, pages=[1] * 40, in_flight=True) for row in rows))
        step, found = sent(graphs, buffers, rows)
        _, wanted = sent(others, StepBuffers(SLOTS, PAGE, CPU), rows)
        assert len(found) == len(wanted)
        assert differing(found, wanted) <= host_only_places(others, step), "all but lengths, which plans read"
        anew += not step.follows
    assert 0 < anew < 60, "both ways were gone"


@pytest.mark.parametrize("count", range(SLOTS + 1))
def test_padding_rows_write_to_the_state_of_nobody(count: int) -> None:
    """A graph is captured with padding rows alone, before any row has come. The first state stays zero."""
    states = SLOTS + 1
    pools = StatePools([StateSpec((1,))], states, torch.float32, CPU, padding=True)
    (pool,) = pools.recurrent
    assert pool is not None

    def forward(ids: torch.Tensor, _positions: Any, _rows: Any, _adapters: Any, moves: LoneTokens) -> torch.Tensor:
        pool.index_copy_(0, moves.targets, pool.index_select(0, moves.sources) + 1)
        return torch.zeros(len(ids), 7)

    graphs = made(forward, states)[0]
    buffers, rng = StepBuffers(SLOTS, PAGE, CPU), random.Random(count)
    running = [Sequence(rng, slot) for slot in range(count)]
    for _ in range(3 if count else 0):
        step = buffers.decodes(tuple(each.row() for each in running))
        assert step is not None
        graphs.run(step)
    assert pool[FIRST].item() == 0
    assert pool[1:states, 0].tolist() == [3] * count + [0] * (SLOTS - count)


def differing(found: list[int], wanted: list[int]) -> set[int]:
    return set(np.flatnonzero(np.array(found) != np.array(wanted)).tolist())


def host_only_places(graphs: DecodeGraphs, step: DecodeStep) -> set[int]:
    """Places of the lengths that only the first plan reads, and of the room between parts."""
    size = next(size for size in graphs.sizes if size >= len(step.adapters))
    read = set(range(2 * (NUMBERS - 1) * size))
    for _, arrays in graphs.backend.decode_graphs[size].arrays.values():
        pages = arrays.kv_indices[: int(arrays.kv_indptr[-1])]
        for part in (arrays.kv_indptr, arrays.last_page_len, arrays.batch_indices, arrays.positions, pages):
            begin = part.storage_offset() - graphs.inputs.sent.storage_offset()
            read |= set(range(begin, begin + len(part)))
    return set(range(num_sent(graphs))) - read


def test_a_row_at_its_pages_end_takes_the_next_page() -> None:
    """The other rows are not flattened anew: only its place among keys and values is looked up."""
    buffers = StepBuffers(SLOTS, PAGE, CPU)
    one, two = [3, 9], [5, 6, 7]
    for start, follows in ((5, False), (6, True), (7, True), (8, False), (9, True)):
        if start == 8:
            one.append(4)
        rows = tuple(
            Row(SPEC, slot, start + 2 * slot, 1, [5] * 20, True, pages, True) for slot, pages in ((0, one), (1, two))
        )
        step = buffers.decodes(rows)
        assert step is not None
        fresh = StepBuffers(SLOTS, PAGE, CPU).decodes(rows)
        assert fresh is not None
        assert np.array_equal(step.numbers[:GIVEN], fresh.numbers[:GIVEN]), start
        assert step.follows == (follows and start != 6)
