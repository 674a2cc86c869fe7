"""Several steps in flight: nothing is launched in vain, and results come in order (tests/worlds has the answers)."""

import pytest
from support.fake_engine import Steps, rows

from asyncengine.errors import InvariantViolation


def test_nothing_is_launched_beyond_the_length_limit():
    steps = Steps(max_steps_in_flight=2)
    ticket = steps.add([2, 3], 5)
    steps.run()
    assert sum(batch.num_tokens for batch in steps.batches) == 2 + 4
    steps.assert_right([ticket])


def test_memory_pressure_with_steps_in_flight_delivers_every_token_in_order():
    """The scenario of vLLM's test_kv_pressure_preemption_with_inflight_output must really happen."""
    for depth in (2, 3, 4):
        steps = Steps(pages=24, max_steps_in_flight=depth, prefix_caching=False)
        for i in range(8):
            steps.add([10 + i, 3, 5], 24)
        in_flight_preemptions = 0
        while steps.scheduler.requests or steps.launched:
            batch = steps.launch()
            in_flight_preemptions += any(request.num_pending for request in steps.scheduler.waiting)
            if batch is None or len(steps.launched) >= depth:
                steps.commit()
        assert in_flight_preemptions
        steps.assert_right()
        steps.assert_empty()


def test_a_result_out_of_order_is_an_engine_bug():
    steps = Steps(max_steps_in_flight=2)
    steps.add([2, 3, 4], 8)
    steps.launch()
    steps.launch()
    steps.launched.rotate()
    with pytest.raises(InvariantViolation, match="result of step 2, but step 1 is the oldest"):
        steps.commit()


@pytest.mark.parametrize("stages", [2, 3])
def test_steps_of_a_pipeline_divide_the_requests(stages: int):
    """A step has a part of those that decode, and nobody is in two steps."""
    steps = Steps(max_steps_in_flight=stages, pipeline_parallel=stages, pages=200)
    tickets = [steps.add([2 + each, 3], 30) for each in range(7)]
    assert len(rows(steps.launch()) or {}) == 7, "prompts go as far as the budget does"
    steps.commit()
    most = -(-7 // stages)
    for turn in range(20):
        flying = steps.batches[len(steps.batches) - len(steps.launched) :]
        before = [row.spec.ticket for batch in flying for row in batch.rows]
        found = rows(steps.launch()) or {}
        assert 0 < len(found) <= most
        assert not set(found) & set(before)
        if turn >= stages - 1:
            steps.commit()
    steps.run()
    steps.assert_right(tickets)
    steps.assert_empty()
    counts = {len(batch.rows) for batch in steps.batches[1:20]}
    assert counts == {most, 7 - (stages - 1) * most}


def test_chunks_of_a_prompt_follow_each_other_through_a_pipeline():
    steps = Steps(max_steps_in_flight=2, pipeline_parallel=2, max_num_batched_tokens=8)
    ticket = steps.add(range(2, 22), 4)
    assert [rows(steps.launch()) for _ in range(2)] == [{ticket: 8}, {ticket: 8}]
    steps.commit()
    assert rows(steps.launch()) == {ticket: 4}
    steps.commit()
    assert steps.launch() is None, "its token is not known yet"
    steps.run()
    steps.assert_right([ticket])
