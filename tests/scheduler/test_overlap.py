"""Two steps in flight: results come a step late, and what a launched step names stays until it retires."""

import pytest
from support.fake_engine import Steps, rows

from asyncengine.errors import InvariantViolation
from asyncengine.testing.fake_runner import FakeModel


def test_the_next_step_starts_from_a_token_that_is_not_known_yet():
    steps = Steps(max_steps_in_flight=2)
    ticket = steps.add([2, 3, 4], 6)
    first, second = steps.launch(), steps.launch()
    assert rows(first) == {ticket: 3}
    assert rows(second) == {ticket: 1}
    assert second is not None
    assert second.rows[0].in_flight
    steps.run()
    steps.assert_right()


def test_the_token_after_an_end_noticed_late_is_dropped():
    model = FakeModel(eos_every=6)
    steps = Steps(max_steps_in_flight=2, model=model, pages=200)
    tickets = [steps.add([2 + i, 3], 40, stop_ids=(1,)) for i in range(12)]
    steps.run()
    steps.assert_right(tickets)
    stopped = [t for t in tickets if steps.ended[t] == "stop"]
    assert len(stopped) > 5, "the scenario must happen"
    launched = sum(batch.num_tokens for batch in steps.batches)
    needed = sum(2 + len(steps.tokens[t]) - 1 for t in tickets)
    assert launched >= needed + len(stopped), "each of them had one step too many in flight"
    steps.assert_empty()


def test_nothing_is_launched_beyond_the_length_limit():
    steps = Steps(max_steps_in_flight=2)
    ticket = steps.add([2, 3], 5)
    steps.run()
    assert sum(batch.num_tokens for batch in steps.batches) == 2 + 4
    steps.assert_right([ticket])


def test_abort_with_a_step_in_flight_frees_only_after_it_retires():
    steps = Steps(max_steps_in_flight=2, prefix_caching=False)
    ticket = steps.add(range(2, 14), 30)
    steps.launch()
    steps.launch()
    free = steps.kv.pool.num_free
    steps.abort(ticket)
    assert steps.kv.pool.num_free == free
    assert steps.scheduler.roster.slots.num_free == 255
    steps.commit()
    assert steps.kv.pool.num_free == free, "the second step still writes there"
    steps.commit()
    assert steps.kv.pool.num_free == steps.kv.pool.capacity
    assert steps.scheduler.roster.slots.num_free == 256
    assert steps.tokens[ticket] == []


def test_preemption_with_a_token_in_flight_keeps_the_token():
    steps = Steps(max_steps_in_flight=2)
    ticket = steps.add([2, 3, 4], 8)
    steps.launch()
    steps.scheduler.roster.preempt(steps.request(ticket))
    assert steps.request(ticket).num_pending == 1
    assert steps.launch() is None, "not resumed before its token is known"
    steps.commit()
    assert steps.tokens[ticket] == steps.expected[ticket][:1]
    steps.run()
    steps.assert_right()


def test_a_preempted_request_whose_last_token_is_in_flight_ends():
    steps = Steps(max_steps_in_flight=2)
    ticket = steps.add([2, 3, 4], 1)
    steps.launch()
    steps.scheduler.roster.preempt(steps.request(ticket))
    steps.commit()
    assert steps.ended == {ticket: "length"}
    steps.assert_empty()


def test_a_chunk_of_an_earlier_life_says_nothing_about_the_pages_of_this_one():
    """Preempted and readmitted while an inner chunk is still in flight: its result must not count as computed."""
    steps = Steps(max_steps_in_flight=2, max_num_batched_tokens=8, prefix_caching=False)
    ticket = steps.add(range(2, 40), 4)
    steps.launch()
    steps.scheduler.roster.preempt(steps.request(ticket))
    assert rows(steps.launch()) == {ticket: 8}
    request = steps.request(ticket)
    assert (request.epoch, request.num_launched) == (1, 8)
    steps.commit()
    assert request.num_computed == 0
    steps.commit()
    assert request.num_computed == 8
    steps.run()
    steps.assert_right()


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


def test_a_fault_of_one_row_ends_one_request():
    for depth in (1, 2):
        steps = Steps(max_steps_in_flight=depth)
        tickets = [steps.add([2 + i, 3], 6) for i in range(3)]
        steps.step()
        steps.executor.fail_tickets[tickets[1]] = "not a number"
        steps.run()
        assert (steps.ended[tickets[1]], steps.errors[tickets[1]]) == ("error", "not a number")
        steps.assert_right([tickets[0], tickets[2]])
        steps.assert_empty()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_does_not_change_the_answer(depth: int):
    steps = Steps(max_steps_in_flight=depth, pages=30, max_num_batched_tokens=11, model=FakeModel(eos_every=15))
    for i in range(12):
        steps.add(range(i, i + 2 + i), 13, stop_ids=(1,))
    steps.run()
    steps.assert_right()
    steps.assert_empty()


def test_pages_are_published_only_when_the_step_that_wrote_them_has_committed():
    steps = Steps(max_steps_in_flight=2, max_num_batched_tokens=8)
    ticket = steps.add(range(2, 40), 4)
    steps.launch()
    steps.launch()
    table = steps.request(ticket).table
    assert table is not None
    assert (table.num_shared, steps.kv.tree.num_pages) == (0, 0)
    steps.commit()
    assert (steps.request(ticket).num_computed, steps.kv.tree.num_pages) == (8, 2)
    steps.commit()
    assert (steps.request(ticket).num_computed, steps.kv.tree.num_pages) == (16, 4)
