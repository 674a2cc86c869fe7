"""The work that a step may compute: decodes first, prompts in chunks, the cap on shared steps."""

from typing import Any

import pytest
from support.data import cases_of
from support.fake_engine import Steps, rows

from asyncengine.scheduler.rows import Plan

ROWS: dict[str, Any] = cases_of(__file__)


def test_a_long_prompt_is_computed_in_chunks():
    steps = Steps(max_num_batched_tokens=8)
    ticket = steps.add(range(2, 22), 3)
    counts = [rows(steps.step()) for _ in range(4)]
    assert counts == [{ticket: 8}, {ticket: 8}, {ticket: 4}, {ticket: 1}]
    assert [row.samples for batch in steps.batches for row in batch.rows] == [False, False, True, True]
    steps.run()
    steps.assert_right()


def test_decodes_come_first_and_prompts_share_the_rest_of_the_same_step():
    steps = Steps(max_num_batched_tokens=8)
    decoding = [steps.add([2, 3], 20), steps.add([4, 5], 20)]
    steps.step()
    prompt = steps.add(range(10, 30), 2)
    batch = steps.step()
    assert rows(batch) == {decoding[0]: 1, decoding[1]: 1, prompt: 6}
    assert batch is not None
    assert [row.spec.ticket for row in batch.rows] == [*decoding, prompt]
    steps.run()
    steps.assert_right()


@pytest.mark.parametrize(
    ("settings", "rows", "tokens"), ROWS["no_step_exceeds_the_budget_nor_runs_more_than_could_decode"]
)
def test_no_step_exceeds_the_budget_nor_runs_more_than_could_decode(settings: dict[str, int], rows: int, tokens: int):
    steps = Steps(pages=200, **settings)
    for i in range(20):
        steps.add(range(i, i + 3 + i), 5)
    while steps.scheduler.requests:
        steps.step()
        assert len(steps.scheduler.running) <= rows
    assert rows <= max(batch.num_tokens for batch in steps.batches) <= tokens
    steps.assert_right()
    steps.assert_empty()


def test_the_prefill_cap_holds_in_shared_steps_and_not_for_a_lone_prompt():
    steps = Steps(max_num_batched_tokens=64, long_prefill_token_threshold=4)
    alone = steps.add(range(2, 22), 30)
    assert rows(steps.step()) == {alone: 20}
    second = steps.add(range(30, 50), 2)
    assert rows(steps.step()) == {alone: 1, second: 4}
    assert rows(steps.step()) == {alone: 1, second: 4}
    steps.abort(alone)
    assert rows(steps.step()) == {second: 12}
    steps.run()
    steps.assert_right([second])


def test_the_prefill_cap_holds_for_the_first_newcomer_of_a_shared_step():
    steps = Steps(max_num_batched_tokens=1024, long_prefill_token_threshold=100, pages=600)
    long, short = steps.add([i % 90 + 2 for i in range(900)], 2), steps.add([i % 7 + 50 for i in range(100)], 2)
    assert rows(steps.step()) == {long: 100, short: 100}
    assert rows(steps.step()) == {short: 1, long: 100}
    assert rows(steps.step()) == {long: 700}
    steps.run()
    steps.assert_right()


def test_the_prefill_cap_holds_for_a_running_prompt_whose_step_newcomers_join():
    steps = Steps(max_num_batched_tokens=20, long_prefill_token_threshold=4)
    long = steps.add(range(2, 37), 2)
    assert rows(steps.step()) == {long: 20}
    short = steps.add(range(40, 46), 2)
    assert rows(steps.step()) == {long: 4, short: 4}
    steps.run()
    steps.assert_right()


def test_a_newcomer_that_cannot_start_leaves_the_lone_prompt_its_step():
    steps = Steps(pages=9, max_num_batched_tokens=64, long_prefill_token_threshold=4)
    long, kept_out = steps.add(range(2, 26), 2), steps.add(range(30, 50), 2)
    assert rows(steps.step()) == {long: 24}
    steps.run()
    steps.assert_right([long, kept_out])


def test_the_cap_never_holds_back_a_decode():
    plan = Plan(10, 1)
    assert plan.grant(1) == 1
    assert plan.grant(7) == 1
    plan.left = 0
    assert plan.grant(1) == 0


@pytest.mark.parametrize("budget", [64, 256, 1024, 8192])
def test_a_prefix_shared_by_simultaneous_requests_is_computed_once(budget: int):
    prefix = [2 + i % 90 for i in range(1024)]
    steps = Steps(pages=2000, page_size=16, max_num_batched_tokens=budget, max_num_seqs=64)
    for i in range(32):
        steps.add([*prefix, 5 + i, 6], 4)
    steps.run()
    steps.assert_right()
    prompt_tokens = 1024 + 32 * 2
    decodes = 32 * 3
    assert steps.scheduler.counters.computed_tokens == prompt_tokens + decodes
    assert steps.scheduler.counters.cached_tokens == 31 * 1024
