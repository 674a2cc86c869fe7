"""The nearest complete output beside a growing one (contract line 15: budget-aware closing).

`ByteClosing` keeps a known way to the end. Most tokens leave it as it is or shorten it (inside a string the way out
stays `"}`), which a two-microsecond check confirms; after the others it is looked for anew (`search`). The way is found
in bytes and then cut into as few tokens as the vocabulary allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncengine.grammar.search import Search, completes
from asyncengine.grammar.vocabulary import Vocabulary

WALK = 512
"""Symbols a walk may take while an output is generated, where the known way is short."""
SHORT_SEARCH = 4000
SEARCHES = 16
"""Searches of `SHORT_SEARCH` symbols that one output may cause."""


class ByteClosing:
    """A `Closing` over the byte vocabulary. Belongs to one request."""

    def __init__(self, search: Search, vocabulary: Vocabulary, matcher: Any, path: list[int]) -> None:
        """`matcher` (owned from here on) stands where `path` begins."""
        self._search = search
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._path = path
        self._at = 0
        self._cuts: Cuts | None = None
        self._searches = SEARCHES

    @property
    def cost(self) -> int:
        return self._cut().cost(self._at)

    def first(self) -> int:
        if self._at == len(self._path):
            return self._vocabulary.eos_ids[0]
        return self._cut().first(self._at)

    def advance(self, token: int, at_most: int) -> bool:
        if token in self._vocabulary.eos_ids:
            return bool(self._matcher.is_accepting())
        symbols = list(self._vocabulary.symbols(token))
        shared = _common(symbols, self._path, self._at)
        matcher = self._matcher
        taken = matcher.try_consume_tokens(symbols)
        if taken != len(symbols):
            matcher.rollback(taken)
            return False
        if shared == len(symbols):  # along the known way
            if self._within(self._path, self._at + shared, at_most):
                self._at += shared
                return True
        elif matcher.is_accepting():
            return self._take([])
        else:
            for start in (self._at + shared, self._at):
                rest = self._path[start:]
                if completes(matcher, rest) and self._within(self._path, start, at_most):
                    self._at = start
                    return True
        if self._walk(at_most):
            return True
        matcher.rollback(len(symbols))
        return False

    def _walk(self, at_most: int) -> bool:
        """Look for a way of at most `at_most` tokens: any first, then a short one.

        This runs while others wait for the step: the first takes half a millisecond, the second up to ten, so an
        output gets only a few of the second kind.
        """
        room = max(2 * len(self._path), WALK)
        found = self._search.greedy(self._matcher, room)
        if found is None:
            return False
        if not self._fits(found, at_most):
            if not self._searches:
                return False
            self._searches -= 1
            found = self._search.shortest(self._matcher, room, SHORT_SEARCH) or found
            if not self._fits(found, at_most):
                return False
        return self._take(found)

    def _take(self, path: list[int]) -> bool:
        self._path, self._at, self._cuts = path, 0, None
        return True

    def _within(self, path: list[int], start: int, at_most: int) -> bool:
        # every byte is a token at worst, so most questions need no cutting
        if len(path) - start <= at_most and self._vocabulary.spells_bytes:
            return True
        return self._cut().cost(start) <= at_most

    def _fits(self, path: list[int], at_most: int) -> bool:
        if len(path) <= at_most and self._vocabulary.spells_bytes:
            return True
        return Cuts(path, self._vocabulary).cost(0) <= at_most

    def _cut(self) -> Cuts:
        if self._cuts is None:
            self._cuts = Cuts(self._path, self._vocabulary)
        return self._cuts


class Cuts:
    """A path cut into the fewest tokens, from each of its positions to its end."""

    def __init__(self, path: Sequence[int], vocabulary: Vocabulary) -> None:
        size = len(path)
        self._costs = [0] * (size + 1)
        self._first = [-1] * size
        table, longest, marks = vocabulary.by_bytes, vocabulary.longest, vocabulary.marks
        data = bytes(symbol if symbol < 256 else 0 for symbol in path)
        stop = size  # where the run of plain bytes around `at` ends
        for at in range(size - 1, -1, -1):
            best, chosen = UNREACHABLE, -1
            if path[at] >= 256:
                best, chosen, stop = self._costs[at + 1] + 1, marks[path[at] - 256], at
            else:
                for end in range(at + 1, min(stop, at + longest) + 1):
                    if self._costs[end] + 1 < best:
                        token = table.get(data[at:end])
                        if token is not None:
                            best, chosen = self._costs[end] + 1, token
            self._costs[at], self._first[at] = best, chosen

    def cost(self, at: int) -> int:
        """Tokens from position `at` to the end; `UNREACHABLE` if the vocabulary cannot spell it."""
        return self._costs[at]

    def first(self, at: int) -> int:
        return self._first[at]


UNREACHABLE = 1 << 60


def _common(symbols: Sequence[int], path: Sequence[int], at: int) -> int:
    """How many of `symbols` are the next ones of `path` from `at` on."""
    count = 0
    for symbol in symbols:
        if at + count >= len(path) or path[at + count] != symbol:
            break
        count += 1
    return count
