"""Drafts by looking up: the tokens that followed the last ones where these stood before, in the text or another one.

Texts repeat themselves: a quotation, an edited file, a field's name, a loop. The last two tokens, or else the last one,
are looked up in prompt and output (prompt lookup, Saxena 2023); the occurrence whose past agrees longest is
followed (suffix decoding, Oliaro et al. 2024).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from itertools import cycle, islice, pairwise

from asyncengine.speculation.acceptance import AMBIGUOUS, LONG, NOTHING, Draft, Source

LONGEST = 16
"""Tokens up to which a longer agreement makes one occurrence better than another."""
_LATEST = 4
"""Latest occurrences that are looked at."""
BYTES_PER_TOKEN = 360
"""Estimated memory of a token of an earlier answer: an entry of a dictionary, its key and an occurrence."""

Occurrence = tuple[Sequence[int], int]
"""An occurrence of the last tokens: (the text, position of the token that follows them)."""
Namespace = tuple[Hashable, ...]


class FixedIndex:
    """Index of the tokens and pairs of tokens of a text that does not change: sorted keys, 32 bytes a token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        import numpy as np  # not before the first draft: importing it takes longer than all the rest

        self.tokens = tokens
        values = np.array(tokens, dtype=np.int64)[:-1]  # the last one has nothing behind it
        self._sorted: list[tuple[array[int], array[int]]] = []
        """Keys and the positions behind them: of single tokens, of pairs."""
        for length, keys in enumerate((values, (values[:-1] << 32) | values[1:]), 1):
            order = np.argsort(keys, kind="stable")
            # a search in a numpy array takes several times as long
            self._sorted.append((array("q", keys[order].tobytes()), array("q", (order + length).tobytes())))

    def behind(self, *last: int) -> Sequence[int]:
        """Positions behind one token, or two in a row, the latest ones, earliest first."""
        positions, begin, end = self._range(last)
        return positions[max(begin, end - _LATEST) : end]

    def nearest_behind(self, position: int, *last: int) -> int | None:
        """Position behind one token, or two in a row, that is nearest to `position`; None: they do not occur."""
        positions, begin, end = self._range(last)
        index = bisect_left(positions, position, begin, end)
        near = positions[max(begin, index - 1) : min(end, index + 1)]
        return min(near, key=lambda candidate: abs(candidate - position), default=None)

    def _range(self, last: tuple[int, ...]) -> tuple[array[int], int, int]:
        """All positions of the index, of which those from the begin to the end, rising, are behind `last`."""
        keys, positions = self._sorted[len(last) - 1]
        key = last[0] if len(last) == 1 else (last[0] << 32) | last[1]
        begin = bisect_left(keys, key)
        return positions, begin, bisect_right(keys, key, begin)


class GrowingIndex:
    """Index of a text that grows at its end: of `tokens` from `start` on."""

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self.tokens = tokens
        self._next = start + 1
        self._positions: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def behind(self, *last: int) -> Sequence[int]:
        """Positions behind one token, or two in a row, the latest ones, earliest first. A token is taken in once that
        behind it is known."""
        for second in range(self._next, len(self.tokens) - 1):
            self._positions[self.tokens[second],].append(second + 1)
            self._positions[self.tokens[second - 1], self.tokens[second]].append(second + 1)
        self._next = max(self._next, len(self.tokens) - 1)
        return self._positions.get(last, ())[-_LATEST:]


def agreement(tokens: Sequence[int], occurrence: Occurrence, most: int = LONGEST) -> int:
    """Number of the last tokens that also precede `occurrence`, up to `most`."""
    text, position = occurrence
    most = min(most, position, len(tokens))
    for back in range(1, most + 1):
        if text[position - back] != tokens[-back]:
            return back - 1
    return most


class OwnText:
    """Drafts from prompt and output, where the last two tokens, or else the last one, stood before."""

    def __init__(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """`prompt`: as it is looked up. `tokens`: the request's live list, which begins with as many."""
        self._prompt = prompt
        self._output = GrowingIndex(tokens, max(0, len(prompt) - 2))
        self._texts: tuple[FixedIndex, GrowingIndex] | None = None
        self._followed: tuple[Occurrence, int] | None = None
        """The occurrence that was followed last, and the length of the text then."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        """The draft from the occurrence that agrees longest with the end of `tokens`, the latest of equals."""
        if self._followed is not None:
            # a copy that is still going on need not be looked up again
            (text, position), length = self._followed
            occurrence = text, position + len(tokens) - length
            if occurrence[1] < len(text) and agreement(tokens, occurrence, LONG) >= LONG:
                return Draft(_follow(occurrence, limit), Source.OWN_TEXT, LONG)
        if self._texts is None:  # not before the first draft: a request that ends with its first token needs none
            self._texts = FixedIndex(self._prompt), self._output
        self._followed, occurrences = None, list[Occurrence]()
        for last in (tokens[-2:], tokens[-1:]):
            occurrences = occurrences or [(text.tokens, index) for text in self._texts for index in text.behind(*last)]
        if not occurrences:
            return NOTHING
        agreed = [agreement(tokens, occurrence) for occurrence in occurrences]
        longest = max(agreed)
        equals = [occurrence for occurrence, count in zip(occurrences, agreed, strict=True) if count == longest]
        self._followed = equals[-1], len(tokens)
        ambiguous = len({text[position] for text, position in equals}) > 1
        # several occurrences that go on alike are as good as a longer agreement
        sure = AMBIGUOUS if ambiguous else min(LONG, longest + len(equals) - 1)
        return Draft(_follow(equals[-1], limit), Source.OWN_TEXT, sure)


def _follow(occurrence: Occurrence, limit: int) -> tuple[int, ...]:
    """The `limit` tokens from `occurrence` on; a text that ends before is assumed to repeat itself, as loops do."""
    text, position = occurrence
    return tuple(islice(cycle(text[position : position + limit]), limit))


class EarlierAnswers:
    """Finished answers, to draft from: templates, boilerplate, answers that come again. The oldest are dropped first
    when all take more than `max_bytes`.

    Their namespaces are the prefix cache's, by adapter and cache salt: no tenant may learn of another's text, not
    even by the time that its tokens take.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_tokens = max_bytes // BYTES_PER_TOKEN
        self._answers: deque[tuple[Namespace, tuple[int, ...]]] = deque()
        self._latest: dict[tuple[object, ...], tuple[tuple[int, ...], int]] = {}
        """(namespace, token, token) -> their occurrence in the latest answer."""
        self.num_tokens = 0

    def add(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        """Take in a finished answer. One that is too short to be found, or too long to be kept, is left out."""
        if not 2 < len(tokens) <= self._max_tokens:
            return
        answer = tuple(tokens)
        for position in range(2, len(answer)):
            self._latest[namespace, answer[position - 2], answer[position - 1]] = answer, position
        self._answers.append((namespace, answer))
        self.num_tokens += len(answer)
        while self.num_tokens > self._max_tokens:
            space, oldest = self._answers.popleft()
            for pair in pairwise(oldest):
                occurrence = self._latest.get((space, *pair))
                if occurrence is not None and occurrence[0] is oldest:
                    del self._latest[space, *pair]
            self.num_tokens -= len(oldest)

    def propose(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> Draft:
        """The tokens that followed the last two of `tokens` when these stood in an answer the last time."""
        occurrence = self._latest.get((namespace, *tokens[-2:]))
        if occurrence is None:
            return NOTHING
        answer, position = occurrence
        return Draft(answer[position : position + limit], Source.EARLIER_ANSWER, agreement(tokens, occurrence, LONG))

    def clear(self) -> None:
        """Keep nothing."""
        self._answers.clear()
        self._latest.clear()
        self.num_tokens = 0
