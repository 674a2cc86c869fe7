"""A way to a complete output in bytes, and how it is cut into as few tokens as the vocabulary allows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from asyncengine.grammar.vocabulary import Vocabulary

UNREACHABLE = 1 << 60


class Way:
    """Symbols that lead to a complete output, and how they are cut into the fewest tokens from each position on."""

    def __init__(
        self,
        symbols: list[int],
        vocabulary: Vocabulary,
        costs: list[int] | None = None,
        firsts: list[int] | None = None,
    ) -> None:
        """`costs` and `firsts`: of the last positions, where they are known."""
        self.symbols = symbols
        """Not to be changed."""
        self._vocabulary = vocabulary
        self._costs = costs or [0]
        self._firsts = firsts or []

    def after(self, symbols: list[int], start: int) -> Way:
        """`symbols`, then this way from `start` on. What is known about its cuts is kept."""
        known = max(start, len(self.symbols) - len(self._firsts))
        behind = known - (len(self.symbols) - len(self._firsts))
        return Way([*symbols, *self.symbols[start:]], self._vocabulary, self._costs[behind:], self._firsts[behind:])

    def within(self, start: int, at_most: int) -> bool:
        """From `start` on it takes at most `at_most` tokens. Every byte is one at worst, so most need no cutting."""
        if len(self.symbols) - start <= at_most and self._vocabulary.spells_bytes:
            return True
        return self.cost(start) <= at_most

    def within_from(self, start: int, at_most: int) -> int:
        """The first position from `start` on from which it takes at most `at_most` tokens."""
        self._cut()
        return next(at for at in range(start, len(self._costs)) if self._costs[at] <= at_most)

    def cost(self, start: int) -> int:
        """Tokens from position `start` to the end; `UNREACHABLE` or more if the vocabulary cannot spell it."""
        self._cut()
        return self._costs[start]

    def first(self, start: int) -> int:
        self._cut()
        return self._firsts[start]

    @cached_property
    def tokens(self) -> list[int]:
        """All of them, from the beginning. Not to be changed."""
        found, at = [], 0
        while at < len(self.symbols):
            found.append(self.first(at))
            at += len(self._vocabulary.symbols(found[-1]))
        return found

    def _cut(self) -> None:
        """Fewest tokens to the end, position by position backwards."""
        todo = len(self.symbols) - len(self._firsts)
        if not todo:
            return
        vocabulary, symbols = self._vocabulary, self.symbols
        table, lengths, marks = vocabulary.by_bytes, vocabulary.lengths, vocabulary.marks
        size = min(len(symbols), todo + vocabulary.longest)  # no token reaches further
        costs = [UNREACHABLE] * todo + self._costs
        firsts = [-1] * todo + self._firsts
        data = bytes(symbol if symbol < 256 else 0 for symbol in symbols[:size])
        stop = next((at for at in range(todo, size) if symbols[at] >= 256), size)  # the end of the run of plain bytes
        for at in range(todo - 1, -1, -1):
            if symbols[at] >= 256:
                costs[at], firsts[at], stop = costs[at + 1] + 1, marks[symbols[at] - 256], at
                continue
            first = table.get(data[at : at + 1], -1)
            best = UNREACHABLE if first < 0 else min(costs[at + 1] + 1, UNREACHABLE)
            for length in lengths.get(data[at : at + 2], ()):
                end = at + length
                if end > stop:
                    break
                if costs[end] + 1 < best and (token := table.get(data[at:end])) is not None:
                    best, first = costs[end] + 1, token
            costs[at], firsts[at] = best, first
        self._costs, self._firsts = costs, firsts


def fits(symbols: Sequence[int], vocabulary: Vocabulary, at_most: int) -> bool:
    """Whether `symbols` take at most `at_most` tokens, each as long as the vocabulary has them: an estimate."""
    data = bytes(symbol if symbol < 256 else 0 for symbol in symbols)
    at = taken = 0
    while at < len(data) and taken <= at_most:
        known = vocabulary.lengths.get(data[at : at + 2], ()) if symbols[at] < 256 else ()
        at += next((length for length in reversed(known) if data[at : at + length] in vocabulary.by_bytes), 1)
        taken += 1
    return taken <= at_most


def common(symbols: Sequence[int], path: Sequence[int], at: int) -> int:
    """The length of the common run of `symbols` from its beginning and `path` from `at` on."""
    count = 0
    for symbol in symbols:
        if at + count >= len(path) or path[at + count] != symbol:
            break
        count += 1
    return count
