"""Figures and positions of requests after a step: what is counted of rows of several tokens, and where they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.fake_engine import Steps, rows
from support.plug_points import Letters

from asyncengine import SamplingParams
from asyncengine.lora.admission import AdapterSlots
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.drafts import Drafting
from asyncengine.scheduler.messages import GrammarReady
from asyncengine.step import ConstrainedToken, StepResult


@pytest.mark.parametrize(("stop", "taken", "forced"), [(5, 1, 0), (6, 2, 0), (7, 3, 1), (8, 4, 2), (9, 4, 2)])
def test_tokens_behind_a_stop_are_not_counted(stop: int, taken: int, forced: int) -> None:
    """The last two of four tokens are forced; one of the caller's stop ids is among the four, or none."""
    steps = Steps()
    ticket = steps.add([2, 3], 8, needs_grammar=True, stop_ids=(stop,))
    steps.apply(GrammarReady(ticket, Letters([5, 6, 7, 8], 8)))
    assert steps.scheduler.schedule(0.0) is not None
    made = ConstrainedToken(replaced=False, complete=False, steered_from=None, forced=2)
    steps.scheduler.commit(StepResult(1, [5], {0: [6, 7, 8]}, constrained={0: made}), 0.0)
    counters = steps.scheduler.counters
    assert [output.token for output in steps.scheduler.take_outputs()] == [5, 6, 7, 8][:taken]
    assert (counters.generated_tokens, counters.forced_tokens) == (taken, forced)


def test_a_request_that_goes_on_from_the_cache_has_computed_all_of_its_row() -> None:
    """The row may begin behind the prompt, too."""
    steps = Steps(preempt_every=7)
    ticket = steps.add([2, 3], 30)
    resumed = 0
    while steps.scheduler.requests:
        batch = steps.launch()
        assert batch is not None
        (row,) = batch.rows
        request = steps.request(ticket)
        steps.commit()
        if row.num_scheduled > 1 and row.start > 2 and steps.scheduler.requests:
            resumed += 1
            assert request.num_computed == row.start + row.num_scheduled
    assert resumed
    steps.assert_right()


def test_as_many_waiting_requests_are_looked_at_as_the_setting_says() -> None:
    """Requests without a slot for their adapter, and samples whose prompt is being computed, count once each."""
    steps = Steps(adapters=AdapterSlots(1), admission_lookahead=2)
    running = steps.add([2, 3], 6, adapter="A")
    steps.step()
    for adapter in "BC":
        steps.add([4, 5], 3, adapter=adapter)
    plain = steps.add([8, 9], 3)
    assert rows(steps.step()) == {running: 1, plain: 2}
    steps = Steps(max_num_batched_tokens=8, long_prefill_token_threshold=4, admission_lookahead=2)
    first, *_ = steps.add_group(range(20, 32), 3, 3)
    other = steps.add([2, 3], 3)
    assert rows(steps.step()) == {first: 4, other: 2}


def test_a_planner_is_told_how_many_tokens_may_follow() -> None:
    """One less than is left of the answer, as the last is sampled; it is not asked where that is none."""
    asked: list[int] = []
    planner = SimpleNamespace(promises=lambda candidate, running: asked.append(candidate.room) or True)
    roster = SimpleNamespace(drafts=planner, namespace=lambda request: (), running=[])
    drafting = Drafting(cast(Any, roster), adapters=True)
    for known in (10, 37, 38, 39):
        spec = RequestSpec(1, (2, 3), SamplingParams(), 40)
        drafting.worth_waiting(cast(Any, SimpleNamespace(spec=spec, tokens=[2] * known, ticket=1, adapter_slot=0)))
    assert asked == [28, 1]
