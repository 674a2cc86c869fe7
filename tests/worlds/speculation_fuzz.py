"""Random lives with drafts of all kinds: what is guessed must change nothing but the number of steps."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence

from worlds.grammar_fuzz import GrammarLife
from worlds.schedule_fuzz import Life

from asyncengine.request_spec import RequestSpec
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.acceptance import NOTHING, Draft, Source
from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.lookup import EarlierAnswers
from asyncengine.speculation.planner import LookupProposer, Proposer
from asyncengine.step import MEASURED_SIZES

KINDS = ("oracle", "oracle", "nearly", "adversarial", "random", "empty", "over-long", "lookup")
VOCABULARY = 90


class FuzzDrafter:
    """Guesses by what it knows of the right answer."""

    def __init__(
        self, kind: str, right: Sequence[int], prompt_len: int, rng: random.Random, predicted: bool = False
    ) -> None:
        self.kind, self.right, self.prompt_len, self.rng = kind, right, prompt_len, rng
        self.predicted = predicted

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        done = len(tokens) - self.prompt_len
        right = list(self.right[done : done + limit])
        rng = self.rng
        match self.kind:
            case "empty":
                return NOTHING
            case "random":
                right = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(limit + 1))]
            case "adversarial":  # right up to the last
                right = [*right[:-1], right[-1] ^ 1] if right else []
            case "nearly":
                right = [token if rng.random() < 0.7 else rng.randrange(VOCABULARY) for token in right]
            case "over-long":  # beyond the end of the output, and more than it is asked for
                right = [*self.right[done:], *(rng.randrange(VOCABULARY) for _ in range(8))]
        source = Source.PREDICTION if self.predicted else Source.OWN_TEXT
        return Draft(tuple(right), source, 3) if right else NOTHING


def free_costs() -> StepCosts:
    """Drafts are always worth their time."""
    return StepCosts([1.0 + size * 1e-6 for size in MEASURED_SIZES])


def planner_for(life: Life, answers: Mapping[int, Sequence[int]], model_costs: StepCosts | None = None) -> DraftPlanner:
    """Each request gets a drafter of some kind, `answers` being the right ones by ticket; most of them none where there
    is a draft model, whose costs are `model_costs`."""
    rng = random.Random(life.seed)
    answers_kept = EarlierAnswers(40_000)

    def make(spec: RequestSpec, tokens: Sequence[int], namespace: tuple[Hashable, ...]) -> Proposer:
        kind = rng.choice(KINDS if model_costs is None else (*KINDS, *["empty"] * 3 * len(KINDS)))
        if kind == "lookup":
            return LookupProposer(spec, tokens, namespace, answers_kept)
        return FuzzDrafter(kind, answers[spec.ticket], len(spec.prompt), rng, bool(spec.prediction))

    return DraftPlanner(free_costs(), rng.choice([1, 3, 7, 15]), 40_000, make, model_costs)


class _Answers(Mapping[int, Sequence[int]]):
    """The answers that requests with grammars must get, by ticket."""

    def __init__(self, life: GrammarLife) -> None:
        self._life = life

    def __getitem__(self, ticket: int) -> Sequence[int]:
        return self._life.plans[ticket].tokens

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._life.plans)

    def __len__(self) -> int:
        return len(self._life.plans)


def speculative_life(seed: int, depth: int | None = None, **model: bool) -> Life:
    """A `Life` whose requests are drafted for; `model` as for `Life`."""
    life = Life(seed, depth, **model)  # type: ignore[arg-type]
    rng = random.Random(seed)
    life.predict = lambda right: tuple(right) if rng.random() < 0.5 else ()
    life.scheduler.roster.drafts = planner_for(life, life.expected)
    life.executor.keep_batches = True
    return life


def speculative_grammar_life(seed: int, *, states: bool = False) -> GrammarLife:
    """The same with grammars, adapters and faults."""
    life = GrammarLife(seed, faults=bool(seed % 3), states=states)
    life.scheduler.roster.drafts = planner_for(life, _Answers(life))
    life.check_forced = False
    return life
