"""Completions of a grammar's states, looked for byte by byte with the grammar library as the oracle.

llguidance can say what may come next and whether the output may end, not how far the end is. So a second matcher of
the same grammar runs over single bytes, where a step costs a microsecond:

* `Search.find` walks towards the end by a fixed order of preference (`walks`); where that leads nowhere, it goes back
  to the places with a choice and walks on from another one (limited discrepancy search, Harvey & Ginsberg 1995).
* `Search.shortest` improves that walk: at each place with a choice it tries the alternatives, each completed greedily
  (the pilot method, Duin & Voss 1999).

What is found is always a real completion, checked by the library itself. It can be longer than the true minimum where
a grammar offers alternatives whose worth shows only after several bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncengine.grammar.choices import BLANK, Choices, preferred
from asyncengine.grammar.vocabulary import Vocabulary
from asyncengine.grammar.walks import Effort, Tail, Walk, Walker, leads

EFFORT = 300_000
"""Effort of the search for a grammar's first way, about a fifth of a second on a worker's thread."""
LONGEST = 400_000
"""Symbols of the longest first way: more than any text that the limits on grammars allow."""
MAX_ALTERNATIVES = 16
"""Choices tried at one place when looking for another or the shortest way."""


class Found(NamedTuple):
    """The outcome of a search for a completion."""

    walk: Walk | None
    path: list[int]
    """The path as far as the first walk came."""
    cut: bool
    """The effort was spent: where nothing was found, there may be something."""
    next_way: int
    """The index of the last way out of free texts that was of use."""


class Search:
    """Finds completions of one grammar's states. Several threads may share it."""

    def __init__(self, vocabulary: Vocabulary, exits: Sequence[bytes] = (), *, prose: bool = False) -> None:
        """`exits`: texts that may end a free text (`samples.ways_out`). `prose`: as for `preferred`."""
        self.end = 256 + len(vocabulary.marks)
        """The symbol that ends an output."""
        self._filler = vocabulary.filler
        self._prose = prose
        self._ways_out = [list(text) for text in exits]
        self._choices: dict[bytes, Choices] = {}

    def choices(self, mask: bytes) -> Choices:
        known = self._choices.get(mask)
        if known is None:
            if len(self._choices) >= 1024:
                self._choices.clear()
            bits = int.from_bytes(mask, "little")
            allowed = [symbol for symbol in range(self.end) if bits >> symbol & 1]
            known = preferred(allowed, self._filler, self._prose)
            self._choices[mask] = known
        return known

    def walker(self, matcher: Any, limit: int, effort: Effort, next_way: int = 0) -> Walker:
        return Walker(self.choices, self._ways_out, matcher, limit, effort, next_way)

    def find(self, matcher: Any, limit: int, effort: Effort, tails: Sequence[Tail] = (), next_way: int = 0) -> Found:
        """A completion of at most `limit` symbols from where `matcher` stands (it is left there), ended where one of
        `tails` leads to the end. `next_way`: as the last search left it."""
        part = effort.part(effort.left - effort.left // 4)
        first = self.walker(matcher, limit, part, next_way)
        walk = first.run(tails)
        effort.regain(part)
        cut = part.left <= 0
        if walk is not None:
            return Found(walk, first.path, cut, first.next_way)
        for done, others in reversed(first.forks):
            for symbol in others[:MAX_ALTERNATIVES]:
                if effort.left <= 0 or matcher.is_error():
                    return Found(None, first.path, True, next_way)
                begin = [*first.path[:done], symbol]
                part = effort.part(1000 + effort.left // MAX_ALTERNATIVES)
                part.left -= done
                taken = matcher.try_consume_tokens(begin)
                rest = self.walker(matcher, limit - len(begin), part).run(tails) if taken == len(begin) else None
                matcher.rollback(taken)
                effort.regain(part)
                cut = cut or part.left <= 0
                if rest is not None:
                    return Found(Walk([*begin, *rest.symbols], rest.tail), first.path, cut, next_way)
        return Found(None, first.path, cut, next_way)

    def shortest(self, matcher: Any, limit: int, effort: Effort) -> list[int] | None:
        """The shortest completion found, of at most `limit` symbols."""
        walk = self.find(matcher, limit, effort).walk
        best = None if walk is None else walk.symbols
        for way in self._ways_out:
            if (best is None or len(way) < len(best)) and leads(matcher, [*way, self.end]):
                best = list(way)
        done = 0
        while best is not None and done < len(best) and effort.left > 0:
            effort.left -= 2
            symbols, free = self.choices(matcher.compute_bitmask())
            if len(symbols) > 1 and not free:
                dense = [symbol for symbol in symbols if symbol not in BLANK] or list(symbols)
                for symbol in dense[:MAX_ALTERNATIVES]:
                    room = len(best) - done - 2
                    if symbol == best[done] or room < 0:
                        continue
                    matcher.consume_token(symbol)
                    rest = self.walker(matcher, room, effort).run()
                    matcher.rollback(1)
                    if rest is not None:
                        best = [*best[:done], symbol, *rest.symbols]
            matcher.consume_token(best[done])
            done += 1
        matcher.rollback(done)
        return best
