"""The step that is profiled before the KV pool is sized is as large as a step can be, and runs."""

from __future__ import annotations

from typing import Any

import pytest
from support.checkpoints import MakeRunner

from asyncengine.config import EngineConfig
from asyncengine.execution.runner.building import largest_step

CASES: list[tuple[dict[str, Any], int]] = [
    ({"max_num_seqs": 8, "max_num_batched_tokens": 60}, 100),
    ({"max_num_seqs": 8, "max_num_batched_tokens": 60}, 20),
    ({"max_num_seqs": 2, "max_num_batched_tokens": 100}, 20),
    ({"max_num_seqs": 64, "max_num_batched_tokens": 16}, 50),
    ({"max_num_seqs": 1, "max_num_batched_tokens": 1}, 50),
]


@pytest.mark.parametrize(("settings", "context"), CASES)
def test_the_largest_step(settings: dict[str, Any], context: int) -> None:
    config = EngineConfig(page_size=4, **settings)
    batch, pages = largest_step(config, context)
    tokens = [row.num_scheduled for row in batch.rows]
    assert len(tokens) == min(config.max_num_seqs, config.max_num_batched_tokens)
    assert sum(tokens) == min(config.max_num_batched_tokens, len(tokens) * (context - 1))
    assert 1 <= min(tokens) <= max(tokens) < context
    used = [page for row in batch.rows for page in row.pages]
    assert used == list(range(1, pages))
    assert all(len(row.pages) == -(-row.num_scheduled // 4) for row in batch.rows)


def test_it_runs(make_runner: MakeRunner) -> None:
    runner = make_runner("llama")
    config = EngineConfig(page_size=runner.page_size, max_num_seqs=8, max_num_batched_tokens=60)
    batch, pages = largest_step(config, 40)
    assert pages <= runner.num_pages
    result = runner.profile_run(batch)
    assert not result.errors
    assert min(result.tokens) >= 0
