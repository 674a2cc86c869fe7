"""Memory runs out: who loses its pages, what it keeps, and that nobody can tell from the tokens (contract 4)."""

from typing import Any

import pytest
from support.fake_engine import Steps

from asyncengine import Policy
from asyncengine.policies import ByPriority


def squeeze(policy: str | Policy = "fcfs", priorities: tuple[int, ...] = (0, 5, 1), **settings: Any) -> Steps:
    """Three decoding requests in a cache that cannot hold all of them to their ends."""
    steps = Steps(pages=13, policy=policy, prefix_caching=False, **settings)
    for i, priority in enumerate(priorities):
        steps.add([10 + i, 20 + i, 30 + i], 28, priority=priority)
    return steps


def first_victim(steps: Steps) -> int:
    while not steps.scheduler.counters.preemptions:
        steps.step()
    (victim,) = [r.ticket for r in steps.scheduler.requests.values() if r.preemptions]
    return victim


@pytest.mark.parametrize(
    ("policy", "priorities", "victim"),
    [
        ("fcfs", (0, 5, 1), 3), ("priority", (0, 5, 1), 2), ("priority", (4, 4, 4), 3),
        ("shortest-remaining", (0, 5, 1), 3), ("longest-prefix-match", (0, 5, 1), 3),
    ],
)  # fmt: skip
def test_the_last_arrived_or_the_least_important_is_preempted(policy: str, priorities: tuple[int, ...], victim: int):
    assert first_victim(squeeze(policy, priorities)) == victim


def test_one_that_waited_too_long_is_preempted_last():
    steps = squeeze("priority")
    steps.step()
    steps.request(2).overdue = True
    assert first_victim(steps) == 3


class Patient(ByPriority):
    """Priorities that order the queue and choose victims, and take nobody's place."""

    preempts = Policy.preempts


def test_nobody_starts_in_a_step_that_preempted():
    """An urgent request that would fit into what the victim gave back does not start either."""
    steps = squeeze(Patient(), max_num_seqs=3)
    steps.step()
    steps.add([3], 2, priority=-1)
    for _ in range(200):
        preemptions = steps.scheduler.counters.preemptions
        admitted = {r.ticket for r in steps.scheduler.running.values()}
        steps.launch()
        if steps.scheduler.counters.preemptions > preemptions:
            assert {r.ticket for r in steps.scheduler.running.values()} <= admitted
        if steps.launched:
            steps.commit()
        if not steps.scheduler.requests:
            break
    assert steps.scheduler.counters.preemptions
    steps.assert_right()


def test_a_preempted_request_goes_to_the_front_of_its_class():
    steps = squeeze(max_num_seqs=3)
    later = [steps.add([40 + i, 3], 2) for i in range(3)]
    victim = first_victim(steps)
    assert [r.ticket for r in steps.scheduler.waiting.in_order()] == [victim, *later]


def test_a_preempted_request_stays_behind_more_important_ones():
    steps = squeeze(Patient(), max_num_seqs=3)
    steps.step()
    urgent = steps.add([40, 3], 2, priority=-1)
    background = steps.add([41, 3], 2, priority=5)
    victim = first_victim(steps)
    assert [r.ticket for r in steps.scheduler.waiting.in_order()] == [urgent, victim, background]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_forced_preemption_is_invisible(caching: bool, depth: int, every: int, policy: str):
    steps = Steps(
        prefix_caching=caching, max_steps_in_flight=depth, preempt_every=every, policy=policy, max_num_batched_tokens=16
    )
    for i in range(6):
        steps.add(range(i, i + 3 + 2 * i), 11, priority=i % 3)
    steps.run()
    assert steps.scheduler.counters.preemptions >= 2
    steps.assert_right()
    steps.assert_empty()


def test_the_last_request_without_memory_ends_with_an_error_and_the_engine_lives():
    """Submit refuses what can never fit; should one slip through, it costs nobody else anything."""
    steps = Steps(pages=5)
    doomed = steps.add(range(2, 12), 30)
    steps.run()
    assert steps.ended[doomed] == "error"
    assert steps.errors[doomed] == "needs 5 KV pages, the cache has 4"
    assert steps.tokens[doomed] == steps.expected[doomed][: len(steps.tokens[doomed])]
    steps.assert_empty()
    fine = steps.add([2, 3, 4], 5)
    steps.run()
    steps.assert_right([fine])


def test_running_requests_wait_for_retiring_pages_rather_than_preempt():
    steps = Steps(pages=9, max_steps_in_flight=2, prefix_caching=False)
    leaver = steps.add(range(2, 14), 8)
    stayer = steps.add([50, 51], 24)
    for _ in range(60):
        steps.launch()
        if len(steps.tokens[leaver]) == 3:
            steps.abort(leaver)
            break
        if len(steps.launched) >= 2:
            steps.commit()
    assert any(group.retiring for group in steps.kv.groups)
    steps.run()
    assert steps.scheduler.counters.preemptions == 0
    steps.assert_right([stayer])
