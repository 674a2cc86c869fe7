"""20,000 steps of everything at once, in which every request finishes (contract 8)."""

import random

import pytest
from support.fake_engine import Steps
from support.long import LONG
from support.plug_points import Letters

from asyncengine.lora.admission import AdapterSlots
from asyncengine.scheduler.messages import GrammarReady
from asyncengine.testing.fake_runner import FakeModel

SETTINGS = [
    {"policy": "fcfs", "pages": 18},
    {"policy": "priority", "pages": 18, "max_steps_in_flight": 2, "max_passes": 8},
    {
        "policy": "shortest-remaining",
        "pages": 18,
        "prefix_caching": False,
        "max_passes": 8,
        "max_steps_in_flight": 3,
        "pipeline_parallel": 3,
    },
    {"policy": "longest-prefix-match", "pages": 18, "max_steps_in_flight": 2, "eviction": "lfu", "max_passes": 8},
    {"policy": "weighted-fair", "pages": 18, "max_steps_in_flight": 2, "max_passes": 8},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s["policy"])
def test_every_request_of_a_random_soak_finishes(settings: dict):
    rng = random.Random(settings["policy"])
    slots = AdapterSlots(2)
    steps = Steps(
        adapters=slots,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        check_every=20,
        model=FakeModel(eos_every=40),
        **settings,
    )
    prefixes = [[rng.randrange(2, 97) for _ in range(rng.randrange(12))] for _ in range(4)]
    left: set[int] = set()
    constrained: dict[int, Letters] = {}
    compiling: list[int] = []
    for _ in range(3000 if LONG else 1500):
        steps.now += 0.01
        if len(steps.scheduler.requests) < 12 and rng.random() < 0.4:
            prompt = [*rng.choice(prefixes), *(rng.randrange(2, 97) for _ in range(rng.randrange(1, 10)))]
            output = rng.choice([1, 2, 5, 12, 24])
            kind = rng.random()
            if kind < 0.1:
                steps.add_group(prompt, 3, output)
            elif kind < 0.2:
                ticket = steps.add(prompt, output, needs_grammar=True)
                compiling.append(ticket)
                constrained[ticket] = Letters(range(5, 20), rng.randrange(1, output + 1))
            else:
                adapter = rng.choice(["", "", "A", "B", "C"])
                deadline = steps.now + rng.random() if rng.random() < 0.05 else None
                steps.add(
                    prompt,
                    output,
                    priority=rng.randrange(3),
                    adapter=adapter,
                    stop_ids=(1,),
                    deadline=deadline,
                    tenant=rng.choice("abc"),
                )
        if compiling and rng.random() < 0.3:
            ticket = compiling.pop(rng.randrange(len(compiling)))
            steps.apply(GrammarReady(ticket, constrained[ticket]))
        if steps.scheduler.requests and rng.random() < 0.02:
            ticket = rng.choice(list(steps.scheduler.requests))
            left.add(ticket)
            steps.abort(ticket)
        steps.step()
    for ticket in compiling:
        steps.apply(GrammarReady(ticket, constrained[ticket]))
    steps.run()
    steps.assert_empty()
    assert not slots.in_use
    assert set(steps.ended) == set(steps.expected), "every request ends"
    for ticket, reason in steps.ended.items():
        if ticket in constrained:
            assert reason in ("stop", "abort")
            tokens, accepted = steps.tokens[ticket], constrained[ticket].advanced
            dropped = len(accepted) - len(tokens)  # one that left while its step ran: sampled, not delivered
            assert tokens == accepted[: len(tokens)]
            assert dropped <= (reason == "abort")
            continue
        assert reason in ("stop", "length") or ticket in left or reason == "timeout"
        assert steps.tokens[ticket] == steps.expected[ticket][: len(steps.tokens[ticket])]
        if reason in ("stop", "length"):
            assert steps.tokens[ticket] == steps.expected[ticket]
    counters = steps.scheduler.counters
    assert counters.left_queue == len(steps.ended)
    assert counters.preemptions > 10
    assert len(steps.ended) > 200
