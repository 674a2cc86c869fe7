"""Requests whose grammar compiles wait aside, and nobody else does (tests/worlds has their answers)."""

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


def test_a_constrained_request_is_launched_before_its_last_token_is_known():
    steps = Steps(max_steps_in_flight=2)
    ticket, matcher = steps.add([2, 3, 4], 30, needs_grammar=True), Letters([10, 11], 6)
    steps.apply(GrammarReady(ticket, matcher))
    steps.run()
    assert sum(row.in_flight for batch in steps.batches for row in batch.rows) >= 5
    assert steps.tokens[ticket] == matcher.advanced
    assert len(matcher.advanced) == 6, "the step launched beyond the end moved nothing"


def test_an_adapter_that_cannot_be_loaded_ends_a_request_in_both_queues():
    steps = Steps()
    ticket = steps.add([2, 3], 4, needs_grammar=True, adapter_loading=True)
    steps.apply(AdapterReady(ticket, error="no such file"))
    assert steps.ended == {ticket: "error"}
    steps.apply(GrammarReady(ticket, Letters([5], 2)))
    steps.assert_empty()
    assert not steps.scheduler.grammar_queue
