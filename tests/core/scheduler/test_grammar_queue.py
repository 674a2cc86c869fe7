"""Requests whose grammar compiles wait aside, and nobody else does (tests/worlds has their answers)."""

from support.fake_engine import Steps
from support.plug_points import Letters

from asyncengine.scheduler.messages import GrammarReady


def test_a_ready_grammar_keeps_its_order_of_arrival():
    steps = Steps(max_num_seqs=1)
    steps.add([9, 9], 3)
    steps.step()
    first, second, third = steps.add([2, 3], 2, needs_grammar=True), steps.add([4, 5], 2), steps.add([6, 7], 2)
    steps.apply(GrammarReady(first, Letters([5, 6], 2)))
    assert [r.ticket for r in steps.scheduler.waiting.in_order()] == [first, second, third]
    steps.run()
    steps.assert_right([second, third])
