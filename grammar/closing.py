"""The nearest complete output beside a growing one (contract line 15: budget-aware closing).

`ByteClosing` keeps a known way to the end. Most tokens leave it as it is or shorten it (inside a string the way out
stays `"}`), which a two-microsecond check confirms. After the others it is looked for anew (`search`), but only until
it meets the old one again: a value that was opened is closed, and the rest of the way is what it was. The way is found
in bytes and then cut into as few tokens as the vocabulary allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from asyncengine.grammar.search import Search, Tail, leads
from asyncengine.grammar.vocabulary import Vocabulary

CHECKED = 48
"""Symbols of a long way that are checked where there is budget to spare."""
SCAN = 40
"""Symbols of the known way that may be passed over to meet it again."""
JOINT_RANGE, JOINTS = 96, 6
_DELIMITERS = frozenset(b',}]"')
WALK = 512
"""Symbols a walk may take while an output is generated, where the known way is short."""
SHORT_SEARCH = 4000
SEARCHES = 16
"""Searches of `SHORT_SEARCH` symbols that one output may cause."""
UNREACHABLE = 1 << 60


class ByteClosing:
    """A `Closing` over the byte vocabulary. Belongs to one request."""

    def __init__(self, search: Search, vocabulary: Vocabulary, matcher: Any, way: Way) -> None:
        """`matcher` (owned from here on) stands where `way` begins."""
        self._search = search
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._way = way
        self._at = 0
        self._searches = SEARCHES

    @property
    def cost(self) -> int:
        return self._way.cost(self._at)

    def first(self) -> int:
        if self._at == len(self._way.symbols):
            return self._vocabulary.eos_ids[0]
        return self._way.first(self._at)

    def advance(self, token: int, at_most: int) -> bool:
        matcher = self._matcher
        if token in self._vocabulary.eos_ids:
            return bool(matcher.is_accepting())
        symbols = list(self._vocabulary.symbols(token))
        taken = matcher.try_consume_tokens(symbols)
        if taken != len(symbols):
            matcher.rollback(taken)
            return False
        if self._reach(symbols, at_most):
            return True
        matcher.rollback(len(symbols))
        return False

    def _reach(self, symbols: list[int], at_most: int) -> bool:
        """The matcher has taken `symbols`: is a way of at most `at_most` tokens known from there?"""
        way, matcher = self._way, self._matcher
        shared = _common(symbols, way.symbols, self._at)
        if shared == len(symbols):  # along the known way
            if way.within(self._at + shared, at_most):
                self._at += shared
                return True
        elif matcher.is_accepting():
            self._way, self._at = Way([], self._vocabulary), 0
            return True
        else:
            # the rest of the way, past what the output has said otherwise: another number, another choice
            begin = self._at + shared
            again = (self._at,) if shared else ()
            for start in (begin, *again, *range(begin + 1, min(begin + SCAN, len(way.symbols)))):
                if leads(matcher, self._tail(start, at_most)) and way.within(start, at_most):
                    self._at = start
                    return True
        return self._walk(shared, at_most)

    def _joints(self, begin: int) -> list[int]:
        """Places soon after `begin` where the known way may be met again: at its next delimiters."""
        symbols = self._way.symbols
        near = range(begin, min(begin + JOINT_RANGE, len(symbols)))
        return [begin, *itertools.islice((at for at in near if symbols[at] in _DELIMITERS), JOINTS)]

    def _tail(self, start: int, at_most: int) -> Tail:
        """The known way from `start`, to be checked in full, or only its beginning where there is budget to spare.

        A way that goes wrong further on is found out when the budget gets tighter, in time for another.
        """
        symbols = self._way.symbols
        left = len(symbols) - start
        if left > CHECKED and at_most > 4 * left:
            return Tail(symbols[start : start + CHECKED], False)
        return Tail(symbols[start:], True)

    def _walk(self, shared: int, at_most: int) -> bool:
        """Look for a way of at most `at_most` tokens: any first, then a short one.

        This runs while others wait for the step: the first takes some ten microseconds, the second up to ten
        milliseconds, so an output gets only a few of the second kind.
        """
        old = self._way
        room = max(2 * len(old.symbols), WALK)
        starts = self._joints(self._at + shared)
        walk = self._search.greedy(self._matcher, room, [self._tail(start, at_most) for start in starts])
        if walk is None:
            return False
        way = old.after(walk.symbols, starts[walk.tail]) if walk.tail >= 0 else Way(walk.symbols, self._vocabulary)
        if not way.within(0, at_most):
            if not self._searches:
                return False
            self._searches -= 1
            found = self._search.shortest(self._matcher, room, SHORT_SEARCH)
            way = way if found is None else Way(found, self._vocabulary)
            if not way.within(0, at_most):
                return False
        self._way, self._at = way, 0
        return True


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

    def cost(self, start: int) -> int:
        """Tokens from position `start` to the end; `UNREACHABLE` or more if the vocabulary cannot spell it."""
        self._cut()
        return self._costs[start]

    def first(self, start: int) -> int:
        self._cut()
        return self._firsts[start]

    def _cut(self) -> None:
        """Fewest tokens to the end, position by position backwards."""
        todo = len(self.symbols) - len(self._firsts)
        if not todo:
            return
        vocabulary, symbols = self._vocabulary, self.symbols
        table, longest, marks = vocabulary.by_bytes, vocabulary.longest, vocabulary.marks
        size = len(symbols)
        costs = [UNREACHABLE] * todo + self._costs
        firsts = [-1] * todo + self._firsts
        data = bytes(symbol if symbol < 256 else 0 for symbol in symbols)
        stop = next((at for at in range(todo, size) if symbols[at] >= 256), size)  # the end of the run of plain bytes
        for at in range(todo - 1, -1, -1):
            if symbols[at] >= 256:
                costs[at], firsts[at], stop = costs[at + 1] + 1, marks[symbols[at] - 256], at
                continue
            for end in range(at + 1, min(stop, at + longest) + 1):
                if costs[end] + 1 < costs[at] and (token := table.get(data[at:end])) is not None:
                    costs[at], firsts[at] = costs[end] + 1, token
        self._costs, self._firsts = costs, firsts


def _common(symbols: Sequence[int], path: Sequence[int], at: int) -> int:
    """How many of `symbols` are the next ones of `path` from `at` on."""
    count = 0
    for symbol in symbols:
        if at + count >= len(path) or path[at + count] != symbol:
            break
        count += 1
    return count
