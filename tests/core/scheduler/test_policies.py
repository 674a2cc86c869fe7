"""Policies as objects: what a configuration takes, what it refuses by name, and that an engine runs by it."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
from support.fake_engine import Steps, make_engine, oracle

from asyncengine import EngineConfig, InvalidParameter, Policy, SamplingParams, WeightedFair
from asyncengine.testing import Recording


class LastComeFirstServed(Policy):
    name = "lifo"

    def key(self, request: Any) -> int:
        return -request.ticket


class FairByPriority(Policy):
    """Tokens are shared among priorities in proportion to 1 + priority: the whole of a policy of one's own."""

    name = "fair-by-priority"
    dynamic = True

    def __init__(self) -> None:
        self.served: Counter[int] = Counter()

    def flow(self, request: Any) -> int:
        return request.spec.options.priority

    def key(self, request: Any) -> float:
        return self.served[self.flow(request)] / (1 + self.flow(request))

    victim_key = key  # who has been served most gives way first

    def charge(self, request: Any, tokens: int) -> None:
        self.served[self.flow(request)] += tokens


class Parts:
    """An object that inherits from nothing."""

    name = "parts"
    dynamic = prefix_hints = False
    key = LastComeFirstServed.key
    victim_key, preempts, flow = Policy.victim_key, Policy.preempts, Policy.flow
    prepare, arrive, charge, leave = Policy.prepare, Policy.arrive, Policy.charge, Policy.leave


class Nameless(Policy):
    key = LastComeFirstServed.key


class Keyless(Policy):
    name = "keyless"


class Mutable(LastComeFirstServed):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize("policy", [LastComeFirstServed(), Parts()])
def test_an_object_orders_the_queue(policy: Any) -> None:
    steps = Steps(policy=policy, max_num_seqs=1)
    tickets = [steps.add([2 + i, 3], 2) for i in range(4)]
    steps.run()
    steps.assert_right()
    assert [*steps.ended] == tickets[::-1]


@pytest.mark.parametrize("pages", [400, 14], ids=["rows are scarce", "pages are scarce"])
def test_an_object_shares_an_engine(pages: int) -> None:
    """Order and accounts are those of one small class; nothing else knows of it."""
    steps = Steps(policy=FairByPriority(), max_num_seqs=4, pages=pages, prefix_caching=False, check_every=50)
    computed: Counter[int] = Counter()
    for i in range(800):
        waiting = Counter(request.spec.options.priority for request in steps.scheduler.waiting)
        for priority in (0, 2):
            if waiting[priority] < 4:
                steps.add([2 + i % 90, 3 + priority], 16, priority=priority)
        for row in batch.rows if (batch := steps.step()) else ():
            computed[row.spec.options.priority] += row.num_scheduled
    assert computed[2] / computed.total() == pytest.approx(0.75, abs=0.05)
    assert bool(steps.scheduler.counters.preemptions) == (pages == 14)
    steps.assert_right(steps.ended)


def test_an_object_says_who_gives_way() -> None:
    """The request that has been served most gives way, not the one that came last, as by default."""
    steps = Steps(policy=FairByPriority(), max_num_seqs=2, pages=10, prefix_caching=False)
    most, least = steps.add(range(2, 10), 20, priority=0), steps.add(range(3, 11), 20, priority=2)
    while not steps.scheduler.counters.preemptions:
        steps.step()
    assert (steps.request(most).preemptions, steps.request(least).preemptions) == (1, 0)
    steps.run()
    steps.assert_right()


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("best", "or an object like asyncengine.Policy, got 'best'"),
        (None, "or an object like asyncengine.Policy"),
        (WeightedFair, "got <class"),
        (3, "or an object like asyncengine.Policy, got 3"),
        (3.5, "lacks name, key, dynamic, prefix_hints, victim_key, preempts, flow, prepare, arrive, charge, leave"),
        (Nameless(), "Nameless lacks name"),
        (Keyless(), "Keyless lacks key"),
        (Mutable(), "must be hashable"),
    ],
)
def test_what_is_no_policy_is_refused_by_name(policy: Any, said: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^policy: .*{said}"):
        EngineConfig(policy=policy)


def test_a_configuration_with_an_object_is_one_like_another() -> None:
    config = EngineConfig(policy=WeightedFair({"a": 3}))
    same = EngineConfig.from_dict({"policy": WeightedFair({"a": 3.0})})
    assert config == same == pickle.loads(pickle.dumps(config))
    assert len({config, same, EngineConfig(), config.replace(policy="fcfs")}) == 2


async def test_an_engine_runs_by_an_object_and_by_tenant() -> None:
    async with make_engine(policy=LastComeFirstServed(), max_num_seqs=1) as engine:
        assert engine.core.config.policy.name == "lifo"  # type: ignore[union-attr]
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=3)
        completion = await engine.generate([2, 3, 4], params, tenant="a")
        assert [*completion.token_ids] == oracle(engine, [2, 3, 4], 3)
        with pytest.raises(InvalidParameter, match=r"^tenant: must be a str"):
            await engine.generate([2, 3, 4], params, tenant=3)  # type: ignore[call-overload]


def test_an_object_is_not_saved_in_a_recording(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match="LastComeFirstServed"):
        Recording(EngineConfig(policy=LastComeFirstServed()), 20).save(tmp_path / "one.jsonl")
