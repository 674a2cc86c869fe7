"""Requests whose grammar compiles wait aside; their masks hold and their matchers see every token exactly once."""

import pytest
from support.fake_engine import Steps, rows
from support.plug_points import Letters

from asyncengine.scheduler.messages import AdapterReady, GrammarReady
from asyncengine.scheduler.request import RequestState


def test_others_proceed_while_a_grammar_compiles():
    steps = Steps()
    queued = steps.add([2, 3], 4, needs_grammar=True)
    other = steps.add([4, 5], 4)
    steps.step()
    assert rows(steps.batches[0]) == {other: 2}
    assert steps.request(queued).state is RequestState.GRAMMAR_QUEUE
    assert steps.request(queued).table is None
    for _ in range(10):
        steps.step()
    assert steps.ended == {other: "length"}
    assert all(queued not in rows(batch) for batch in steps.batches), "never prefills while queued"


def test_nothing_to_do_but_wait_for_a_grammar():
    steps = Steps()
    steps.add([2, 3], 4, needs_grammar=True)
    assert steps.step() is None


def test_a_ready_grammar_keeps_its_order_of_arrival():
    steps = Steps(max_num_seqs=1)
    steps.add([9, 9], 3)
    steps.step()
    first, second, third = steps.add([2, 3], 2, needs_grammar=True), steps.add([4, 5], 2), steps.add([6, 7], 2)
    steps.apply(GrammarReady(first, Letters([5, 6], 2)))
    assert [r.ticket for r in steps.scheduler.waiting.in_order()] == [first, second, third]
    steps.run()
    steps.assert_right([second, third])


def test_a_failed_grammar_ends_its_request_only():
    steps = Steps()
    bad, good = steps.add([2, 3], 4, needs_grammar=True), steps.add([4, 5], 4)
    steps.apply(GrammarReady(bad, error="unbalanced parenthesis"))
    assert (steps.ended[bad], steps.errors[bad]) == ("error", "unbalanced parenthesis")
    steps.run()
    steps.assert_right([good])
    steps.assert_empty()


def test_a_grammar_that_comes_after_its_request_has_left_changes_nothing():
    steps = Steps()
    gone = steps.add([2, 3], 4, needs_grammar=True)
    steps.abort(gone)
    steps.apply(GrammarReady(gone, Letters([5], 2)))
    steps.apply(GrammarReady(gone, error="late"))
    steps.apply(GrammarReady(999, Letters([5], 2)))
    assert steps.ended == {gone: "abort"}
    steps.assert_empty()


def test_a_second_answer_of_the_compiler_does_not_touch_the_running_matcher():
    steps = Steps()
    ticket, matcher = steps.add([2, 3], 9, needs_grammar=True), Letters([5, 6, 7], 4)
    steps.apply(GrammarReady(ticket, matcher))
    steps.step()
    steps.apply(GrammarReady(ticket, error="too late"))
    assert steps.request(ticket).matcher is matcher
    steps.run()
    assert len(matcher.advanced) == 4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preempt_every", [None, 2, 3])
def test_masks_hold_and_each_token_advances_the_matcher_once(depth: int, preempt_every: int | None):
    steps = Steps(max_steps_in_flight=depth, preempt_every=preempt_every, max_num_batched_tokens=32)
    matchers = {}
    for i in range(4):
        ticket = steps.add([2 + i, 3, 4], 30, needs_grammar=True)
        matchers[ticket] = Letters(range(10 + i, 14 + i), 9)
        steps.apply(GrammarReady(ticket, matchers[ticket]))
        steps.add([30 + i, 3], 12)
    steps.run()
    for ticket, matcher in matchers.items():
        assert steps.ended[ticket] == "stop"
        assert steps.tokens[ticket] == matcher.advanced
        assert len(matcher.advanced) == matcher.length
        assert set(matcher.advanced) <= set(matcher.allowed)
    assert bool(steps.scheduler.counters.preemptions) == (preempt_every is not None)
    steps.assert_empty()


def test_a_constrained_request_is_launched_before_its_last_token_is_known():
    steps = Steps(max_steps_in_flight=2)
    ticket, matcher = steps.add([2, 3, 4], 30, needs_grammar=True), Letters([10, 11], 6)
    steps.apply(GrammarReady(ticket, matcher))
    steps.run()
    assert sum(row.in_flight for batch in steps.batches for row in batch.rows) >= 5
    assert steps.tokens[ticket] == matcher.advanced
    assert len(matcher.advanced) == 6, "the step launched beyond the end moved nothing"


class Steering(Letters):
    """Puts another token in the place of the third and of the fifth."""

    def accept(self, token_id: int, jump: bool = True) -> list[int]:
        self.steered = self.steered or len(self.advanced) in (2, 4)
        return super().accept(min(self.allowed) if len(self.advanced) in (2, 4) else token_id)


@pytest.mark.parametrize("depth", [2, 3])
def test_what_was_launched_for_a_replaced_token_is_computed_again(depth: int):
    steps = Steps(max_steps_in_flight=depth)
    ticket, other = steps.add([2, 3, 4], 30, needs_grammar=True), steps.add([5, 6], 12)
    matcher = Steering([20, 10, 11, 12, 13, 14], 8)
    steps.apply(GrammarReady(ticket, matcher))
    steps.run()
    plain = Steps()
    again = plain.add([2, 3, 4], 30, needs_grammar=True)
    plain.apply(GrammarReady(again, Steering([20, 10, 11, 12, 13, 14], 8)))
    plain.run()
    assert steps.tokens[ticket] == plain.tokens[again] == matcher.advanced
    assert steps.ended[ticket] == "length"
    steps.assert_right([other])
    steps.assert_empty()


def test_a_matcher_that_raises_ends_its_request_only():
    steps = Steps()
    ticket, matcher = steps.add([2, 3], 9, needs_grammar=True), Letters([5, 6, 7], 8)
    matcher.fail_at = 2
    steps.apply(GrammarReady(ticket, matcher))
    other = steps.add([4, 5], 9)
    steps.run()
    assert steps.ended[ticket] == "error"
    assert "matcher broke" in (steps.errors[ticket] or "")
    steps.assert_right([other])
    steps.assert_empty()


@pytest.mark.parametrize("grammar_first", [True, False])
def test_a_request_waits_for_both_its_grammar_and_its_adapter(grammar_first: bool):
    steps = Steps()
    ticket = steps.add([2, 3], 4, needs_grammar=True, adapter_loading=True)
    messages = [GrammarReady(ticket, Letters([5, 6], 3)), AdapterReady(ticket)]
    for message in messages if grammar_first else reversed(messages):
        assert steps.step() is None
        steps.apply(message)
    steps.run()
    assert steps.ended[ticket] == "stop"


def test_an_adapter_that_cannot_be_loaded_ends_a_request_in_both_queues():
    steps = Steps()
    ticket = steps.add([2, 3], 4, needs_grammar=True, adapter_loading=True)
    steps.apply(AdapterReady(ticket, error="no such file"))
    assert steps.ended == {ticket: "error"}
    steps.apply(GrammarReady(ticket, Letters([5], 2)))
    steps.assert_empty()
    assert not steps.scheduler.grammar_queue
