"""How likely a drafted token is right: what has been seen of one request, beside what is usual."""

from __future__ import annotations

from bisect import bisect_right

from asyncengine.speculation.lookup import MOST

BY_MODEL = MOST + 1
"""In the place of an agreement: a draft model guesses."""
_LEVELS = (2, 3, 4, 6, 9, BY_MODEL)
"""Agreements from which a guess is better than one of less."""
_USUAL = (0.35, 0.5, 0.65, 0.8, 0.9, 0.75)
_WEIGHT = 1.5
"""Of what is usual, in drafted tokens."""
_KEEP = 0.99
"""What of earlier tokens counts when there is a new one: a text changes."""
_REST = 0.998
"""What of it counts after a step in which a draft was not worth its time: what was useless is tried again, seldom."""


class Acceptance:
    """Counts of one request, by how long its drafts' places agreed. A function of tokens alone: replays agree."""

    __slots__ = ("_others", "_right", "_tried")

    def __init__(self, others: Acceptance | None = None) -> None:
        """`others`: what has been seen of requests like this one, which a new one is taken for."""
        self._others = others
        self._tried = [0.0] * len(_LEVELS)
        self._right = [0.0] * len(_LEVELS)

    def rate(self, agreed: int) -> float:
        """Share of tokens that are right, of those whose predecessors were."""
        usual = _USUAL[_level(agreed)] if self._others is None else self._others.rate(agreed)
        level = _level(agreed)
        return (usual * _WEIGHT + self._right[level]) / (_WEIGHT + self._tried[level])

    def learn(self, agreed: int, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` tokens stood; what lay behind the first wrong one says nothing."""
        if self._others is not None:
            self._others.learn(agreed, drafted, accepted)
        level = _level(agreed)
        tried = min(accepted + 1, drafted)
        keep = _KEEP**tried
        self._tried[level] = self._tried[level] * keep + tried
        self._right[level] = self._right[level] * keep + accepted

    def rest(self, agreed: int) -> None:
        """A draft was there and not taken."""
        if self._others is not None:
            self._others.rest(agreed)
        level = _level(agreed)
        self._tried[level] *= _REST
        self._right[level] *= _REST


def _level(agreed: int) -> int:
    return max(0, bisect_right(_LEVELS, agreed) - 1)
