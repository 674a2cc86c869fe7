"""How likely a drafted token is right: what has been seen of one request, beside what is usual."""

from __future__ import annotations

from collections.abc import Sequence

from asyncengine.speculation.evidence import AFTER, USUAL, Evidence
from asyncengine.speculation.lookup import Draft

_WEIGHT = 1.0
"""Of what is usual, in drafted tokens."""
_KEEP = 0.99
"""What of earlier tokens counts when there is a new one: a text changes."""
_REST = 0.998
"""What of it counts after a step in which a draft was not worth its time: what was useless is tried again, seldom."""
_PATIENCE = 3
"""Drafts in a row whose first token was wrong, after which the next one has to wait: twice as long each time, up to
`_LONGEST` steps."""
_LONGEST = 64


class Acceptance:
    """Counts of one request, by what its drafts rested on. A function of tokens alone: replays agree."""

    __slots__ = ("_missed", "_others", "_right", "_tried", "_waits")

    def __init__(self, others: Acceptance | None = None) -> None:
        """`others`: what has been seen of requests like this one, which a new one is taken for."""
        self._others = others
        self._tried = [0.0] * len(USUAL)
        self._right = [0.0] * len(USUAL)
        self._missed = [0] * len(USUAL)
        self._waits = [0] * len(USUAL)

    def rates(self, draft: Draft, count: int) -> list[float]:
        """Of the first `count` tokens of `draft`: how likely each is right, if those before it are. Nothing: it is not
        to be tried now."""
        if self._waits[draft.evidence]:
            return []
        if not draft.joints:
            return self._simple_rates(draft.evidence, min(count, len(draft.tokens)))
        known: dict[Evidence, float] = {}
        found = []
        for evidence in draft.rests_on(count):
            rate = known.get(evidence)
            if rate is None:
                rate = known[evidence] = self._mean(evidence)
            found.append(rate)
        return found

    def _simple_rates(self, evidence: Evidence, count: int) -> list[float]:
        """`rates` of tokens that all come from one place."""
        found: list[float] = []
        while len(found) < count:
            rate, following = self._mean(evidence), AFTER[evidence]
            found += [rate] * (count - len(found) if following is evidence else 1)
            evidence = following
        return found

    def _mean(self, evidence: Evidence) -> float:
        usual = USUAL[evidence] if self._others is None else self._others._mean(evidence)
        return (usual * _WEIGHT + self._right[evidence]) / (_WEIGHT + self._tried[evidence])

    def learn(self, draft: Draft, drafted: int, accepted: int) -> None:
        """`accepted` of the first `drafted` tokens of `draft` stood; those behind the first wrong one say nothing."""
        rests = draft.rests_on(min(accepted + 1, drafted))
        if self._others is not None:
            self._others._learn(draft.evidence, rests, accepted)
        self._learn(draft.evidence, rests, accepted)

    def _learn(self, first: Evidence, rests: Sequence[Evidence], accepted: int) -> None:
        """Of tokens that rest on `rests`, as many as are known to be right, or wrong, so many were right."""
        missed = 0 if accepted else self._missed[first] + 1
        self._missed[first] = missed
        self._waits[first] = min(_LONGEST, 2 ** (missed - _PATIENCE)) if missed > _PATIENCE else 0
        tried, right = self._tried, self._right
        for place, evidence in enumerate(rests):
            tried[evidence] = tried[evidence] * _KEEP + 1
            right[evidence] = right[evidence] * _KEEP + (place < accepted)

    def rest(self, evidence: Evidence) -> None:
        """A draft was there and not taken."""
        if self._others is not None:
            self._others.rest(evidence)
        self._waits[evidence] = max(0, self._waits[evidence] - 1)
        self._tried[evidence] *= _REST
        self._right[evidence] *= _REST
