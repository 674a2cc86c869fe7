"""The caller's guess of the whole output (OpenAI's predicted outputs): an edited file, a known template.

Followed while it is right. Where the output leaves it, its last two tokens, or else its last one, are looked for near
the place that was left: behind a changed word the prediction goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncengine.speculation.acceptance import AMBIGUOUS, LONG, NOTHING, Draft, Source
from asyncengine.speculation.lookup import FixedIndex

_NEAR = 24
"""Tokens around the place that was left, among which one alone is enough to be found again."""
_SURE = 3
"""Tokens in a row that are as predicted, from which on it is not doubted."""


class Prediction:
    """Position of an output in the prediction, found again after each difference."""

    def __init__(self, predicted: Sequence[int], prompt_len: int) -> None:
        self._predicted = tuple(predicted)
        self._index = FixedIndex(self._predicted)
        self._seen = prompt_len
        """Tokens of the request that have been compared."""
        self._next = 0
        """The place that the next token is compared with."""
        self._agreed = _SURE
        """Tokens in a row that were as predicted; it is believed from the beginning."""
        self._left = 0
        """The index at which the output left it last."""
        self._since = 0
        """Tokens since."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """`tokens`: prompt and output so far. Nothing while the place is not known."""
        for place in range(self._seen, len(tokens)):
            self._compare(tokens[place - 1], tokens[place])
        self._seen = len(tokens)
        found = self._predicted[self._next : self._next + limit]
        if not found or (self._agreed < 1 and self._since > 1):
            return NOTHING
        return Draft(found, Source.PREDICTION, LONG if self._agreed >= _SURE else self._agreed or AMBIGUOUS)

    def _compare(self, before: int, token: int) -> None:
        """Was it predicted? Else it may have been put in, left out or changed: which of these, the next ones say."""
        self._since += 1
        if self._next < len(self._predicted) and self._predicted[self._next] == token:
            self._next += 1
            self._agreed = min(self._agreed + 1, _SURE)
            return
        if self._agreed >= _SURE:  # else it was not found again in truth
            self._left, self._since = self._next, 1
        self._agreed = 0
        expected = self._left + self._since  # had it changed words only
        place = self._index.nearest_behind(expected, before, token) if self._since > 1 else None
        if place is not None:
            self._next, self._agreed = place, 2
            return
        place = self._index.nearest_behind(expected, token)
        if place is not None and abs(place - expected) <= _NEAR:
            self._next, self._agreed = place, 1
        elif self._since == 1:
            self._next = self._left + 1
