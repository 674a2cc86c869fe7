"""The order in which waiting requests start, and that nobody is passed over for ever."""

import random

import pytest
from support.fake_engine import Steps


def starts(steps: Steps) -> list[int]:
    """Tickets in the order of their first step."""
    seen: dict[int, None] = {}
    for batch in steps.batches:
        for row in batch.rows:
            seen.setdefault(row.spec.ticket)
    return list(seen)


@pytest.mark.parametrize(
    ("policy", "asked", "order"),
    [
        # (tokens of the prompt, most tokens of the output, priority) of each request behind the first
        ("fcfs", [(9, 2, -9), (2, 2, -2), (5, 2, -5)], [1, 2, 3, 4]),
        ("priority", [(3, 2, 1), (3, 2, 0), (3, 2, 1), (3, 2, -3)], [1, 5, 3, 2, 4]),
        ("shortest-remaining", [(9, 9, 0), (2, 3, 0), (2, 30, 0), (3, 2, 0)], [1, 3, 5, 2, 4]),
    ],
)
def test_a_policy_starts_requests_in_its_order(policy: str, asked: list[tuple[int, int, int]], order: list[int]):
    steps = Steps(policy=policy, max_num_seqs=1)
    steps.add([90, 91], 2)
    steps.step()  # it runs: what is added next has to wait
    for size, output, priority in asked:
        steps.add(range(2, 2 + size), output, priority=priority)
    steps.run()
    assert starts(steps) == order


def test_longest_prefix_match_starts_what_the_cache_knows_first():
    steps = Steps(policy="longest-prefix-match", max_num_seqs=1)
    shared = list(range(20, 36))
    steps.add(shared, 1)
    steps.run()
    steps.add([5, 6, 7], 1)
    steps.add([*shared[:8], 3, 4], 1)
    steps.add([*shared, 3, 4], 1)
    steps.add([8, 9], 1)
    steps.run()
    assert starts(steps) == [1, 4, 3, 2, 5]


# -------------------------------------------------------------------- bounded waiting (contract 8)


def passed_over(steps: Steps, ticket: int) -> int:
    """Number of later requests that started before `ticket` did."""
    order = starts(steps)
    return sum(other > ticket for other in order[: order.index(ticket)])


def adversary(policy: str, max_passes: int, seats: int, newcomer) -> tuple[Steps, int]:
    """One victim that the policy dislikes, and for ever a newcomer that it likes better."""
    steps = Steps(policy=policy, max_passes=max_passes, max_num_seqs=seats, pages=400)
    for _ in range(seats):
        newcomer(steps)
    steps.step()
    victim = steps.add([77] * 11, 20, priority=100)
    for _ in range(3000):
        if victim in steps.ended:
            break
        while len(steps.scheduler.waiting) < 2 * seats + 1:
            newcomer(steps)
        steps.step()
    return steps, victim


SHARED = list(range(10, 26))
CHANCE = random.Random(1)
NEWCOMERS = {
    "priority": lambda steps: steps.add([5, 6], 2, priority=0),
    "shortest-remaining": lambda steps: steps.add([5], 1),
    "longest-prefix-match": lambda steps: steps.add([*SHARED, CHANCE.randrange(2, 90)], 2),
}
"""Requests that each policy likes better than the victim."""


@pytest.mark.parametrize("max_passes", [1, 5, 40])
@pytest.mark.parametrize(
    ("policy", "seats"), [("priority", 1), ("priority", 4), ("shortest-remaining", 2), ("longest-prefix-match", 2)]
)
def test_the_victim_of_a_policy_ages(policy: str, max_passes: int, seats: int):
    steps, victim = adversary(policy, max_passes, seats, NEWCOMERS[policy])
    assert steps.ended[victim] == "length"
    assert 1 <= passed_over(steps, victim) <= max_passes + seats


def test_overdue_requests_keep_their_order_of_arrival():
    steps = Steps(policy="priority", max_passes=2, max_num_seqs=1)
    steps.add([3, 4], 2)
    steps.step()
    old = [steps.add([50 + i, 3], 2, priority=9) for i in range(3)]
    for _ in range(12):
        steps.add([5, 6], 2, priority=0)
    steps.run()
    order = [ticket for ticket in starts(steps) if ticket in old]
    assert order == old
    assert max(passed_over(steps, ticket) for ticket in old) <= 3


def test_a_prompt_too_long_for_now_is_not_overtaken():
    """Memory blocks: short ones that would fit must not starve a long one."""
    steps = Steps(pages=9, max_num_seqs=8)
    first = steps.add(range(2, 18), 8)
    steps.step()
    long = steps.add(range(30, 54), 2)
    short = steps.add([5], 1)
    steps.step()
    assert long in {r.ticket for r in steps.scheduler.waiting}
    assert short in {r.ticket for r in steps.scheduler.waiting}
    steps.run()
    assert starts(steps) == [first, long, short]
    steps.assert_right()
