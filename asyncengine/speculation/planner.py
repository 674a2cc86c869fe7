"""Plans how many drafted tokens each row of a step carries: expected tokens against the time that they take.

Only spare compute is spent on drafts: steps that compute a prompt have none, but for what that prompt's own caller
predicts, and no page is taken from a request.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple, Protocol

from asyncengine.request_spec import RequestSpec
from asyncengine.speculation.acceptance import AMBIGUOUS, LONG, NOTHING, Acceptance, Draft, Source, best_prefix, prior
from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.lookup import EarlierAnswers, FixedIndex, Namespace, OwnText
from asyncengine.step import DRAFT_CATCH_UP, MEASURED_SIZES, OPEN

# Proposers of drafts: objects that guess what one request writes next, seeing its text grow.

_NEAR = 24
"""Distance in tokens from where the prediction was left, within which a single token suffices to find it again."""
_SURE = 3
"""Tokens in a row that are as predicted, from which on it is not doubted."""


class Proposer(Protocol):
    """A source of guesses for one request. Its guesses change nothing but time."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """A draft of what follows `tokens`, the request's prompt and output so far; up to `limit` tokens are used."""
        ...


class Prediction:
    """Position of an output in its caller's guess of it (OpenAI's predicted outputs): an edited file, a template.

    The guess is followed while it is right. Where the output leaves it, its last two tokens, or else its last one, are
    looked for near the place that was left: behind a changed word the prediction goes on.
    """

    def __init__(self, predicted: Sequence[int], prompt_len: int) -> None:
        self._predicted = tuple(predicted)
        self._index = FixedIndex(self._predicted)
        self._seen = prompt_len
        """Tokens of the request that have been compared."""
        self._next = 0
        """The index that the next token is compared with."""
        self._agreed = _SURE
        """Tokens in a row that were as predicted; it is believed from the beginning."""
        self._left = 0
        """The index at which the output left it last."""
        self._since = 0
        """Tokens since."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """`tokens`: prompt and output so far. No tokens while the position in the prediction is unknown."""
        for position in range(self._seen, len(tokens)):
            self._compare(tokens[position - 1], tokens[position])
        self._seen = len(tokens)
        predicted = self._predicted[self._next : self._next + limit]
        if not predicted or (self._agreed < 1 and self._since > 1):
            return NOTHING
        return Draft(predicted, Source.PREDICTION, LONG if self._agreed >= _SURE else self._agreed or AMBIGUOUS)

    def _compare(self, before: int, token: int) -> None:
        """Compare `token` with the prediction. Another one may be inserted, omitted or changed: the next tell."""
        self._since += 1
        if self._next < len(self._predicted) and self._predicted[self._next] == token:
            self._next += 1
            self._agreed = min(self._agreed + 1, _SURE)
            return
        if self._agreed >= _SURE:  # else the prediction had not really been found again
            self._left, self._since = self._next, 1
        self._agreed = 0
        expected = self._left + self._since  # the index if words were only replaced, token by token
        index = self._index.nearest_behind(expected, before, token) if self._since > 1 else None
        if index is not None:
            self._next, self._agreed = index, 2
            return
        index = self._index.nearest_behind(expected, token)
        if index is not None and abs(index - expected) <= _NEAR:
            self._next, self._agreed = index, 1
        elif self._since == 1:
            self._next = self._left + 1


MakeProposer = Callable[[RequestSpec, Sequence[int], Namespace], Proposer]
"""(specification, the request's live list of tokens, namespace whose earlier answers it may see) -> its proposer."""


class LookupProposer:
    """Drafts from the caller's prediction, the request's own text and earlier answers of its namespace."""

    def __init__(self, spec: RequestSpec, tokens: Sequence[int], namespace: Namespace, answers: EarlierAnswers) -> None:
        # ids of pictures need more than 8 bytes, which the index has not, and are never drafted
        prompt = tuple(max(token, -1) for token in spec.prompt) if spec.images else spec.prompt
        self._sources: list[Callable[[Sequence[int], int], Draft]] = [
            OwnText(prompt, tokens).propose, partial(answers.propose, namespace)
        ]  # fmt: skip
        if spec.prediction:
            self._sources.insert(0, Prediction(spec.prediction, len(prompt)).propose)

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """The draft whose first token is likeliest right; no further source is asked where one agrees for long."""
        surest = NOTHING
        for propose in self._sources:
            surest = max(surest, propose(tokens, limit), key=prior)
            if surest.agreed >= LONG:
                break
        return surest


_MAX_NAMESPACES = 256
_BEST_RATE = 0.98
"""The best acceptance that is hoped for when it is asked whether any draft could pay in a step."""
_MIN_MODEL_GAIN = 1.03
"""Tokens per time with a draft model's guesses over those without, below which the model is not asked: a smaller gain
is as likely an error of measurement."""
_MIN_WAIT_GAIN = 1.5
"""Gain from which on a request rather waits for its token in flight than being launched behind it without drafts."""
_MIN_AHEAD = 32
"""Tokens that an answer is expected to go on for, at least; a longer one is expected to double."""
_OPEN = Draft((OPEN,) * MEASURED_SIZES[-1], Source.MODEL, AMBIGUOUS)
"""Guesses that the draft model makes in the step."""

_Guess = tuple[float, int, float]
"""A drafted token, such that the likeliest sorts first: minus the chance that it and all before it are right, index of
its row's candidate, cost of making it (0: it was looked up)."""


class Candidate(NamedTuple):
    """A row that may get drafts."""

    key: int
    """The request's ticket."""
    spec: RequestSpec
    tokens: list[int]
    """The request's live list of tokens."""
    namespace: tuple[Hashable, ...]
    room: int
    """Drafts that the row has room for, at least 1."""


@dataclass(slots=True)
class SpeculationCounters:
    """Running totals since the start."""

    drafted: int = 0
    accepted: int = 0
    rows: int = 0
    """Rows that carried drafts."""
    by_model: tuple[int, int] = (0, 0)
    """`drafted` and `accepted` tokens that a draft model guessed."""
    by_position: list[int] = field(default_factory=list)
    """Accepted tokens at the first, second, ... position of a draft."""


@dataclass(slots=True)
class _Request:
    """State of one request's drafting."""

    proposer: Proposer
    acceptance: Acceptance
    draft: Draft = NOTHING
    """The last draft."""
    prediction: tuple[int, int] = (0, 0)
    """Tokens of the caller's prediction that were drafted and right, and that were wrong."""
    guesses: tuple[int, int] = (0, 0)
    """Tokens drafted for it, and those of them that were right."""
    caught_up: int = 0
    """Tokens that the draft model is known to have computed."""
    asked_at: int = 0
    """Tokens of the request at its last draft."""


class DraftPlanner:
    """Drafts for the rows of a step, and what became of them: a function of requests, their tokens and the settings."""

    def __init__(
        self, costs: StepCosts, max_drafts: int, answer_bytes: int = 0, make_proposer: MakeProposer | None = None,
        draft_costs: StepCosts | None = None, falls_behind: bool = True,
    ) -> None:  # fmt: skip
        """`max_drafts`: of a row. `answer_bytes`: memory for earlier answers. `make_proposer`: None looks up.
        `draft_costs`: of the draft model's steps, in the unit of `costs`; None: there is no draft model.
        `falls_behind`: it has to compute the text that was written without it; the model's own head has not."""
        self.counters = SpeculationCounters(by_position=[0] * max_drafts)
        self._costs = costs
        self._draft_costs, self._falls_behind = draft_costs, falls_behind
        self._max_drafts = max_drafts
        self._answers = EarlierAnswers(answer_bytes)
        self.make = make_proposer or partial(LookupProposer, answers=self._answers)
        self.requests: dict[int, _Request] = {}
        self._namespaces: OrderedDict[tuple[Hashable, ...], Acceptance] = OrderedDict()
        """Acceptance of the namespaces that were used last."""
        self._pays_at_best = cache(partial(_pays_at_best, costs.table))

    def plan(self, candidates: Sequence[Candidate], num_tokens: int, num_sampling: int) -> dict[int, tuple[int, ...]]:
        """Drafts by key for those that get any, in a step that computes `num_tokens` and samples `num_sampling` tokens
        without them."""
        if not self._pays_at_best(num_tokens, num_sampling):
            return {}
        costs = self._costs.table[num_tokens:]
        guesses: list[_Guess] = []
        drafts: dict[int, Draft] = {}
        unsure: list[int] = []
        for row, candidate in enumerate(candidates):
            draft, chances = self._looked_up(candidate, len(costs) - 1)
            if draft.tokens:
                drafts[row] = draft
            if best_prefix(chances, costs, num_sampling)[0]:
                guesses += [(-chance, row, 0.0) for chance in chances]
            else:
                unsure.append(row)
        if unsure and self._draft_costs is not None:
            modelled = self._worth_asking(candidates, unsure, costs)
            guesses += modelled
            asked = {row: _OPEN for _, row, _ in modelled}
            drafts |= asked
            for row in unsure:
                if row not in asked:
                    self.requests[candidates[row].key].acceptance.rest(Source.MODEL)
        # the likeliest guesses of all rows, as many as yield the most tokens per time
        guesses = sorted(guesses)[: len(costs) - 1]
        making = accumulate(self._making(guesses), initial=0.0)
        with_making = [cost + extra for cost, extra in zip(costs, making, strict=False)]
        worth, gain = best_prefix([-minus for minus, _, _ in guesses], with_making, num_sampling)
        if gain < _MIN_MODEL_GAIN and any(cost for _, _, cost in guesses):
            guesses = [guess for guess in guesses if not guess[2]]
            worth = best_prefix([-minus for minus, _, _ in guesses], costs, num_sampling)[0]
        counts = Counter(row for _, row, _ in guesses[:worth])
        for row, draft in drafts.items():
            request = self.requests[candidates[row].key]
            if row in counts:
                request.draft, request.asked_at = draft, len(candidates[row].tokens)
            else:
                request.acceptance.rest(draft.source)
        return {candidates[row].key: drafts[row].tokens[:count] for row, count in counts.items()}

    def plan_behind_prompt(self, candidate: Candidate, num_tokens: int) -> tuple[int, ...]:
        """Drafts for a request whose prompt ends with the `num_tokens` of a step that it has for itself.

        They are those that its caller predicts, which save a pass. Steps with other requests carry none: no first token
        may come later for the sake of a guess.
        """
        if not candidate.spec.prediction:
            return ()
        draft, chances = self._looked_up(candidate, candidate.room)
        if draft.source is not Source.PREDICTION:
            return ()
        # the prompt is computed in any case: the saved pass costs 1, each draft its place in this step
        base = self._costs.of(num_tokens) - 1.0
        costs = [self._costs.of(num_tokens + number) - base for number in range(len(chances) + 1)]
        self.requests[candidate.key].draft = draft
        return draft.tokens[: best_prefix(chances, costs, 1.0)[0]]

    def promises(self, candidate: Candidate, num_rows: int) -> bool:
        """Whether a request whose next token is in flight should wait for it, among `num_rows`, since drafts behind it
        will bring more than being launched without any."""
        if not self._pays_at_best(num_rows, num_rows):
            return False
        costs = self._costs.table[num_rows:]
        draft, chances = self._looked_up(candidate, len(costs) - 1)
        if not draft.tokens:
            return False
        # tokens per time of this request alone: work for others meanwhile is no reason to wait
        if best_prefix(chances, costs, 1.0)[1] >= _MIN_WAIT_GAIN:
            return True
        self.requests[candidate.key].acceptance.rest(draft.source)
        return False

    def learn(self, key: int, drafted: int, accepted: int) -> None:
        """Take in that `accepted` of the `drafted` tokens of a row were right."""
        request, counters = self.requests.get(key), self.counters
        if request is not None and request.draft.source is Source.MODEL:
            request.caught_up = (
                request.asked_at if drafted else min(request.asked_at, request.caught_up + DRAFT_CATCH_UP)
            )
        if not drafted:
            return  # the draft model is still catching up
        counters.rows += 1
        counters.drafted += drafted
        counters.accepted += accepted
        for position in range(accepted):
            counters.by_position[position] += 1
        if request is None:
            return
        request.acceptance.learn(request.draft, drafted, accepted)
        request.guesses = request.guesses[0] + drafted, request.guesses[1] + accepted
        if request.draft.source is Source.MODEL:
            drafted_by_model, right = counters.by_model
            counters.by_model = drafted_by_model + drafted, right + accepted
        elif request.draft.source is Source.PREDICTION:
            right, wrong = request.prediction
            request.prediction = right + accepted, wrong + drafted - accepted

    def clear(self) -> None:
        """Forget what was learnt from finished requests: other weights will write other texts."""
        self._namespaces.clear()
        self._answers.clear()

    def forget(self, key: int, namespace: tuple[Hashable, ...], output: Sequence[int]) -> tuple[int, int]:
        """End a request's drafting. `output`: what others may draft from; empty for none. Returns how many tokens of
        its caller's prediction were drafted and right, and how many were wrong."""
        self._answers.add(namespace, output)
        request = self.requests.pop(key, None)
        return (0, 0) if request is None else request.prediction

    def _of(self, candidate: Candidate) -> _Request:
        request = self.requests.get(candidate.key)
        if request is None:
            namespace = self._namespaces.pop(candidate.namespace, None) or Acceptance()
            self._namespaces[candidate.namespace] = namespace
            if len(self._namespaces) > _MAX_NAMESPACES:
                self._namespaces.popitem(last=False)
            proposer = self.make(candidate.spec, candidate.tokens, candidate.namespace)
            request = self.requests[candidate.key] = _Request(proposer, Acceptance(namespace))
        return request

    def _looked_up(self, candidate: Candidate, room: int) -> tuple[Draft, list[float]]:
        """A draft up to where the request would end, which is sampled behind the others in any case, and the chances of
        its tokens, of which the step has `room` for that many."""
        request, limit = self._of(candidate), min(candidate.room, self._max_drafts, room)
        draft = request.proposer.propose(candidate.tokens, limit)
        for stop in candidate.spec.stop_ids:
            if stop in draft.tokens:
                draft = draft._replace(tokens=draft.tokens[: draft.tokens.index(stop)])
        return draft, request.acceptance.chances(draft, limit)

    def _making(self, guesses: Sequence[_Guess]) -> Iterator[float]:
        """The cost of making each of these: guesses at the same position of several rows are made in one pass."""
        positions, passes = Counter[int](), Counter[int]()
        for _, row, cost in guesses:
            if not cost or self._draft_costs is None:
                yield 0.0
                continue
            number = positions[row]
            alone = passes[number]
            yield self._draft_costs.of(alone + 1) - (self._draft_costs.of(alone) if alone else 0.0)
            positions[row] += 1
            passes[number] += 1

    def _worth_asking(
        self, candidates: Sequence[Candidate], rows: Sequence[int], costs: Sequence[float]
    ) -> list[_Guess]:
        """Guesses that a draft model should make for the candidates at indices `rows`; `costs`: of the step by guesses.

        The fewer rows, the more each has to pay of a pass of the draft model, so rows are dropped until all pay.
        """
        assert self._draft_costs is not None
        while rows:
            making = self._draft_costs.of(len(rows)) / len(rows)
            guesses = [
                (-chance, row, making) for row in rows for chance in self._model_chances(candidates[row], making, costs)
            ]
            paying = sorted({row for _, row, _ in guesses})
            if len(paying) == len(rows):
                return guesses
            rows = paying
        return []

    def _model_chances(self, candidate: Candidate, making: float, costs: Sequence[float]) -> list[float]:
        """Chances of the guesses that are worth asking a draft model for, at a cost of `making` each."""
        assert self._draft_costs is not None
        request, num_tokens = self._of(candidate), len(candidate.tokens)
        chances = request.acceptance.chances(_OPEN, min(candidate.room, self._max_drafts, len(costs) - 1))
        # tokens written without the draft model must be computed by it first: the tokens to come pay for them
        ahead = min(candidate.spec.max_total - num_tokens, max(_MIN_AHEAD, num_tokens - len(candidate.spec.prompt)))
        missing = num_tokens - request.caught_up if self._falls_behind else 1
        catching_up = self._draft_costs.of(missing) - self._draft_costs.of(1)
        extra = 2 * max(0.0, catching_up) / max(1, ahead)
        with_making = [cost + number * making + extra * (number > 0) for number, cost in enumerate(costs)]
        count, gain = best_prefix(chances, with_making, 1.0)
        return chances[:count] if gain >= _MIN_MODEL_GAIN else []


def _pays_at_best(costs: Sequence[float], num_tokens: int, num_sampling: int) -> bool:
    """Whether any number of drafts could be worth its time in such a step; else no request is asked for one. `costs`:
    of steps by their tokens."""
    chances = list(accumulate(repeat(_BEST_RATE, len(costs) - 1 - num_tokens), mul))
    return bool(chances) and best_prefix(chances, costs[num_tokens:], num_sampling)[0] > 0
