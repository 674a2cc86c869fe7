"""A caller's prediction is computed with the end of its prompt, where no other request waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from asyncengine import SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.kvcache import KVCache
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler import Scheduler
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.planner import Candidate
from asyncengine.step import Row, StepResult

COSTS = (1.0, 1.18, 1.9)
ANSWER = tuple(range(100, 120))


def request(ticket: int, prompt: range, **fields: Any) -> RequestSpec:
    return RequestSpec(ticket, tuple(prompt), SamplingParams(), 200, **fields)


def scheduler(**fields: Any) -> Scheduler:
    config = EngineConfig(speculation_costs=COSTS, speculation_tokens=7, **fields)
    return Scheduler(config, KVCache(64, 16))


def planned(scheduler: Scheduler) -> tuple[Row, ...]:
    batch = scheduler.schedule(0.0)
    assert batch is not None
    return batch.rows


@pytest.mark.parametrize("length", [3, 50, 90])
def test_the_first_step_brings_several_tokens(length: int) -> None:
    made = scheduler()
    made.apply(request(1, range(length), prediction=ANSWER))
    (row,) = planned(made)
    assert (row.num_scheduled, row.drafts) == (length + 7, ANSWER[:7])
    made.commit(StepResult(1, [100], {0: [101, 102, 7]}, {0: 3}, {0: 7}), 0.0)
    found = made.requests[1]
    assert found.tokens[length:] == [100, 101, 102, 7]
    assert (found.num_computed, found.num_launched) == (length + 3, length + 3)
    made.check()


def test_nobody_elses_prompt_waits_for_a_guess() -> None:
    made = scheduler()
    made.apply(request(1, range(20), prediction=ANSWER))
    made.apply(request(2, range(30, 50)))
    assert [row.drafts for row in planned(made)] == [(), ()]


def test_without_a_prediction_a_prompt_is_computed_as_it_is() -> None:
    """Nothing is guessed, though what comes could be found in the prompt."""
    made = scheduler()
    made.apply(RequestSpec(1, (5, 6, 7, 8, 5, 6), SamplingParams(), 200))
    assert [row.drafts for row in planned(made)] == [()]


def test_a_part_of_a_prompt_has_none() -> None:
    made = scheduler(max_num_batched_tokens=32)
    made.apply(request(1, range(40), prediction=ANSWER))
    (row,) = planned(made)
    assert (row.num_scheduled, row.drafts) == (32, ())
    made.commit(StepResult(1, [-1]), 0.0)
    (row,) = planned(made)
    assert (row.num_scheduled, row.drafts) == (8 + 7, ANSWER[:7])


def test_fewer_where_each_takes_longer() -> None:
    """Beside a long prompt a token costs what the last of the measured ones do."""
    spec = request(1, range(50), prediction=ANSWER)
    candidate = Candidate(1, spec, list(spec.prompt), (), 15)
    steep = DraftPlanner(StepCosts((1.0, 4.0, 29.0)), 15).plan_behind_prompt(candidate, 50)
    flat = DraftPlanner(StepCosts(COSTS), 15).plan_behind_prompt(candidate, 50)
    assert len(steep) < len(flat) == 15
