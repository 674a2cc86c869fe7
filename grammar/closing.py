"""The nearest complete output beside a growing one (contract line 15: budget-aware closing).

`ByteClosing` keeps a known way to the end. Most tokens leave it as it is or shorten it (inside a string the way out
stays `"}`), which a two-microsecond check confirms. After the others it is looked for anew (`search`), but only until
it meets the old one again: a value that was opened is closed, and the rest of the way is what it was. How far a way
may lead follows from the budget that is left; how long one is looked for, from an account that each output has.

Where the account does not suffice, nobody knows whether there is a way. A token is not forbidden for that while the
budget is far from spent: the output goes on, and the way is looked for now and then, longer each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from asyncengine.errors import GrammarError
from asyncengine.grammar.search import Search
from asyncengine.grammar.vocabulary import Vocabulary
from asyncengine.grammar.walks import Effort, Tail, leads
from asyncengine.grammar.ways import UNREACHABLE, Way, common, fits

if TYPE_CHECKING:
    from asyncengine.grammar.llguidance_backend import LlgTemplate

SCAN = 40
"""Symbols of the known way that may be passed over to meet it again."""
JOINT_RANGE, JOINTS = 96, 6
FAR = 256
"""Tokens left, beyond twice those of the way known so far, with which the end is far."""
LAST = (FAR, FAR // 4)
"""Tokens left at which a search gets half its account again, if no way is known yet."""
ACCOUNT = 300_000
"""Symbols that searches for one output may step over, some 150 ms in all, and what each token adds to it and
may take at least (a twentieth of a millisecond and a half)."""
REFILL, LEAST = 100, 1_000
SEEK, SHORTEN = 40_000, 4_000
"""Symbols of one search: for any way, some twenty milliseconds at worst; for a shorter one."""
PAUSE = 64
"""Most tokens between two searches where no way is known."""
HEALS = 2
_DELIMITERS = frozenset(b',}]"')


class ByteClosing:
    """The same as a `CountedClosing`, by a search over bytes. Belongs to one request."""

    def __init__(self, source: LlgTemplate, search: Search, vocabulary: Vocabulary, matcher: Any, way: Way) -> None:
        """`matcher` (owned from here on, though others may share its lexer) stands where `way` begins."""
        self._source = source
        self._search = search
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._way: Way | None = way
        self._lost = way
        """The last way known, where none is: it may be met again."""
        self._at = 0
        self._next_way = 0
        self._said: list[int] = []
        self._account = Effort(ACCOUNT)
        self._heals = HEALS
        self._pause = self._waited = 0

    @property
    def cost(self) -> int:
        return UNREACHABLE if self._way is None else self._way.cost(self._at)

    def first(self) -> int:
        way = self._way
        if way is None:
            raise GrammarError("grammar", "no way to a complete output was found in time")
        return self._vocabulary.eos_ids[0] if self._at == len(way.symbols) else way.first(self._at)

    def advance(self, token: int, at_most: int) -> bool:
        if token in self._vocabulary.eos_ids:
            return bool(self._matcher.is_accepting())
        symbols = list(self._vocabulary.symbols(token))
        if not self._follow(symbols):
            return False
        self._account.left = min(ACCOUNT, self._account.left + REFILL)
        reached = self._reach(symbols, at_most)
        while self._matcher.is_error():  # met while searching, or somebody else's
            self._heal()
            reached = self._reach(symbols, at_most)
        if reached:
            return True
        del self._said[len(self._said) - len(symbols) :]
        self._matcher.rollback(len(symbols))
        return False

    def catch_up(self, symbols: list[int], at_most: int) -> None:
        """The output has said `symbols` since this was made. Raises `GrammarError` if the library cannot follow."""
        if not self._follow(symbols):
            raise GrammarError("grammar", "the output is not one of the grammar's")
        way = self._way
        if way is not None and symbols and not self._seek(way, 0, at_most):
            self._way, self._lost, self._pause, self._waited = None, way, 1, 0

    # ---------------------------------------------------------------- where the output stands

    def _follow(self, symbols: list[int]) -> bool:
        taken = self._matcher.try_consume_tokens(symbols)
        if taken != len(symbols) and self._is_broken():
            self._heal()
            taken = self._matcher.try_consume_tokens(symbols)
            if taken != len(symbols) and self._is_broken():
                raise self._source.broken(self._matcher)
        if taken != len(symbols):
            self._matcher.rollback(taken)
            return False
        self._said += symbols
        return True

    def _is_broken(self) -> bool:
        """A limit was hit, by this matcher or by one that shares its lexer: those refuse whatever they are given, and
        say why only when they are asked for a mask."""
        self._matcher.compute_bitmask()
        return bool(self._matcher.is_error())

    def _heal(self) -> None:
        """Go the same way again with a matcher that shares its lexer with nobody, and search less with it."""
        self._source.spoil()
        self._heals -= 1
        if self._heals < 0:
            raise self._source.broken(self._matcher)
        self._account.left //= 8
        self._matcher = self._source.own_bytes()
        if self._matcher.try_consume_tokens(self._said) != len(self._said):
            raise self._source.broken(self._matcher)

    # ---------------------------------------------------------------- the way from there

    def _reach(self, symbols: list[int], at_most: int) -> bool:
        """The matcher has taken `symbols`: is a way of at most `at_most` tokens known from there, or may the output go
        on without?"""
        way, matcher = self._way, self._matcher
        if way is None:
            if not self._meet(self._lost, 0, at_most):
                self._look_again(at_most)
            return True
        shared = common(symbols, way.symbols, self._at)
        if shared == len(symbols):  # along the known way
            start = self._at + shared
            if way.within(start, at_most):
                self._at = start
                return True
        elif matcher.is_accepting():
            self._set(Way([], self._vocabulary))
            return True
        elif self._meet(way, shared, at_most):
            return True
        return self._seek(way, shared, at_most)

    def _meet(self, way: Way, shared: int, at_most: int) -> bool:
        """Go on along `way` where it can be met again."""
        for start in self._meetings(way, shared, at_most):
            if way.within(start, at_most) and self._leads(way, start):
                self._way, self._at = way, start
                return True
        return False

    def _meetings(self, way: Way, shared: int, at_most: int) -> Iterator[int]:
        """Indices at which the known way may be met again, past what the output has said otherwise: another number,
        another choice; or as much of a long text as the output has said in other words."""
        begin = self._at + shared
        yield begin
        if shared:
            yield self._at
        if len(way.symbols) - begin > SCAN and not way.within(begin, at_most):
            yield way.within_from(begin, at_most)
        yield from range(begin + 1, min(begin + SCAN, len(way.symbols)))

    def _set(self, way: Way) -> None:
        self._way, self._at = way, 0

    def _leads(self, way: Way, start: int) -> bool:
        return leads(self._matcher, self._tail(way, start))

    def _tail(self, way: Way, start: int) -> Tail:
        return [*way.symbols[start:], self._search.end]

    def _joints(self, way: Way, begin: int) -> list[int]:
        """Places soon after `begin` where the known way may be met again: at its next delimiters."""
        symbols = way.symbols
        near = range(begin, min(begin + JOINT_RANGE, len(symbols)))
        return [begin, *itertools.islice((at for at in near if symbols[at] in _DELIMITERS), JOINTS)]

    def _seek(self, old: Way, shared: int, at_most: int) -> bool:
        """Look for a way of at most `at_most` tokens: any first, then a short one.

        This runs while others wait for the step. Most searches take some ten microseconds.
        """
        starts = self._joints(old, self._at + shared)
        found, surely = self._find(at_most, SEEK, old, starts)
        if found is not None and not found.within(0, at_most):
            effort = self._spend(SHORTEN)
            shorter = self._search.shortest(self._matcher, self._room(at_most), effort)
            self._account.regain(effort)
            found = None if shorter is None else Way(shorter, self._vocabulary)
            surely = True  # what is known of it is that it is too long
        if found is not None and found.within(0, at_most):
            self._set(found)
            return True
        if surely or at_most < FAR + 2 * old.cost(self._at) or self._matcher.is_error():
            return False
        self._way, self._lost, self._pause, self._waited = None, old, 1, 0
        return True

    def _find(self, at_most: int, amount: int, old: Way | None, starts: Sequence[int]) -> tuple[Way | None, bool]:
        """A way from here that may be longer than `at_most`; and, where there is none, whether that is sure."""
        if not self._heals:  # searching broke what it searched with, twice
            return None, self._is_broken()
        tails = [] if old is None else [self._tail(old, start) for start in starts]
        effort = self._spend(amount)
        room = self._room(at_most)
        walk, path, cut, self._next_way = self._search.find(self._matcher, room, effort, tails, self._next_way)
        self._account.regain(effort)
        if walk is None:
            return None, not self._is_broken() and (not cut or not fits(path, self._vocabulary, at_most))
        if old is None or walk.tail < 0:
            return Way(walk.symbols, self._vocabulary), True
        return old.after(walk.symbols, starts[walk.tail]), True

    def _spend(self, amount: int) -> Effort:
        return self._account.part(max(LEAST, min(amount, self._account.left)))

    def _room(self, at_most: int) -> int:
        """Symbols of the longest way that `at_most` tokens can spell."""
        return max(at_most, 0) * max(1, self._vocabulary.longest)

    def _look_again(self, at_most: int) -> None:
        """No way is known: look for one now and then, longer each time."""
        if self._matcher.is_accepting():
            self._set(Way([], self._vocabulary))
            return
        self._waited += 1
        if self._waited < self._pause and at_most not in LAST:
            return
        self._waited, self._pause = 0, min(PAUSE, 2 * self._pause)
        if at_most in LAST:
            self._account.left = max(self._account.left, ACCOUNT // 2)
        found, _ = self._find(at_most, SEEK * self._pause, None, ())
        if found is not None and found.within(0, at_most):
            self._set(found)
