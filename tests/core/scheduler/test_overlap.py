"""Several steps in flight: nothing is launched in vain, and results come in order (tests/worlds has the answers)."""

import pytest
from support.fake_engine import Steps
from support.plug_points import Letters

from asyncengine.errors import InvariantViolation
from asyncengine.scheduler.messages import GrammarReady


def test_a_result_out_of_order_is_an_engine_bug():
    steps = Steps(max_steps_in_flight=2)
    steps.add([2, 3, 4], 8)
    steps.launch()
    steps.launch()
    steps.launched.rotate()
    with pytest.raises(InvariantViolation, match="result of step 2, but step 1 is the oldest"):
        steps.commit()


def test_a_token_that_its_grammar_lets_pass_keeps_the_step_behind_it():
    """Each position is computed once, though the next step is launched before the token is known."""
    steps = Steps(max_steps_in_flight=2)
    ticket = steps.add([2, 3], 12, needs_grammar=True)
    steps.apply(GrammarReady(ticket, Letters(range(2, 97), 12)))
    steps.run()
    assert steps.scheduler.counters.computed_tokens == 2 + 11
    assert len(steps.tokens[ticket]) == 12
