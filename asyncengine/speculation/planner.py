"""How many drafted tokens a step is worth: expected tokens against the time that computing them takes.

Only what is left over is spent on drafts: steps that compute a prompt have none, but for what the prompt's own caller
predicts, and no page is taken from anybody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncengine.request_spec import RequestSpec
from asyncengine.speculation.acceptance import Acceptance
from asyncengine.speculation.asking import Asked, Asker, Asking, Offer, Step, best_gain
from asyncengine.speculation.costs import SIZES, StepCosts
from asyncengine.speculation.drafter import Drafter, LookupDrafter, MakeDrafter
from asyncengine.speculation.evidence import Evidence
from asyncengine.speculation.lookup import NOTHING, Draft
from asyncengine.speculation.records import Habits
from asyncengine.speculation.store import OutputStore
from asyncengine.step import OPEN, Row

_NAMESPACES = 256
_SURE = 0.98
"""The best that is hoped of a drafted token before anybody has drafted any."""
_WAIT = 1.5
"""Expected tokens of a step, in those of one without guesses, for which a request is not launched ahead."""


class Candidate(NamedTuple):
    """A row that may get drafts."""

    key: int
    """The request's ticket."""
    spec: RequestSpec
    tokens: list[int]
    """The request's live list."""
    namespace: tuple[Hashable, ...]
    most: int
    """Drafts that the row has room for."""
    pages: Sequence[int] = ()
    """The request's page table."""


@dataclass(slots=True)
class SpeculationCounters:
    """Running totals since the start."""

    drafted: int = 0
    accepted: int = 0
    rows: int = 0
    """Rows that carried drafts."""
    by_model: tuple[int, int] = (0, 0)
    """Of `drafted` and `accepted`, those of a draft model."""
    by_position: list[int] = field(default_factory=list)
    """Accepted at the first, second, ... place of a draft."""


class _Drafting:
    """What is known of one request."""

    __slots__ = ("acceptance", "asked", "draft", "drafter", "prediction")

    def __init__(self, drafter: Drafter, others: _Others, constrained: bool) -> None:
        """`constrained`: by a grammar, which a draft model knows nothing of."""
        self.drafter = drafter
        self.acceptance = Acceptance(others.acceptance)
        self.asked = Asked(others.constrained if constrained else others.asked)
        self.draft = NOTHING
        """The last one."""
        self.prediction = (0, 0)
        """Tokens of its caller's guess that were right, and that were wrong."""


class _Others(NamedTuple):
    """What has been learnt from all requests of a namespace."""

    acceptance: Acceptance
    habits: Habits
    asked: Asked
    """Of a draft model."""
    constrained: Asked
    """The same of requests with grammars."""


class DraftPlanner:
    """Drafts for the rows of a step, and what became of them. A function of requests, their tokens and the settings."""

    def __init__(
        self,
        costs: StepCosts,
        most: int,
        store_bytes: int = 0,
        make_drafter: MakeDrafter | None = None,
        asking: Asking | None = None,
    ) -> None:
        """`most`: drafts of a row. `make_drafter`: None looks up. `asking`: None: there is no draft model."""
        self.counters = SpeculationCounters(by_position=[0] * most)
        self._costs = costs
        self._asking = asking
        self._most = most
        self._hopes: dict[tuple[int, int], bool] = {}
        """(tokens, sampled tokens) of a step -> `_hopeful`."""
        self._store = OutputStore(store_bytes) if store_bytes else None
        self._make = make_drafter or self._lookup
        self._requests: dict[int, _Drafting] = {}
        self._seen: OrderedDict[tuple[Hashable, ...], _Others] = OrderedDict()
        """By namespace, the last ones."""

    def _lookup(self, spec: RequestSpec, tokens: Sequence[int], namespace: tuple[Hashable, ...]) -> Drafter:
        # what a grammar wrote says nothing about what others would write
        habits = None if spec.params.grammar is not None else self._others(namespace).habits
        return LookupDrafter(spec, tokens, namespace, self._store, habits)

    def _others(self, namespace: tuple[Hashable, ...]) -> _Others:
        found = self._seen.pop(namespace, None) or _Others(Acceptance(), Habits(), Asked(), Asked())
        self._seen[namespace] = found
        if len(self._seen) > _NAMESPACES:
            self._seen.popitem(last=False)
        return found

    def plan(self, candidates: Sequence[Candidate], num_tokens: int, num_sampling: int) -> dict[int, tuple[int, ...]]:
        """Drafts by key for those that get any, in a step that computes `num_tokens` and samples `num_sampling` tokens
        without them."""
        room = SIZES[-1] - num_tokens
        if room <= 0 or not self._hopeful(num_tokens, num_sampling):
            return {}
        step = Step(num_tokens, num_sampling)
        awake = [] if self._asking is None else self._awake(self._asking, candidates, step)
        if not awake and len(candidates) == 1:
            return self._plan_one(candidates[0], room, num_tokens, num_sampling)
        drafts, offers = self._propose(candidates, awake, step, room)
        chances: list[tuple[float, int, int]] = []
        for place, draft in drafts.items():
            known = self._requests[candidates[place].key]
            known.draft = draft
            limit = min(candidates[place].most, self._most, room)
            offer = offers.get(place)
            rates = known.acceptance.rates(draft, limit) if offer is None else offer.rates
            chance = 1.0
            for number, rate in enumerate(rates):
                chance *= rate
                chances.append((-chance, place, number))
        chances.sort()
        worth = self._worth(chances[:room], offers, step)
        counts: dict[int, int] = {}
        for _, place, _ in chances[:worth]:
            counts[place] = counts.get(place, 0) + 1
        if not counts:
            counts = {place: 1 for place, offer in offers.items() if offer.ask.trial}
        self._ask(offers, candidates, counts, num_tokens)
        for place, draft in drafts.items():
            if place not in counts and place not in offers:
                self._requests[candidates[place].key].acceptance.rest(draft.evidence)
        return {candidates[place].key: drafts[place].tokens[:count] for place, count in counts.items()}

    def _awake(self, asking: Asking, candidates: Sequence[Candidate], step: Step) -> list[int]:
        """The places of those that a draft model may be asked for in this step."""
        found = []
        for place, candidate in enumerate(candidates):
            if not asking.rests(self._known(candidate).asked, step):
                found.append(place)
        return found

    def _propose(
        self, candidates: Sequence[Candidate], awake: Sequence[int], step: Step, room: int
    ) -> tuple[dict[int, Draft], dict[int, Offer]]:
        """By place, what is found, or guesses that a draft model is to make for those that are `awake`, where what is
        found promises nothing; and what these promise."""
        drafts: dict[int, Draft] = {}
        askers: list[Asker] = []
        for place, candidate in enumerate(candidates):
            limit = min(candidate.most, self._most, room)
            if limit < 1:
                continue
            known = self._known(candidate)
            found = self._proposed(known, candidate, limit)
            if found.tokens:
                drafts[place] = found
            if place not in awake:
                continue
            asked, tokens = known.asked, candidate.tokens
            # what is looked up costs nothing to make: a draft model guesses where that is not worth computing
            if found.tokens and best_gain(self._costs, known.acceptance.rates(found, limit), step)[1]:
                continue
            left, prompt = candidate.spec.max_total - len(tokens), len(candidate.spec.prompt)
            askers.append(Asker(place, asked, tokens, candidate.pages, prompt, left, limit))
        if self._asking is None or not askers:
            return drafts, {}
        offers = self._asking.offers(askers, step)
        for place, offer in offers.items():
            drafts[place] = Draft((OPEN,) * len(offer.rates), Evidence.MODEL)
        return drafts, offers

    def _ask(
        self, offers: Mapping[int, Offer], candidates: Sequence[Candidate], counts: Mapping[int, int], num_tokens: int
    ) -> None:
        """A draft model is asked for so many guesses."""
        chosen = [place for place in offers if place in counts]
        if self._asking is None or not chosen:
            return
        total = sum(counts.values())
        each = (self._costs.of(num_tokens + total) - self._costs.of(num_tokens)) / total
        for place in chosen:
            asked = self._requests[candidates[place].key].asked
            self._asking.asks(asked, offers[place].ask, len(chosen), each)

    def sees(self, rows: Iterable[Row]) -> None:
        """A step of `rows` is launched, with their drafts."""
        if self._asking is not None:
            self._asking.sees(rows)

    def _plan_one(
        self, candidate: Candidate, room: int, num_tokens: int, num_sampling: int
    ) -> dict[int, tuple[int, ...]]:
        """`plan` of one row, whose guesses stand in the order of their chances."""
        limit = min(candidate.most, self._most, room)
        if limit < 1:
            return {}
        known = self._known(candidate)
        draft = self._proposed(known, candidate, limit)
        if not draft.tokens:
            return {}
        known.draft = draft
        costs, chance, expected = self._costs.table, 1.0, float(num_sampling)
        best, worth = expected / costs[num_tokens], 0
        for tried, rate in enumerate(known.acceptance.rates(draft, limit)[:room], 1):
            chance *= rate
            expected += chance
            gain = expected / costs[num_tokens + tried]
            if gain > best:
                best, worth = gain, tried
        if worth:
            return {candidate.key: draft.tokens[:worth]}
        known.acceptance.rest(draft.evidence)
        return {}

    def plan_behind_prompt(self, candidate: Candidate, num_tokens: int) -> tuple[int, ...]:
        """Drafts for a request whose prompt ends with the `num_tokens` of a step that it has for itself: those that its
        caller predicts, which save a pass. Nobody else's first token may come later for the sake of a guess."""
        if not candidate.spec.prediction:
            return ()
        known = self._known(candidate)
        limit = min(candidate.most, self._most)
        draft = self._proposed(known, candidate, limit)
        if not draft.predicted:
            return ()
        known.draft = draft
        chance = expected = best = 1.0
        count = 0
        for number, rate in enumerate(known.acceptance.rates(draft, limit), 1):
            chance *= rate
            expected += chance
            gain = expected / (1.0 + self._costs.of(num_tokens + number) - self._costs.of(num_tokens))
            if gain > best:
                best, count = gain, number
        return draft.tokens[:count]

    def promises(self, candidate: Candidate, num_rows: int) -> bool:
        """Whether a request whose next token is on its way had better wait for it than be computed behind it, among
        `num_rows`: as far as its tokens are known they go on as they went on before, and such guesses came true."""
        limit = min(candidate.most, self._most, SIZES[-1] - num_rows)
        if limit < 1 or not self._hopeful(num_rows, num_rows):
            return False
        known = self._known(candidate)
        found = self._proposed(known, candidate, limit)
        if not found.tokens:
            return False
        rates = known.acceptance.rates(found, limit)
        # its own tokens for the time of its step: what is computed for others meanwhile is no reason to wait
        gain = best_gain(self._costs, rates, Step(num_rows, 1))[0]
        if gain < _WAIT:
            known.acceptance.rest(found.evidence)
            return False
        return True

    def _known(self, candidate: Candidate) -> _Drafting:
        known = self._requests.get(candidate.key)
        if known is None:
            made = self._make(candidate.spec, candidate.tokens, candidate.namespace)
            constrained = candidate.spec.params.grammar is not None
            known = self._requests[candidate.key] = _Drafting(made, self._others(candidate.namespace), constrained)
        return known

    @staticmethod
    def _proposed(known: _Drafting, candidate: Candidate, limit: int) -> Draft:
        """What may follow, up to where the request would end: that token is sampled behind the others in any case."""
        found = known.drafter.propose(candidate.tokens, limit)
        for stop in candidate.spec.stop_ids:
            if stop in found.tokens:
                found = found._replace(tokens=found.tokens[: found.tokens.index(stop)])
        return found

    @staticmethod
    def _is_model(draft: Draft) -> bool:
        return draft.evidence is Evidence.MODEL

    def _hopeful(self, num_tokens: int, num_sampling: int) -> bool:
        """Could any draft be worth its time? Else nobody is asked for one."""
        known = self._hopes.get((num_tokens, num_sampling))
        if known is None:
            costs = self._costs
            now = num_sampling / costs.of(num_tokens)
            known = self._hopes[num_tokens, num_sampling] = any(
                (num_sampling + _SURE * more) / costs.of(num_tokens + more) > now
                for more in (1, 3, 7, 15, 31)
                if num_tokens + more <= SIZES[-1]
            )
        return known

    def _worth(self, chances: Sequence[tuple[float, int, int]], offers: Mapping[int, Offer], step: Step) -> int:
        """How many of the likeliest drafted tokens make the most of a step's time. `chances`: (minus the chance, place
        of the row, number of the draft), likeliest first; a draft model makes those of the places of `offers`."""
        expected, making = float(step.streams), 0.0
        best, count = expected / self._costs.of(step.tokens), 0
        rounds = [0] * self._most  # rows in each round of the draft model
        for tried, (chance, place, number) in enumerate(chances, 1):
            expected -= chance
            if self._asking is not None and place in offers:
                rows = rounds[number] = rounds[number] + 1
                making += self._asking.model_costs.of(rows) - self._asking.model_costs.of(rows - 1)
                making += 0.0 if number else offers[place].extra
            gain = expected / (self._costs.of(step.tokens + tried) + making)
            if gain > best:
                best, count = gain, tried
        return count

    def learn(self, key: int, drafted: int, accepted: int) -> None:
        """`accepted` of the `drafted` tokens of a row stood."""
        known = self._requests.get(key)
        modelled = known is not None and self._is_model(known.draft)
        if known is not None and modelled and self._asking is not None:
            self._asking.learn(known.asked, drafted, accepted)
        if not drafted:
            return  # they were left to a draft model, which was not ready
        counters = self.counters
        counters.rows += 1
        counters.drafted += drafted
        counters.accepted += accepted
        for place in range(accepted):
            counters.by_position[place] += 1
        if modelled:
            made, right = counters.by_model
            counters.by_model = made + drafted, right + accepted
        elif known is not None:
            known.acceptance.learn(known.draft, drafted, accepted)
            if known.draft.predicted:
                right, wrong = known.prediction
                known.prediction = (right + accepted, wrong + drafted - accepted)

    def clear(self) -> None:
        """Other weights will write other texts: what was learnt from finished requests is of no use."""
        self._seen.clear()
        if self._store is not None:
            self._store.clear()

    def forget(self, key: int, namespace: tuple[Hashable, ...], output: Sequence[int]) -> tuple[int, int]:
        """The request has ended. `output`: what others may draft from; empty for none. Returns how many tokens of its
        caller's prediction were drafted and right, and how many were wrong."""
        known = self._requests.pop(key, None)
        if self._store is not None and output:
            self._store.add(namespace, output)
        return (0, 0) if known is None else known.prediction
