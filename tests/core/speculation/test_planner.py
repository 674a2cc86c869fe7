"""The number of guesses that a step is worth, by what became of earlier ones."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from asyncengine import SamplingParams
from asyncengine.request_spec import RequestSpec
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.acceptance import AMBIGUOUS, LONG, NOTHING, Acceptance, Draft, Source, best_prefix
from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.planner import Candidate
from asyncengine.step import MEASURED_SIZES, OPEN

COSTS = {"bf16": (1.0, 1.18, 1.9), "int4": (1.0, 1.71, 4.6)}
SPEC = RequestSpec(0, (1, 2), SamplingParams(), 10_000)


class Known:
    """Guesses that are right with a chance of `rate`; a right token is 1."""

    def __init__(self, rate: float, agreed: int) -> None:
        self.rate, self.agreed, self.rng = rate, agreed, random.Random(1)

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        return Draft(tuple(int(self.rng.random() < self.rate) for _ in range(limit)), Source.OWN_TEXT, self.agreed)


def gain(costs: StepCosts, rate: float, agreed: int, tokens: int = 96, rows: int = 1) -> float:
    """Time without guesses over that with them."""
    planner = DraftPlanner(costs, 15, 0, lambda *_: Known(rate, agreed))
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


@pytest.mark.parametrize("agreed", [LONG, 3, 2, 1, AMBIGUOUS])
@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("rows", [1, 4])
def test_useless_guesses_cost_three_percent_at_most(kind: str, agreed: int, rows: int) -> None:
    """The bound holds from the first guess of an engine on, before anything was learnt."""
    assert gain(StepCosts(COSTS[kind]), 0.0, agreed, rows=rows) >= 0.97


@pytest.mark.parametrize(
    ("kind", "rate", "least"), [("bf16", 0.7, 2.3), ("bf16", 0.9, 4.5), ("bf16", 1.0, 9.0), ("int4", 0.7, 1.5)]
)
def test_good_guesses_are_made(kind: str, rate: float, least: float) -> None:
    assert gain(StepCosts(COSTS[kind]), rate, LONG, 400) >= least


def test_guesses_that_become_good_are_found_out() -> None:
    costs = StepCosts(COSTS["int4"])
    known = Known(0.0, LONG)
    planner = DraftPlanner(costs, 15, 0, lambda *_: known)
    right = 0
    for step in range(600):
        known.rate = float(step >= 100)
        draft = planner.plan([Candidate(0, SPEC, [1, 2], (), 15)], 1, 1).get(0, ())
        if draft:
            accepted = (*draft, 0).index(0)
            planner.learn(0, len(draft), accepted)
            right += accepted
    assert right > 1000


def test_as_many_guesses_as_make_the_most_of_the_time() -> None:
    assert best_prefix([0.5, 0.25], [1.0, 1.4, 1.8], 1.0) == (1, pytest.approx(1.5 / 1.4))
    assert best_prefix([0.9, 0.81], [1.0, 1.1, 1.2], 1.0) == (2, pytest.approx(2.71 / 1.2))
    assert best_prefix([0.1], [1.0, 1.2], 1.0) == (0, 1.0)
    assert best_prefix([], [1.0], 1.0) == (0, 1.0)


def test_costs_between_measured_sizes_rise_evenly_and_never_fall() -> None:
    costs = StepCosts((2.0, 4.0, 3.0))
    assert [costs.of(tokens) for tokens in (0, 1, 8, 32, 40)] == [0, 1, 2, 2, 2]
    assert StepCosts((1.0, 8.0, 32.0)).of(20) == pytest.approx(20)
    assert StepCosts((1.0, 8.0, 32.0)).of(100) == pytest.approx(100)


def test_a_new_request_starts_from_what_its_namespace_has_seen() -> None:
    namespace = Acceptance()
    draft = Draft((1,) * 4, Source.OWN_TEXT, LONG)
    before = Acceptance(namespace).chances(draft, 4)
    for _ in range(20):
        Acceptance(namespace).learn(draft, 4, 1)
    after = Acceptance(namespace).chances(draft, 4)
    assert all(new < 0.6**place < old for place, (new, old) in enumerate(zip(after, before, strict=True), 1))
    assert Acceptance(namespace).chances(draft._replace(source=Source.PREDICTION), 4)[0] > 0.9, "another source"


# ---------------------------------------------------------------- draft models


class Silent:
    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        return NOTHING


def model_gain(rate: float, share: float, answers: int = 4, tokens: int = 128, prompt: int = 8) -> tuple[float, int]:
    """Time without a draft model over that with one whose step takes `share` of the model's, and guesses asked for."""
    costs = StepCosts(COSTS["bf16"])
    model = StepCosts([share * cost for cost in COSTS["bf16"]], 1.0)
    planner = DraftPlanner(costs, 15, 0, lambda *_: Silent(), model)
    rng, time, asked = random.Random(1), 0.0, 0
    for key in range(answers):
        spec = dataclasses.replace(SPEC, ticket=key, prompt=(1,) * prompt, max_total=prompt + tokens)
        live, computed = [1] * prompt, 0
        while len(live) < spec.max_total:
            planned = planner.plan([Candidate(key, spec, live, (), spec.max_total - len(live) - 1)], 1, 1)
            draft = planned.get(key, ())
            assert set(draft) <= {OPEN}
            made = right = 0
            if draft:
                asked += len(draft)
                behind = len(live) - computed
                time += model.of(min(behind, 128)) + model.of(1) * (len(draft) - 1)
                computed = min(len(live), computed + 128)
                made = len(draft) if computed == len(live) else 0
                while right < made and rng.random() < rate:
                    right += 1
                planner.learn(key, made, right)
            time += costs.of(1 + made)
            live += [1] * (1 + right)
        planner.forget(key, (), ())
    return answers * tokens * costs.of(1) / time, asked


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
def test_a_useless_draft_model_costs_three_percent_at_most(share: float) -> None:
    found, asked = model_gain(0.0, share)
    assert found >= 0.97
    assert asked > 0, "it is tried"


@pytest.mark.parametrize(
    ("rate", "share", "least"), [(0.9, 0.1, 2.2), (0.8, 0.1, 1.7), (0.7, 0.05, 1.6), (0.8, 0.3, 1.1)]
)
def test_a_good_draft_model_is_asked(rate: float, share: float, least: float) -> None:
    assert model_gain(rate, share)[0] >= least


def test_a_draft_model_that_costs_as_much_as_the_model_is_left_alone() -> None:
    found, asked = model_gain(0.9, 1.0)
    assert (found, asked) == (1.0, 0)


def test_a_short_answer_to_a_long_prompt_is_not_worth_catching_up() -> None:
    assert model_gain(0.9, 0.3, answers=1, tokens=16, prompt=4000)[1] == 0
    assert model_gain(0.9, 0.05, answers=1, tokens=400, prompt=200)[1] > 0


def test_look_ups_that_pay_are_taken_before_a_draft_model_is_asked() -> None:
    model = StepCosts([0.1] * len(MEASURED_SIZES), 1.0)
    planner = DraftPlanner(StepCosts(COSTS["bf16"]), 7, 0, lambda *_: Known(1.0, LONG), model)
    (draft,) = planner.plan([Candidate(0, SPEC, [1, 2], (), 7)], 1, 1).values()
    assert draft == (1,) * 7
    silent = DraftPlanner(StepCosts(COSTS["bf16"]), 7, 0, lambda *_: Silent(), model)
    spec = dataclasses.replace(SPEC, max_total=4000)
    (draft,) = silent.plan([Candidate(0, spec, [1, 2], (), 7)], 1, 1).values()
    assert set(draft) == {OPEN}
