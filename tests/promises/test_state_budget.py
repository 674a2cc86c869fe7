"""Sixty-four requests at once over a model with states: whoever wants one, there are no more than the budget holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.long import LONG
from support.tiny_models import VOCAB, make_checkpoint

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.execution.layers.states import StatePools
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.step import Batch

REQUESTS, STATES, NEW = 64, 7, 5
SHARED = [3 + (7 * place) % (VOCAB - 3) for place in range(48)]


def prompt(number: int) -> list[int]:
    """Every second begins like all the others that do, and they part at several places."""
    own = [3 + (11 * number + 5 * place) % (VOCAB - 3) for place in range(40 + number % 9)]
    return SHARED[: 16 * (1 + number % 3)] + own if number % 2 else own


async def all_at_once(engine: AsyncEngine) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    done = await asyncio.gather(*(engine.generate(prompt(number), params) for number in range(REQUESTS)))
    return [tuple(answer.token_ids) for answer in done]


@pytest.mark.parametrize("family", ["qwen3.5", "falcon-h1", "lfm2"] if LONG else ["qwen3.5", "falcon-h1"])
async def test_states_of_sixty_four_requests_stay_within_the_budget(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(family, tmp_path / family)
    settings: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": REQUESTS, "show_progress": False}
    async with await AsyncEngine.from_pretrained(path, **settings, prefix_caching=False) as engine:
        assert engine.info.num_states >= REQUESTS
        size, expected = engine.info.state_bytes, await all_at_once(engine)
    budget, inner, make = STATES * size + size // 2, ModelRunner.launch, StatePools.__init__
    named: set[int] = set()
    at_once: list[int] = []
    pools: list[StatePools] = []

    def made(self: StatePools, *given: Any, **more: Any) -> None:
        make(self, *given, **more)
        pools.append(self)

    def launch(self: ModelRunner, batch: Batch) -> Any:
        """Notes the slots that a step may write, of which no two are the same, and launches it."""
        used = [row.state for row in batch.rows if row.state]
        targets = [slot for use in used for slot in (use.slot, *(place for _, place in use.saves))]
        assert len(set(targets)) == len(targets)
        named.update(targets, (use.source for use in used))
        at_once.append(len(targets))
        return inner(self, batch)

    monkeypatch.setattr(ModelRunner, "launch", launch)
    monkeypatch.setattr(StatePools, "__init__", made)
    async with await AsyncEngine.from_pretrained(path, **settings, state_memory=budget) as engine:
        usable = engine.info.num_states
        assert usable == STATES - 1
        for _ in range(2):  # the second time from what the first has left
            assert await all_at_once(engine) == expected
        counts = engine.stats().states
        assert counts.total == usable
        assert counts.free + counts.snapshots == usable
        assert counts.hits > 0
        assert counts.evictions > 0
    assert pools[-1].nbytes == STATES * size  # those before it are of outlines whose kernels are listed
    assert named <= set(range(STATES))
    assert max(at_once) == usable
