"""How often a draft model's guesses stood: of one request, beside what others are like.

Its first guess is made whatever comes; a further one only where it was sure of those before (`draft_model`). So the two
are counted apart, and both as they were made: a model that is sure and wrong is found out, one that seldom goes on, and
is right then, is asked for more.
"""

from __future__ import annotations

_USUAL = (0.6, 0.75)
"""Share of guesses that are right, of the first ones and of further ones, before any was made."""
_WEIGHT = 4.0
"""Of what is usual, in guesses."""
_KEEP = 0.98
"""What of earlier guesses counts when there is a new one: a text changes."""


class Trust:
    """Counts of guesses that were made and that were right. A function of tokens alone: replays agree."""

    __slots__ = ("_others", "_right", "_tried")

    def __init__(self, others: Trust | None = None) -> None:
        """`others`: what has been seen of requests like this one, which a new one is taken for."""
        self._others = others
        self._tried = [0.0, 0.0]
        self._right = [0.0, 0.0]

    def rates(self, count: int) -> list[float]:
        """Of `count` guesses in a row: how likely each is right, if those before it are."""
        if not count:
            return []
        return [self._mean(0)] + [self._mean(1)] * (count - 1)

    def _mean(self, kind: int) -> float:
        usual = _USUAL[kind] if self._others is None else self._others._mean(kind)
        return (usual * _WEIGHT + self._right[kind]) / (_WEIGHT + self._tried[kind])

    def learn(self, made: int, right: int) -> None:
        """Of `made` guesses the first `right` ones stood; those behind the first wrong one say nothing."""
        if self._others is not None:
            self._others.learn(made, right)
        for place in range(min(made, right + 1)):
            kind = min(place, 1)
            self._tried[kind] = self._tried[kind] * _KEEP + 1
            self._right[kind] = self._right[kind] * _KEEP + (place < right)
