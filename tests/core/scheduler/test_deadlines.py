"""Deadlines end a request with a reason, not an exception: waiting, in all, and between two tokens (contract 9)."""

import pytest
from support.fake_engine import Steps

from asyncengine.scheduler.messages import GrammarReady


def test_a_request_that_waits_too_long_times_out():
    steps = Steps(max_num_seqs=1)
    running = steps.add([2, 3], 50)
    steps.step()
    waiting = steps.add([4, 5], 5, waiting_deadline=3.0)
    steps.now = 2.9
    steps.step()
    assert not steps.ended
    steps.now = 3.0
    steps.step()
    assert steps.ended == {waiting: "timeout"}
    steps.run()
    steps.assert_right([running])
    steps.assert_empty()


def test_a_preempted_request_does_not_count_as_waiting():
    steps = Steps()
    ticket = steps.add([2, 3], 5, waiting_deadline=3.0)
    steps.step()
    steps.scheduler.roster.preempt(steps.request(ticket))
    steps.now = 100.0
    steps.run()
    steps.assert_right([ticket])


def test_a_request_that_takes_too_long_in_all_keeps_what_it_has():
    steps = Steps()
    ticket = steps.add([2, 3], 50, deadline=5.0)
    for _ in range(5):
        steps.step()
        steps.now += 1
    steps.step()
    assert steps.ended == {ticket: "timeout"}
    assert steps.tokens[ticket] == steps.expected[ticket][:5]
    steps.assert_empty()


@pytest.mark.parametrize("kind", ["needs_grammar", "adapter_loading"])
def test_deadlines_count_in_the_side_queues_too(kind: str):
    steps = Steps()
    ticket = steps.add([2, 3], 5, deadline=5.0, **{kind: True})
    steps.now = 5.0
    assert steps.step() is None
    assert steps.ended == {ticket: "timeout"}
    steps.apply(GrammarReady(ticket, error="late"))
    steps.assert_empty()


def test_too_long_between_two_tokens():
    steps = Steps(max_num_seqs=1)
    ticket = steps.add([2, 3], 50, inter_token_timeout=2.0)
    for _ in range(4):
        steps.step()
        steps.now += 1.9
    assert not steps.ended
    steps.now += 0.2
    steps.step()
    assert steps.ended == {ticket: "timeout"}
    assert len(steps.tokens[ticket]) == 4


def test_the_wait_for_the_first_token_is_not_between_two():
    steps = Steps(max_num_seqs=1)
    steps.add([2, 3], 3)
    steps.step()
    ticket = steps.add([4, 5], 3, inter_token_timeout=2.0)
    steps.now = 50.0
    steps.run()
    steps.assert_right([ticket])


def test_a_late_request_is_noticed_although_another_scan_came_before():
    steps = Steps(max_num_seqs=1)
    steps.add([2, 3], 60)
    steps.step()
    tickets = [steps.add([4, 5 + i], 3, deadline=float(10 - i)) for i in range(8)]
    for second in range(12):
        steps.now = float(second)
        steps.step()
        late = [t for i, t in enumerate(tickets) if 10 - i <= second]
        assert sorted(steps.ended) == sorted(late)


def test_next_deadline_never_lies_after_the_first_request_that_is_due():
    steps = Steps(max_num_seqs=1)
    assert steps.scheduler.next_deadline == float("inf")
    steps.add([2, 3], 60, deadline=9.0)
    steps.add([2, 3], 60, inter_token_timeout=4.0)
    assert steps.scheduler.next_deadline <= 4.0
    steps.now = 4.0
    steps.step()
    assert 4.0 < steps.scheduler.next_deadline <= 9.0
    steps.now = 9.0
    steps.step()
    assert steps.ended == {1: "timeout"}


def test_a_timeout_with_a_step_in_flight_frees_only_after_it():
    steps = Steps(max_steps_in_flight=2)
    ticket = steps.add(range(2, 14), 30, deadline=1.0)
    steps.launch()
    steps.now = 2.0
    assert steps.launch() is None
    assert steps.ended == {ticket: "timeout"}
    assert any(group.retiring for group in steps.kv.groups)
    steps.commit()
    steps.assert_empty()
    assert steps.tokens[ticket] == []


def test_two_thousand_deadlines_in_one_step():
    """One pass, not one pass for each: a burst of timeouts must not stop the loop."""
    steps = Steps(max_num_seqs=1)
    for i in range(2000):
        steps.scheduler.apply(_bulk(i + 1))
    examined = 0

    class Watched(dict):
        def values(self):
            nonlocal examined
            for value in super().values():
                examined += 1
                yield value

    steps.scheduler.roster.deadlines.requests = Watched(steps.scheduler.roster.deadlines.requests)
    steps.scheduler.schedule(6.0)
    assert not steps.scheduler.requests
    assert examined == 2000


def _bulk(ticket: int):
    from support.fake_engine import greedy

    from asyncengine.request_spec import RequestSpec

    return RequestSpec(ticket, (2, 3, 4), greedy(4), 7, deadline=5.0)
