"""Policy "priority": who is more important takes the place of who runs, and nobody gives way for nothing (issue 38)."""

from __future__ import annotations

import pytest
from support.fake_engine import Steps, rows

from asyncengine.lora.admission import AdapterSlots


def busy(runners: int = 2, output: int = 30, priority: int = 5, **settings: object) -> tuple[Steps, list[int]]:
    """Unimportant requests that decode, and fill every row there is."""
    steps = Steps(**{"policy": "priority", "max_num_seqs": runners, **settings})  # type: ignore[arg-type]
    tickets = [steps.add([10 + i, 20 + i, 30 + i], output, priority=priority) for i in range(runners)]
    for _ in range(3):
        steps.step()
    assert [*steps.scheduler.running] == tickets
    return steps, tickets


def preempted(steps: Steps) -> dict[int, int]:
    return {r.ticket: r.preemptions for r in steps.scheduler.requests.values() if r.preemptions}


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens"])
def test_an_urgent_request_takes_a_row(limit: str) -> None:
    """It waited for one to end (5.9 s of other people's tokens). Rows are limited by the budget of a step as well."""
    steps, tickets = busy(**{"max_num_seqs": 64, limit: 2})
    urgent = steps.add([2, 3], 4, priority=0)
    assert urgent in rows(steps.step())
    assert preempted(steps) == {tickets[1]: 1}, "the last arrived of the least important"
    steps.run()
    steps.assert_right()
    steps.assert_empty()
    assert steps.scheduler.counters.preemptions == 1


def test_the_least_important_gives_way() -> None:
    steps = Steps(policy="priority", max_num_seqs=3)
    _, least, _ = (steps.add([10 + i, 3], 20, priority=priority) for i, priority in enumerate((3, 9, 5)))
    steps.step()
    steps.add([2, 3], 4, priority=4)
    steps.step()
    assert preempted(steps) == {least: 1}


@pytest.mark.parametrize("policy", ["fcfs", "shortest-remaining", "longest-prefix-match", "weighted-fair"])
def test_other_policies_let_who_runs_run(policy: str) -> None:
    steps, _ = busy(policy=policy)
    steps.add([2], 1, priority=-9)
    steps.run()
    assert steps.scheduler.counters.preemptions == 0


def test_equals_never_take_each_other_s_place() -> None:
    steps, _ = busy()
    for _ in range(5):
        steps.add([2, 3], 4, priority=5)
    steps.run()
    steps.assert_right()
    assert steps.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("depth", [2, 4])
def test_one_gives_way_for_one_however_many_steps_are_in_flight(depth: int) -> None:
    """Its row comes back when the last step that names it has retired: that is waited for."""
    steps, tickets = busy(max_steps_in_flight=depth)
    urgent = steps.add([2, 3], 4, priority=0)
    for _ in range(2 * depth):
        steps.step()
    assert urgent in steps.scheduler.running or urgent in steps.ended
    assert preempted(steps) == {tickets[1]: 1}
    steps.run()
    steps.assert_right()


def test_pages_are_taken_from_as_many_as_it_needs() -> None:
    steps, tickets = busy(3, pages=13, max_num_seqs=8, prefix_caching=False, output=8)
    urgent = steps.add(range(2, 30), 3, priority=0)  # eight pages of twelve
    steps.step()
    assert urgent in steps.scheduler.running
    assert [*preempted(steps)] == tickets[1:], "the first may keep its pages"
    steps.run()
    steps.assert_right()
    steps.assert_empty()


def test_nobody_gives_way_in_vain() -> None:
    """The pages that lack are held by a request that is as important: the others go on."""
    steps = Steps(policy="priority", pages=13, max_num_seqs=8, prefix_caching=False)
    equal, low = steps.add(range(2, 26), 3, priority=0), steps.add([9, 9], 12, priority=5)
    steps.step()
    urgent = steps.add(range(30, 58), 3, priority=0)
    steps.step()
    assert preempted(steps) == {}
    while equal not in steps.ended:
        assert low in rows(steps.step())
    assert urgent not in steps.ended
    steps.run()
    steps.assert_right()


def test_a_long_prompt_leaves_budget_to_who_goes_before_it() -> None:
    """Nothing is thrown away for that: it computes what is left of each step."""
    steps = Steps(policy="priority", max_num_batched_tokens=16, pages=200)
    low = steps.add([7] * 200, 3, priority=5)
    steps.step()
    urgent = steps.add([2] * 10, 2, priority=0)
    assert rows(steps.step()) == {urgent: 10, low: 6}
    second, third = steps.add([3] * 40, 2, priority=1), steps.add([4], 2, priority=5)
    assert rows(steps.step()) == {urgent: 1, second: 15}
    assert rows(steps.step()) == {second: 16}, "running prompts share by importance"
    assert rows(steps.step()) == {second: 9, low: 7}, "an equal does not go before it"
    steps.run()
    steps.assert_right()
    assert steps.scheduler.counters.preemptions == 0
    assert third in steps.ended


def test_who_waits_for_a_page_of_a_long_prompt_does_not_hold_that_up() -> None:
    steps = Steps(policy="priority", max_num_batched_tokens=4, pages=200)
    shared = list(range(2, 42))
    steps.add(shared, 2, priority=5)
    steps.step()
    steps.add([*shared, 50], 2, priority=0)
    for _ in range(9):
        assert rows(steps.step())
    steps.run()
    steps.assert_right()


def test_an_adapter_takes_the_slot_of_one_that_only_less_important_requests_use() -> None:
    slots = AdapterSlots(2)
    steps = Steps(policy="priority", adapters=slots, max_num_seqs=8)
    mixed = [steps.add([10 + i, 3], 20, adapter="A", priority=priority) for i, priority in enumerate((0, 9))]
    lows = [steps.add([20 + i, 3], 20, adapter="B", priority=4) for i in range(2)]
    steps.step()
    urgent = steps.add([2, 3], 5, adapter="C", priority=1)
    steps.step()
    assert {*preempted(steps)} == {*lows}, "without A's important one its slot would not be free"
    assert [*steps.scheduler.running] == [*mixed, urgent]
    steps.run()
    steps.assert_right()
    assert not slots.in_use


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_slots_of_adapters_are_not_fought_over(depth: int) -> None:
    steps = Steps(policy="priority", adapters=AdapterSlots(1), max_num_seqs=4, max_steps_in_flight=depth, pages=400)
    for i in range(12):
        steps.add([10 + i, 3], 12, adapter="A", priority=5)
    for _ in range(4):
        steps.step()
    urgent = steps.add([2, 3], 5, adapter="B", priority=0)
    while urgent not in steps.ended:
        steps.step()
    assert steps.scheduler.counters.preemptions == 4
    steps.run()
    steps.assert_right()


def test_who_starves_for_an_adapter_keeps_the_slot_that_drains_for_it() -> None:
    steps = Steps(policy="priority", adapters=AdapterSlots(1), max_passes=2, max_num_seqs=8, pages=400)
    steps.add([10, 3], 9, adapter="A", priority=5)
    steps.step()
    starving = steps.add([2, 3], 3, adapter="B", priority=9)
    for turn in range(60):
        steps.add([3 + turn % 50, 3], 3, adapter="A" if turn < 4 else "C", priority=6)
        steps.step()
        if starving in steps.scheduler.running:
            break
    assert starving in steps.scheduler.running
    steps.run()
    steps.assert_right()


def test_a_state_is_given_up() -> None:
    """States are few in a model that keeps recurrent ones; the request that gave way starts again from a snapshot."""
    steps, tickets = busy(3, num_states=4, pages=200, max_num_seqs=16)
    urgent = steps.add([2] * 6, 5, priority=0)
    assert urgent in rows(steps.step())
    assert preempted(steps) == {tickets[2]: 1}
    steps.run()
    steps.assert_right()
    steps.assert_empty()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_passes", [1, 4, 16])
def test_nobody_gives_way_for_ever(max_passes: int, depth: int) -> None:
    """Urgent requests without end: one that was passed over `max_passes` times keeps its place (contract 8)."""
    steps = Steps(policy="priority", max_num_seqs=1, max_passes=max_passes, max_steps_in_flight=depth, pages=400)
    victim = steps.add([77] * 11, 20, priority=9)
    most = 0
    for turn in range(2000):
        if victim in steps.ended:
            break
        most = max(most, steps.request(victim).preemptions)
        if turn % 2:
            steps.add([5, 6], 1, priority=0)
        steps.step()
    assert steps.ended[victim] == "length"
    assert 1 <= most <= max_passes + 1
    steps.run()
    steps.assert_right()


def test_a_cascade_of_importance() -> None:
    """Each newcomer is more important than all before: each takes the one row, and they end in reverse."""
    steps = Steps(policy="priority", max_num_seqs=1, pages=400)
    tickets = []
    for priority in (5, 4, 3, 2, 1):
        tickets.append(steps.add([10 * priority, 3], 6, priority=priority))
        steps.step()
        steps.step()
    steps.run()
    steps.assert_right()
    assert [*steps.ended] == tickets[::-1]
    assert steps.scheduler.counters.preemptions == 4
