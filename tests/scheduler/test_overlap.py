"""Several steps in flight: nothing is launched in vain, and results come in order (tests/fuzz has the answers)."""

import pytest
from support.fake_engine import Steps

from asyncengine.errors import InvariantViolation


def test_nothing_is_launched_beyond_the_length_limit():
    steps = Steps(max_steps_in_flight=2)
    ticket = steps.add([2, 3], 5)
    steps.run()
    assert sum(batch.num_tokens for batch in steps.batches) == 2 + 4
    steps.assert_right([ticket])


def test_memory_pressure_with_steps_in_flight_delivers_every_token_in_order():
    """After vLLM's test_kv_pressure_preemption_with_inflight_output; the scenario must really happen."""
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
