"""Proposers of drafts: objects that guess what one request writes next, seeing its text grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from asyncengine.request_spec import RequestSpec
from asyncengine.speculation.acceptance import AMBIGUOUS, LONG, NOTHING, Draft, Source, prior
from asyncengine.speculation.lookup import EarlierAnswers, FixedIndex, Namespace, OwnText

_NEAR = 24
"""Tokens around the place that was left, among which one alone is enough to be found again."""
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


MakeProposer = Callable[[RequestSpec, Sequence[int], Namespace], Proposer]
"""(specification, the request's live list of tokens, namespace whose earlier answers it may see) -> its proposer."""


class LookupProposer:
    """Drafts from the caller's prediction, the request's own text and earlier answers of its namespace."""

    def __init__(self, spec: RequestSpec, tokens: Sequence[int], namespace: Namespace, answers: EarlierAnswers) -> None:
        # ids of pictures need more than 8 bytes; whatever they are, nobody is to write them
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
