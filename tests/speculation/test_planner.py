"""How many guesses a step is worth, by what became of earlier ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from asyncengine import SamplingParams
from asyncengine.request_spec import RequestSpec
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.evidence import Evidence
from asyncengine.speculation.lookup import Draft
from asyncengine.speculation.planner import Candidate

COSTS = {"bf16": (1.0, 1.08, 1.18, 1.38, 1.9), "int4": (1.0, 1.24, 1.71, 2.66, 4.6)}
SPEC = RequestSpec(0, (1, 2), SamplingParams(), 10_000)


class Known:
    """Guesses that are right with a chance of `rate`; a right token is 1."""

    def __init__(self, rate: float, evidence: Evidence) -> None:
        self.rate, self.evidence, self.rng = rate, evidence, random.Random(1)

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        return Draft(tuple(int(self.rng.random() < self.rate) for _ in range(limit)), self.evidence)


def gain(costs: StepCosts, rate: float, evidence: Evidence, tokens: int = 96, rows: int = 1) -> float:
    """Time without guesses over that with them."""
    planner = DraftPlanner(costs, 15, 0, lambda *_: Known(rate, evidence))
    left, passes = dict.fromkeys(range(rows), tokens), 0.0
    plain = tokens * costs.of(rows)
    while left:
        planned = planner.plan([Candidate(key, SPEC, [1, 2], (), 15) for key in left], len(left), len(left))
        passes += costs.of(len(left) + sum(map(len, planned.values())))
        for key in list(left):
            draft = planned.get(key, ())
            right = (*draft, 0).index(0)
            if draft:
                planner.learn(key, len(draft), right)
            left[key] -= 1 + right
            if left[key] <= 0:
                del left[key]
    return plain / passes


@pytest.mark.parametrize("evidence", [Evidence.LONG, Evidence.ALIKE, Evidence.FOLLOWED, Evidence.TOKEN])
@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("rows", [1, 4])
def test_useless_guesses_cost_two_percent_at_most(kind: str, evidence: Evidence, rows: int) -> None:
    """From the first one of an engine on, before anything was learnt."""
    assert gain(StepCosts(COSTS[kind]), 0.0, evidence, rows=rows) >= 0.98


@pytest.mark.parametrize(
    ("kind", "rate", "least"), [("bf16", 0.7, 2.3), ("bf16", 0.9, 4.5), ("bf16", 1.0, 9.0), ("int4", 0.7, 1.8)]
)
def test_good_guesses_are_made(kind: str, rate: float, least: float) -> None:
    assert gain(StepCosts(COSTS[kind]), rate, Evidence.LONG, 400) >= least


def test_guesses_that_become_good_are_found_out() -> None:
    costs = StepCosts(COSTS["int4"])
    known = Known(0.0, Evidence.LONG)
    planner = DraftPlanner(costs, 15, 0, lambda *_: known)
    right = 0
    for step in range(400):
        known.rate = float(step >= 100)
        draft = planner.plan([Candidate(0, SPEC, [1, 2], (), 15)], 1, 1).get(0, ())
        if draft:
            accepted = (*draft, 0).index(0)
            planner.learn(0, len(draft), accepted)
            right += accepted
    assert right > 1000


def test_a_guess_that_fills_a_tile_is_free() -> None:
    """Where computing four rows more takes as long as reading all weights does, five tokens take as long as eight."""
    costs = StepCosts((600.0, 900.0, 1500.0, 2700.0, 5300.0))
    assert [round(costs.of(tokens) * 600) for tokens in (1, 2, 4, 5, 8, 9, 12, 13, 16, 32)] == [
        600, 700, 900, 1500, 1500, 2100, 2100, 2700, 2700, 5300,
    ]  # fmt: skip
    planner = DraftPlanner(costs, 15, 0, lambda *_: Known(1.0, Evidence.LONG))
    for most in (4, 5, 6, 7):
        planned = planner.plan([Candidate(most, SPEC, [1, 2], (), most)], 1, 1)[most]
        assert len(planned) == (7 if most == 7 else 3), "four guesses take as long as seven"
    assert StepCosts((1.0, 1.08, 1.18, 1.38, 1.9)).of(5) == pytest.approx(1.105)
