"""Policy "weighted-fair": tokens computed follow the weights, whoever asks most, and idleness is no credit."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from typing import Any

import pytest
from support.fake_engine import Steps

from asyncengine import InvalidParameter, WeightedFair
from asyncengine.lora.admission import AdapterSlots


def shares(steps: Steps, owner: dict[int, str], first: int = 0) -> dict[str, float]:
    """Shares of the tokens computed in the steps from `first` on, by flow."""
    served: Counter[str] = Counter()
    for batch in steps.batches[first:]:
        for row in batch.rows:
            served[owner[row.spec.ticket]] += row.num_scheduled
    return {flow: count / served.total() for flow, count in served.items()}


ROWS: dict[str, Any] = {"max_num_seqs": 4}


@pytest.mark.parametrize(
    ("weights", "settings"),
    [
        pytest.param({}, ROWS, id="rows"),
        pytest.param({"a": 3.0}, ROWS, id="rows, one weight"),
        pytest.param({"a": 2.0, "c": 0.5}, ROWS, id="rows, two weights"),
        pytest.param({"a": 3.0}, {**ROWS, "max_steps_in_flight": 2}, id="two steps in flight"),
        pytest.param({"a": 3.0}, {"max_num_seqs": 64, "pages": 60, "prefix_caching": False}, id="pages"),
        pytest.param({"a": 2.0, "c": 0.5}, {"max_num_seqs": 64, "max_num_batched_tokens": 24}, id="budget"),
    ],
)
def test_shares_follow_the_weights(weights: dict[str, float], settings: dict[str, Any]) -> None:
    """Three tenants that always have more to ask, of different sizes, whatever it is that they lack."""
    steps = Steps(**{"pages": 400, "check_every": 50, **settings}, policy=WeightedFair(weights))
    rng = random.Random(1)
    sizes = {"a": (30, 4), "b": (3, 25), "c": (10, 10)}
    owner: dict[int, str] = {}
    for _ in range(800):
        waiting = Counter(owner[request.ticket] for request in steps.scheduler.waiting)
        for tenant, (prompt, output) in sizes.items():
            while waiting[tenant] < 20:
                tokens = [rng.randrange(2, 97) for _ in range(rng.randrange(1, 2 * prompt))]
                owner[steps.add(tokens, rng.randrange(1, 2 * output), tenant=tenant)] = tenant
                waiting[tenant] += 1
        steps.step()
    total = sum(weights.get(tenant, 1.0) for tenant in sizes)
    for tenant, share in shares(steps, owner, 200).items():
        assert share == pytest.approx(weights.get(tenant, 1.0) / total, rel=0.05), tenant
    for request in list(steps.scheduler.requests):
        steps.abort(request)
    steps.run()
    steps.assert_empty()


def test_a_thousand_requests_of_one_do_not_starve_another() -> None:
    steps = Steps(policy="weighted-fair", max_num_seqs=2, pages=200, check_every=50)
    for i in range(1000):
        steps.add([10 + i % 80, 3], 4, tenant="many")
    for _ in range(5):
        steps.step()
    few = [steps.add([20 + i, 5], 4, tenant="few") for i in range(100)]
    seen: Counter[bool] = Counter()
    while len(seen) < 2 or seen[True] < len(few):
        before = set(steps.ended)
        steps.step()
        for ticket in set(steps.ended) - before:
            seen[ticket in few] += 1
    assert seen[False] <= len(few) + 4, "turn by turn, though they were passed over more than `max_passes` times"
    assert [ticket for ticket in steps.ended if ticket in few] == few, "within a flow by arrival"


def test_idleness_is_no_credit() -> None:
    """A tenant that comes back after a pause starts at the virtual time, and so does one that has never been there."""
    steps = Steps(policy="weighted-fair", max_num_seqs=1, pages=200)
    owner: dict[int, str] = {}

    def ask(tenant: str, count: int) -> None:
        for _ in range(count):
            owner[steps.add([7, 8, 9], 5, tenant=tenant)] = tenant

    ask("back", 1)
    ask("busy", 60)
    while sum(owner[ticket] == "busy" for ticket in steps.ended) < 20:
        steps.step()
    ended = len(steps.ended)
    ask("back", 10)
    ask("new", 10)
    while len(steps.ended) < ended + 19:
        steps.step()
    later = Counter(owner[ticket] for ticket in [*steps.ended][ended:])
    assert max(later.values()) - min(later.values()) <= 1, later
    assert len(later) == 3


def test_accounts_are_kept_while_they_matter() -> None:
    """A flow that had more than its share does not lose that by ending and coming again; a million names leave
    nothing."""
    steps = Steps(policy="weighted-fair", max_num_seqs=2, pages=200, check_every=500)
    policy = steps.scheduler.roster.policy
    for _ in range(30):
        steps.add([7, 8, 9], 5, tenant="steady")
    ahead = steps.add([5] * 60, 1, tenant="ahead")
    while ahead not in steps.ended:
        steps.step()
    again = steps.add([5], 1, tenant="ahead")
    while again not in steps.ended:
        steps.step()
    assert sum(steps.expected[ticket] != [] for ticket in steps.ended) > 8, "after those that had less"
    for i in range(5000):
        if i % 100 == 0:  # with nobody to compete with, nothing would be kept
            steps.add([7], 120, tenant="steady")
        steps.add([5], 1, tenant=f"once {i}")
        steps.step()
    assert 20 * 4096 < len(pickle.dumps(policy)) < 23 * 4096, "the last 4096 names"
    steps.run()
    steps.add([5], 1)  # nobody competes any more
    steps.run()
    assert len(pickle.dumps(policy)) < 300


def test_flows_may_be_adapters() -> None:
    fair = WeightedFair({"A": 2.0}, by="adapter")
    steps = Steps(policy=fair, adapters=AdapterSlots(2), max_num_seqs=1, pages=200)
    owner = {steps.add([9, i], 6, adapter="AB"[i % 2]): "AB"[i % 2] for i in range(2, 120)}
    while len(steps.ended) < 60:
        steps.step()
    assert shares(steps, owner)["A"] == pytest.approx(2 / 3, rel=0.1)


def test_an_engine_s_accounts_are_its_own() -> None:
    """One object configures any number of engines, and stays what it was."""
    fair = WeightedFair({"a": 2})
    first, second = Steps(policy=fair), Steps(policy=fair)
    first.add([2, 3], 4, tenant="a")
    first.step()
    policies = (first.scheduler.roster.policy, fair, second.scheduler.roster.policy)
    mine, ours, others = (pickle.dumps(each) for each in policies)
    assert mine != ours == others
    assert fair == WeightedFair({"a": 2.0})
    assert len({fair, WeightedFair({"a": 2.0}), WeightedFair(), WeightedFair(by="adapter")}) == 3


@pytest.mark.parametrize(
    ("weights", "by", "named"),
    [({"a": 0}, "tenant", "weights"), ({"a": "much"}, "tenant", "weights"), ([1], "tenant", "weights"),
     ({1: 1.0}, "tenant", "weights"), ({"a": float("nan")}, "tenant", "weights"), ({}, "user", "by")],
)  # fmt: skip
def test_terms_are_checked(weights: Any, by: str, named: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{named}: "):
        WeightedFair(weights, by=by)
