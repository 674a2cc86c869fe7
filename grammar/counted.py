"""The nearest complete output of a grammar that counts, by arithmetic in place of a search.

`CountedClosing` follows the output through the grammar's shape (`tracker`), which knows after each byte what the rest
costs at least, however long it is: a token is taken if that still fits. Tokens to steer by are made one at a time, and
what comes next of them is checked by the library. Where the output goes where the shape says nothing, or the library
says otherwise, a `ByteClosing` takes over for good.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from asyncengine.grammar.closing import ByteClosing
from asyncengine.grammar.prices import Prices
from asyncengine.grammar.schema_shapes import shape_of
from asyncengine.grammar.shapes import Shape, Unmodelled
from asyncengine.grammar.spec import Grammar
from asyncengine.grammar.tracker import Lost, Tracker
from asyncengine.grammar.vocabulary import Vocabulary
from asyncengine.grammar.ways import UNREACHABLE

COUNTED = 4
"""Tokens of one repetition from which on counting is worth it: shorter ones are found as soon by searching."""
AHEAD = 64
"""Tokens of a way that are checked by the library."""


class Counted:
    """The common part of all outputs of one grammar: its shape and the prices in it."""

    def __init__(self, shape: Shape, prices: Prices) -> None:
        self.shape = shape
        self.prices = prices

    @classmethod
    def of(cls, grammar: Grammar, vocabulary: Vocabulary) -> Counted | None:
        """None for a grammar that does not count far, or whose shape is unknown."""
        shape = shape_of(grammar)
        if shape is None:
            return None
        try:
            prices = Prices(shape, vocabulary)
        except Unmodelled:
            return None
        return cls(shape, prices) if prices.counts >= COUNTED and prices.cost(shape) < UNREACHABLE else None

    def tokens(self) -> list[int]:
        """Tokens of the cheapest output."""
        return list(self.prices.tokens(self.shape))


class Source(Protocol):
    def new_bytes(self) -> Any:
        """A matcher over bytes, at the beginning; others may share its lexer."""
        ...

    def spoil(self) -> None: ...


class CountedClosing:
    """A `Closing`. Belongs to one request."""

    def __init__(
        self,
        source: Source,
        counted: Counted,
        vocabulary: Vocabulary,
        tokens: list[int],
        searching: Callable[[], ByteClosing],
    ) -> None:
        """`tokens`: a complete output, checked. `searching` makes what takes over, at the beginning of the output."""
        self._source = source
        self._vocabulary = vocabulary
        self._prices = counted.prices
        self._tracker = Tracker(counted.shape, counted.prices)
        self._standing = self._tracker.begin
        self._said = bytearray()
        self._searching = searching
        self._other: ByteClosing | None = None
        self._matcher: Any = None
        """Behind the first `_checked` bytes that were said; None: not needed so far."""
        self._checked = 0
        self._trusted = False
        """The library failed: what the shape says has to do."""
        self._plan: Iterator[int] | None = iter(tokens[1:])
        """Behind the next token of the way known; None: it has to be made."""
        self._next: int | None = tokens[0] if tokens else None
        self._left = len(tokens)
        """Tokens of the way."""

    @property
    def cost(self) -> int:
        if self._other is not None:
            return self._other.cost
        return self._left if self._plan is not None else self._tracker.cost(self._standing)

    def first(self) -> int:
        if self._other is None and not self._planned():
            self._search(self._left)
        if self._other is not None:
            return self._other.first()
        return self._vocabulary.eos_ids[0] if self._next is None else self._next

    def advance(self, token: int, at_most: int) -> bool:
        if self._other is not None:
            return self._other.advance(token, at_most)
        if token in self._vocabulary.eos_ids:
            return self.cost == 0
        data = bytes(self._vocabulary.symbols(token)) if token not in self._vocabulary.special_ids else b""
        try:
            standing = self._tracker.step(self._standing, data) if data else None
        except Lost:
            standing = None
        if standing is None:
            return self._search(at_most + 1).advance(token, at_most)
        if self._plan is not None and token == self._next and self._left - 1 <= at_most:
            self._next = next(self._plan, None)
            self._left -= 1
        elif self._tracker.cost(standing) <= at_most:
            self._plan = None
        elif not self._prices.opaque and self._planned():
            return False
        else:
            return self._search(at_most + 1).advance(token, at_most)
        self._standing = standing
        self._said += data
        return True

    def _planned(self) -> bool:
        """See that there are tokens to steer by. False: the library does not agree with them."""
        if self._plan is not None:
            return True
        tokens = self._tracker.tokens(self._standing)
        ahead = list(itertools.islice(tokens, AHEAD))
        if not self._agreed(ahead):
            return False
        self._left = self._tracker.cost(self._standing)
        self._plan = itertools.chain(ahead, tokens)
        self._next = next(self._plan, None)
        return True

    def _agreed(self, ahead: list[int]) -> bool:
        if self._trusted:
            return True
        if self._matcher is None:
            self._matcher = self._source.new_bytes()
        matcher, behind = self._matcher, list(self._said[self._checked :])
        symbols = [symbol for token in ahead for symbol in self._vocabulary.symbols(token)]
        taken = matcher.try_consume_tokens(behind)
        self._checked += taken
        agreed = taken == len(behind) and matcher.validate_tokens(symbols) == len(symbols)
        if not agreed:
            matcher.compute_bitmask()  # says what a broken lexer keeps to itself when it refuses
            if matcher.is_error():
                self._source.spoil()
                self._trusted = True
                return True
        return bool(agreed)

    def _search(self, at_most: int) -> ByteClosing:
        """From now on look for ways."""
        self._other = self._searching()
        self._other.catch_up(list(self._said), at_most)
        return self._other
