"""Earlier answers of a namespace, to draft from: templates, boilerplate, answers that come again.

Keyed as the prefix cache is, by adapter and cache salt: nobody may learn of another tenant's text, not even by the time
that its tokens take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import pairwise

from asyncengine.speculation.acceptance import LONG, NOTHING, Draft, Source
from asyncengine.speculation.lookup import agreement

Namespace = tuple[Hashable, ...]

BYTES_PER_TOKEN = 360
"""Estimated memory of a token here: an entry of a dictionary, a pair and a place."""


class EarlierAnswers:
    """Finished answers by namespace, the oldest dropped first when they take more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_tokens = max_bytes // BYTES_PER_TOKEN
        self._answers: OrderedDict[int, tuple[Namespace, tuple[int, ...]]] = OrderedDict()
        self._latest: dict[Namespace, dict[tuple[int, ...], tuple[int, int]]] = {}
        """Pair of tokens -> (number of the answer in which it stood last, position behind it)."""
        self._added = 0
        self.num_tokens = 0

    def add(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        """Take in a finished answer. One that is too short to be found, or too long to be kept, is left out."""
        if not 2 < len(tokens) <= self._max_tokens:
            return
        number, answer = self._added, tuple(tokens)
        latest = self._latest.setdefault(namespace, {})
        for position in range(2, len(answer)):
            latest[answer[position - 2], answer[position - 1]] = number, position
        self._answers[number] = namespace, answer
        self._added += 1
        self.num_tokens += len(answer)
        while self.num_tokens > self._max_tokens:
            self._drop_oldest()

    def propose(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> Draft:
        """The tokens that followed the last two of `tokens` when these stood in an answer the last time."""
        found = self._latest.get(namespace, {}).get(tuple(tokens[-2:]))
        if found is None:
            return NOTHING
        number, position = found
        answer = self._answers[number][1]
        agreed = agreement(tokens, (answer, position), LONG)
        return Draft(answer[position : position + limit], Source.EARLIER_ANSWER, agreed)

    def clear(self) -> None:
        """Keep nothing."""
        self._answers.clear()
        self._latest.clear()
        self.num_tokens = 0

    def _drop_oldest(self) -> None:
        number, (namespace, answer) = self._answers.popitem(last=False)
        latest = self._latest[namespace]
        for pair in pairwise(answer):
            if latest.get(pair, (None,))[0] == number:
                del latest[pair]
        if not latest:
            del self._latest[namespace]
        self.num_tokens -= len(answer)
