"""The step that is profiled before the KV pool is sized is as large as a step can be, and runs."""

from __future__ import annotations

import pytest
from support.checkpoints import MakeRunner

from asyncengine.execution.runner.building import largest_step

CASES = [(8, 60, 100), (8, 60, 20), (2, 100, 20), (64, 16, 50), (1, 1, 50)]


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens", "context"), CASES)
def test_the_largest_step(max_num_seqs: int, max_num_batched_tokens: int, context: int) -> None:
    batch, pages = largest_step(4, max_num_seqs, max_num_batched_tokens, context)
    tokens = [row.num_scheduled for row in batch.rows]
    assert len(tokens) == min(max_num_seqs, max_num_batched_tokens)
    assert sum(tokens) == min(max_num_batched_tokens, len(tokens) * (context - 1))
    assert 1 <= min(tokens) <= max(tokens) < context
    used = [page for row in batch.rows for page in row.pages]
    assert used == list(range(1, pages))
    assert all(len(row.pages) == -(-row.num_scheduled // 4) for row in batch.rows)


def test_it_runs(make_runner: MakeRunner) -> None:
    runner = make_runner("llama")
    batch, pages = largest_step(runner.page_size, 8, 60, 40)
    assert pages <= runner.num_pages
    result = runner.profile_run(batch)
    assert not result.errors
    assert min(result.tokens) >= 0
