"""How many drafted tokens a step is worth: expected tokens against the time that computing them takes.

Only what is left over is spent on drafts: steps that compute a prompt have none, and no page is taken from anybody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncengine.request_spec import RequestSpec
from asyncengine.speculation.acceptance import Acceptance
from asyncengine.speculation.costs import SIZES, StepCosts
from asyncengine.speculation.drafter import Drafter, LookupDrafter, MakeDrafter
from asyncengine.speculation.lookup import NOTHING, Draft
from asyncengine.speculation.store import OutputStore

_NAMESPACES = 256
_SURE = 0.98
"""The best that is hoped of a drafted token before anybody has drafted any."""


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


@dataclass(slots=True)
class SpeculationCounters:
    """Running totals since the start."""

    drafted: int = 0
    accepted: int = 0
    rows: int = 0
    """Rows that carried drafts."""
    by_position: list[int] = field(default_factory=list)
    """Accepted at the first, second, ... place of a draft."""


class _Drafting:
    """What is known of one request."""

    __slots__ = ("acceptance", "draft", "drafter", "prediction")

    def __init__(self, drafter: Drafter, others: Acceptance) -> None:
        self.drafter = drafter
        self.acceptance = Acceptance(others)
        self.draft = NOTHING
        """The last one."""
        self.prediction = (0, 0)
        """Tokens of its caller's guess that were right, and that were wrong."""


class DraftPlanner:
    """Drafts for the rows of a step, and what became of them. A function of requests, their tokens and the settings."""

    def __init__(
        self, costs: StepCosts, most: int, store_bytes: int = 0, make_drafter: MakeDrafter | None = None
    ) -> None:
        """`most`: drafts of a row. `make_drafter`: None looks up."""
        self.counters = SpeculationCounters(by_position=[0] * most)
        self._costs = costs
        self._most = most
        self._store = OutputStore(store_bytes) if store_bytes else None
        self._make = make_drafter or self._lookup
        self._requests: dict[int, _Drafting] = {}
        self._seen: OrderedDict[tuple[Hashable, ...], Acceptance] = OrderedDict()
        """Of all requests of a namespace, the last ones."""

    def _lookup(self, spec: RequestSpec, tokens: Sequence[int], namespace: tuple[Hashable, ...]) -> Drafter:
        return LookupDrafter(spec, tokens, namespace, self._store)

    def _others(self, namespace: tuple[Hashable, ...]) -> Acceptance:
        found = self._seen.pop(namespace, None) or Acceptance()
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
        drafts: dict[int, Draft] = {}
        chances: list[tuple[float, int, int]] = []
        for place, candidate in enumerate(candidates):
            limit = min(candidate.most, self._most, room)
            if limit < 1:
                continue
            known = self._requests.get(candidate.key)
            if known is None:
                made = self._make(candidate.spec, candidate.tokens, candidate.namespace)
                known = self._requests[candidate.key] = _Drafting(made, self._others(candidate.namespace))
            draft = known.drafter.propose(candidate.tokens, limit)
            if not draft.tokens:
                continue
            known.draft = draft
            drafts[candidate.key] = draft
            rate = known.acceptance.rate(draft.agreed)
            chance = 1.0
            for number in range(min(len(draft.tokens), limit)):
                chance *= rate
                chances.append((-chance, place, number))
        chances.sort()
        worth = self._worth([-chance for chance, _, _ in chances[:room]], num_tokens, num_sampling)
        counts: dict[int, int] = {}
        for _, place, _ in chances[:worth]:
            key = candidates[place].key
            counts[key] = counts.get(key, 0) + 1
        for key, draft in drafts.items():
            if key not in counts:
                self._requests[key].acceptance.rest(draft.agreed)
        return {key: draft.tokens[: counts[key]] for key, draft in drafts.items() if key in counts}

    def _hopeful(self, num_tokens: int, num_sampling: int) -> bool:
        """Could any draft be worth its time? Else nobody is asked for one."""
        costs = self._costs
        now = num_sampling / costs.of(num_tokens)
        return any(
            (num_sampling + _SURE * more) / costs.of(num_tokens + more) > now
            for more in (1, 3, 7, 15, 31)
            if num_tokens + more <= SIZES[-1]
        )

    def _worth(self, chances: Sequence[float], num_tokens: int, num_sampling: int) -> int:
        """How many of the likeliest drafted tokens make the most of a step's time. `chances` descend."""
        expected = float(num_sampling)
        best, count = expected / self._costs.of(num_tokens), 0
        for number, chance in enumerate(chances, 1):
            expected += chance
            gain = expected / self._costs.of(num_tokens + number)
            if gain > best:
                best, count = gain, number
        return count

    def learn(self, key: int, drafted: int, accepted: int) -> None:
        """`accepted` of the `drafted` tokens of a row stood."""
        counters = self.counters
        counters.rows += 1
        counters.drafted += drafted
        counters.accepted += accepted
        for place in range(accepted):
            counters.by_position[place] += 1
        known = self._requests.get(key)
        if known is not None:
            known.acceptance.learn(known.draft.agreed, drafted, accepted)
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
