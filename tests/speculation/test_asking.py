"""When a draft model is asked: by the table of costs it never takes much time, and saves it where it can."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from asyncengine import SamplingParams
from asyncengine.request_spec import RequestSpec
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.asking import CATCH_UP, Asked, Asker, Asking, Step
from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.draft_pages import DraftPages
from asyncengine.speculation.evidence import Evidence
from asyncengine.speculation.lookup import NOTHING, Draft
from asyncengine.speculation.planner import Candidate
from asyncengine.step import OPEN, Row

COSTS = {"bf16": (1.0, 1.08, 1.18, 1.38, 1.9), "int4": (1.0, 1.24, 1.71, 2.66, 4.6)}
SHAPE = (1.0, 1.1, 1.3, 1.7, 2.7)
"""Of a draft model's passes."""
PAGE = 16

Rate = Callable[[int, int], float]
"""(request, token of its output) -> how likely a guess is right."""


class Nothing:
    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        return NOTHING


class Engine:
    """Steps of streams beside a draft model, and the time that they take by the tables."""

    def __init__(self, kind: str, share: float, rate: Rate, most: int = 15, pages: int = 4000) -> None:
        """`share`: a pass of the draft model, in steps."""
        self.costs, self.model = StepCosts(COSTS[kind]), StepCosts([share * size for size in SHAPE], 1.0)
        self.planner = DraftPlanner(
            self.costs, most, 0, lambda *_: Nothing(), Asking(self.costs, self.model, DraftPages(pages, PAGE))
        )
        self.rate, self.rng = rate, random.Random(1)
        self.held = DraftPages(pages, PAGE)
        self.key = self.asked = 0
        self.time = self.plain = 0.0
        self.free = list(range(1, pages))

    def run(self, tokens: int, rows: int = 1, prompt: int = 10, namespace: str = "") -> float:
        """Time without over time with the draft model, of `rows` streams that begin together."""
        before = self.time, self.plain
        count = -(-(prompt + tokens + 40) // PAGE)
        streams = {}
        for _ in range(rows):
            spec = RequestSpec(self.key, (1,) * prompt, SamplingParams(), prompt + tokens + 20)
            pages = [self.free.pop(0) for _ in range(count)]
            streams[self.key] = (spec, [1] * (prompt + 1), pages)
            self.planner.sees([Row(spec, 0, 0, prompt, [1] * prompt, False, pages, True)])
            self.key += 1
        left = dict(streams)
        while left:
            self.step(left, namespace)
            for key, (_, text, _) in list(left.items()):
                if len(text) >= prompt + tokens:
                    self.planner.forget(key, (namespace,), ())
                    del left[key]
        for _, _, pages in streams.values():
            self.free += pages
        return (self.plain - before[1]) / (self.time - before[0])

    def step(self, left: dict[int, tuple[RequestSpec, list[int], list[int]]], namespace: str) -> None:
        count = len(left)
        candidates = [Candidate(key, *one[:2], (namespace,), 15, one[2]) for key, one in left.items()]
        planned = self.planner.plan(candidates, count, count)
        rows = [
            Row(spec, 0, len(text) - 1, 1 + len(planned.get(key, ())), text, False, pages, True)
            for key, (spec, text, pages) in left.items()
        ]
        self.planner.sees(rows)
        self.held.overwritten(rows)
        first = {key: self.catch_up(*left[key][1:]) for key in planned}
        made = {key: len(planned[key]) if ready else 0 for key, (_, ready) in first.items()}
        self.time += self.model.of(sum(count for count, _ in first.values()))
        for number in range(1, max(made.values(), default=0)):
            self.time += self.model.of(sum(count > number for count in made.values()))
        self.time += self.costs.of(count + sum(made.values()))
        for key, (spec, text, pages) in left.items():
            guesses, right = made.get(key, 0), 0
            place = len(text) - len(spec.prompt)
            while right < guesses and self.rng.random() < self.rate(key, place + right):
                right += 1
            if guesses:
                self.held.written(pages, len(text) - 1, len(text) + guesses - 1)
                self.asked += 1
            if key in planned:
                self.planner.learn(key, guesses, right)
            text.extend([1] * (right + 1))
            self.plain += (right + 1) * self.costs.of(count) / count

    def catch_up(self, text: list[int], pages: list[int]) -> tuple[int, bool]:
        """How many positions the draft model computes first, and whether it guesses then."""
        begin = self.held.first_missing(pages, len(text))
        end = min(len(text), begin + CATCH_UP)
        self.held.written(pages, begin, end)
        return end - begin, end == len(text)


def never(key: int, place: int) -> float:
    return 0.0


def always(rate: float) -> Rate:
    return lambda key, place: rate


@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("prompt", [10, 300, 3000])
def test_a_useless_draft_model_costs_two_percent_at_most(kind: str, share: float, rows: int, prompt: int) -> None:
    """Of the first stream of an engine and of every one after it; of all together less and less."""
    engine = Engine(kind, share, never)
    assert min(engine.run(96, rows, prompt) for _ in range(6)) >= 0.98
    assert engine.run(1000, rows, prompt) >= 0.98
    assert engine.plain / engine.time >= 0.99


@pytest.mark.parametrize(
    ("kind", "share", "rate", "rows", "prompt", "first", "least"),
    [
        ("bf16", 0.05, 0.8, 1, 10, 2.3, 2.4), ("bf16", 0.1, 0.8, 1, 10, 1.9, 2.0), ("bf16", 0.3, 0.8, 1, 10, 1.1, 1.3),
        ("bf16", 0.1, 0.6, 1, 10, 1.3, 1.4), ("int4", 0.05, 0.8, 1, 10, 1.8, 1.8), ("int4", 0.1, 0.7, 1, 10, 1.3, 1.4),
        ("bf16", 0.05, 0.8, 4, 10, 1.6, 1.8), ("bf16", 0.05, 0.7, 1, 300, 1.4, 1.8),
        ("bf16", 0.1, 1.0, 1, 10, 5.0, 5.0),
    ],
)  # fmt: skip
def test_a_good_one_is_asked(
    kind: str, share: float, rate: float, rows: int, prompt: int, first: float, least: float
) -> None:
    """From the first stream on, and of later ones from their beginning."""
    engine = Engine(kind, share, always(rate))
    assert engine.run(300, rows, prompt) >= first
    before = engine.plain, engine.time
    for _ in range(6):
        engine.run(96, rows, prompt)
    assert (engine.plain - before[0]) / (engine.time - before[1]) >= least


def test_one_that_does_not_pay_is_asked_seldomer_and_seldomer() -> None:
    engine = Engine("bf16", 0.1, never)
    asked = []
    for _ in range(5):
        engine.asked = 0
        engine.run(400)
        asked.append(engine.asked)
    assert asked[0] > 3
    assert sum(asked[3:]) <= 2
    engine.asked = 0
    engine.run(4000)
    assert 2 <= engine.asked <= 5, "it is tried again, at least each thousand steps"


def test_one_that_takes_longer_than_a_step_is_never_asked() -> None:
    engine = Engine("bf16", 1.1, always(1.0))
    engine.run(2000)
    assert engine.asked == 0


def test_one_that_becomes_good_is_found_out() -> None:
    engine = Engine("bf16", 0.1, lambda key, place: 0.0 if place < 300 else 0.85)
    assert engine.run(300) >= 0.98
    assert engine.run(2500) >= 1.5


def test_one_that_becomes_useless_is_left_alone() -> None:
    """In later requests, and in the middle of one."""
    engine = Engine("bf16", 0.1, lambda key, place: 0.9 * (key < 5))
    assert min(engine.run(96) for _ in range(5)) > 1.5
    assert min(engine.run(96) for _ in range(8)) >= 0.975
    engine = Engine("bf16", 0.1, lambda key, place: 0.9 * (place < 200))
    before = engine.run(200)
    after = engine.run(1200)
    assert before > 2
    assert after > 1.05


def test_a_request_that_it_cannot_guess_for_loses_little_beside_those_that_it_can() -> None:
    engine = Engine("bf16", 0.1, lambda key, place: 0.85 * (key % 2))
    found = [engine.run(200) for _ in range(12)]
    assert min(found[2::2]) >= 0.975
    assert min(found[3::2]) > 1.5


def test_namespaces_learn_nothing_of_each_other() -> None:
    engine = Engine("bf16", 0.1, always(0.9))
    for _ in range(3):
        engine.run(96)
    alone = Engine("bf16", 0.1, never)
    engine.rate = never
    engine.asked = 0
    engine.run(96, namespace="other")
    alone.run(96, namespace="other")
    assert engine.asked == alone.asked


def test_to_catch_up_with_a_long_prompt_takes_what_was_saved_before() -> None:
    """A prompt that would take 20 steps' time to catch up with is none of a first short stream's."""
    engine = Engine("bf16", 0.1, always(0.9))
    assert engine.run(96, prompt=2000) == 1.0
    assert engine.asked == 0
    for _ in range(4):
        engine.run(96)
    engine.asked = 0
    assert engine.run(300, prompt=2000) > 1.5
    assert engine.asked


def test_a_place_that_is_far_behind_is_not_asked_where_little_is_left() -> None:
    engine = Engine("bf16", 0.1, always(0.9))
    for _ in range(4):
        engine.run(96)
    engine.asked = 0
    engine.run(4, prompt=1500)
    assert engine.asked == 0


def asker(asking: Asking, tokens: int, others: Asked) -> Asker:
    return Asker(0, Asked(others), [1] * tokens, list(range(1, 40)), 5, 200, 7)


def test_it_is_not_asked_again_at_once_where_it_has_no_answer() -> None:
    """As for a text that is longer than it knows."""
    asking = Asking(StepCosts(COSTS["bf16"]), StepCosts([0.1 * size for size in SHAPE], 1.0))
    others = Asked()
    others.purse = others.saved = 9.0
    one, step = asker(asking, 20, others), Step(1, 1)
    waited = []
    for _ in range(4):
        steps = 0
        while not (found := asking.offers([one], step)):
            one.asked.passes(1.0, 1)
            steps += 1
        waited.append(steps)
        asking.asks(one.asked, found[0].ask, 1, 0.02)
        asking.learn(one.asked, 0, 0)
    assert waited == [0, 1, 2, 4]


class Found:
    """Finds what is likely, or not."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        return Draft((1,) * limit, self.evidence)


def test_what_is_found_without_it_goes_first() -> None:
    engine = Engine("bf16", 0.05, always(0.9))
    engine.planner._make = lambda *_: Found(Evidence.FEW)
    spec = RequestSpec(1, (1,) * 5, SamplingParams(), 900)
    candidate = Candidate(1, spec, [1] * 20, (), 15, list(range(1, 40)))
    assert OPEN not in engine.planner.plan([candidate], 1, 1)[1]
    for _ in range(20):
        engine.planner._requests[1].acceptance.learn(engine.planner._requests[1].draft, 1, 0)
    for _ in range(20):
        planned = engine.planner.plan([candidate], 1, 1)
        if planned:
            break
    assert planned[1][0] == OPEN, "what is found has turned out to be wrong"


def test_both_books_of_pages_agree() -> None:
    """What the draft model holds is known without asking it."""
    engine = Engine("bf16", 0.05, always(0.7))
    for rows in (1, 3, 1):
        engine.run(150, rows, 40)
    assert engine.asked > 50
    assert engine.planner._asking is not None
    assert engine.planner._asking._pages is not None
    assert engine.planner._asking._pages._held == engine.held._held


def test_who_cannot_pay_is_not_weighed_in_each_step() -> None:
    """Its prompt takes more to catch up with than it may lose: what asking is worth is weighed once in many steps."""
    engine = Engine("bf16", 0.3, always(0.9))
    asking, weighed = engine.planner._asking, 0
    assert asking is not None
    offers = asking.offers

    def counted(askers: Sequence[Asker], step: Step) -> object:
        nonlocal weighed
        weighed += 1
        return offers(askers, step)

    asking.offers = counted  # type: ignore[assignment]
    engine.run(512, prompt=3000)
    assert engine.asked == 0
    assert 1 <= weighed <= 512 // 32
    for _ in range(4):
        engine.run(200, prompt=10)
    assert engine.asked > 50, "and yet it is asked where it pays"
