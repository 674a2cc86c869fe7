"""Several steps in flight: nothing is launched in vain, and results come in order (tests/worlds has the answers)."""

import pytest
from support.fake_engine import Steps

from asyncengine.errors import InvariantViolation


def test_a_result_out_of_order_is_an_engine_bug():
    steps = Steps(max_steps_in_flight=2)
    steps.add([2, 3, 4], 8)
    steps.launch()
    steps.launch()
    steps.launched.rotate()
    with pytest.raises(InvariantViolation, match="result of step 2, but step 1 is the oldest"):
        steps.commit()
