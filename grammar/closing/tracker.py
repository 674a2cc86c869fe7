"""The position of an output in a shape: for each way to read it, what is open, how often it was repeated, what remains.

Every reading is a chain of places, innermost first, each with the cost of what follows it: so the cost of the nearest
complete output is known after each byte, without looking for it. Readings that have come to the same place are one, and
where a byte leads from a place is found out once for all outputs of a grammar. In what only the library knows, a
matcher of the library for that part alone says what may come.

Where a grammar is read by a lexer, a reading inside a lexeme that can go on rules out all those that have left theirs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from asyncengine.grammar.closing.moves import Link, Moves
from asyncengine.grammar.closing.prices import BLANK, Piece, Prices, Segment
from asyncengine.grammar.closing.search import Effort, completion
from asyncengine.grammar.closing.ways import UNREACHABLE
from asyncengine.grammar.shapes.automata import Words
from asyncengine.grammar.shapes.nodes import (
    Chain,
    Letters,
    Lexeme,
    Literal,
    Mark,
    Opaque,
    Shape,
    Times,
    Unmodelled,
    Unordered,
)

MAX_STEPS = 20_000
"""Steps from place to place that one byte may take, some twenty milliseconds."""
MAX_PLACES = 16_384
"""Places that are kept for outputs to come, some 700 bytes each; those of an output that goes on stay."""
_numbers = itertools.count()
TOGETHER = 128
"""Tokens to the end from which on all that is left is spelled together."""
AHEAD = 64
"""Symbols of a way that are tried where a lexer may read them otherwise."""
TRIED = 4
"""Readings whose way to the end is spelled."""
LEAF_EFFORT = 20_000
"""Effort of one search in what only the library knows, some ten milliseconds."""
MAX_ENDS = 1024
"""Ends of a known text that are tried before it is searched for one: a microsecond each."""
MAX_WAIT = 64
"""Bytes between two searches that find nothing."""


class Lost(Exception):
    """The output can be read in too many ways, or the library gave up. Never leaves the package."""


class Place:
    """A place behind item `index` of a sequence, byte `index` of a text, round `index` of a repetition (from the least
    on all are one where there is no most), the members with the bits `index`, the state `index` of words, or the end
    of a lexeme."""

    __slots__ = ("_prices", "_rest", "index", "inside", "next", "number", "outer", "shape", "spelled")

    def __init__(self, shape: Shape, index: Any, outer: Place | None, prices: Prices) -> None:
        self.shape = shape
        self.index = index
        self.outer = outer
        self.number = next(_numbers)
        """No other place has it, also when this one is gone."""
        self.inside: bool = outer is not None and (outer.inside or isinstance(outer.shape, Lexeme))
        """In the midst of a lexeme."""
        self._prices = prices
        self._rest: int | None = None if outer else 0
        self.spelled: int | None = None
        """`rest` with neighbours spelled together; None: not counted so far."""
        self.next: dict[int, tuple[Standing, Standing]] | None = None
        """None: no symbol came here so far."""

    @property
    def rest(self) -> int:
        """Tokens of the cheapest text from here to the end of the output, as the sum of its parts."""
        if self._rest is None:
            todo: list[Place] = []
            here: Place | None = self
            while here is not None and here._rest is None:
                todo.append(here)
                here = here.outer
            total = (here and here._rest) or 0
            for place in reversed(todo):
                total = place._rest = total + self._prices.rest(place.shape, place.index)
        return self._rest or 0


class Inside:
    """A place inside what only the library knows."""

    __slots__ = ("_known", "_matcher", "_prices", "_wait", "_way", "outer")

    def __init__(
        self,
        prices: Prices,
        matcher: Any,
        outer: Place,
        known: Sequence[int] = (),
        wait: int = 0,
    ) -> None:
        """`matcher`: the library's, not to be moved; `known`: symbols whose ends may lead to its end; `wait`: symbols
        until it is worth to search for some."""
        self._prices = prices
        self._matcher = matcher
        self._known = known
        self._wait = wait
        self._way: Sequence[int] | None = None
        self.outer = outer

    @property
    def inside(self) -> bool:
        return self.outer.inside or isinstance(self.outer.shape, Lexeme)

    @property
    def way(self) -> Sequence[int] | None:
        """Symbols that lead to its end; None if none were found."""
        if self._way is None and self._wait <= 0:
            copy = self._matcher.deep_copy()
            ends = (self._known[begin:] for begin in reversed(range(len(self._known))))
            end = self._prices.speller.vocabulary.end
            self._way = completion(copy, end, itertools.islice(ends, MAX_ENDS), Effort(LEAF_EFFORT))
            self._wait = MAX_WAIT if self._way is None else 0
        return self._way

    @property
    def rest(self) -> int:
        if self.way is None:
            return UNREACHABLE
        return self.outer.rest + sum(
            len(tokens) * times for tokens, times in self._prices.segments(self._prices.said(self.way))
        )

    def on(self, symbol: int) -> Iterator[Place | Inside]:
        """Places behind `symbol`."""
        matcher = self._matcher.deep_copy()
        if not matcher.try_consume_tokens([symbol]):
            matcher.compute_bitmask()  # says what a broken lexer keeps to itself when it refuses
            if matcher.is_error():
                raise Lost
            return
        if matcher.is_accepting():
            yield self.outer
        if not matcher.is_stopped():
            # the longer: of the end that led on from here, the model may leave the beginning, and need it again
            known = max(self._known, self._way or (), key=len)
            yield Inside(self._prices, matcher, self.outer, known, max(0, self._wait - 1))


Standing = tuple[Place | Inside, ...]
"""All readings of what was said: places that have just been reached."""
Position = tuple[int, ...]
"""The numbers of all readings: they keep nothing of a grammar in memory."""


class Tracker:
    """Follows outputs through one shape. Any number of threads may share it."""

    def __init__(self, root: Shape, prices: Prices, leaf: Callable[[Opaque], Any], lexed: bool = False) -> None:
        """`leaf`: a matcher of the library at the beginning of what only it knows; `lexed`: there are lexemes."""
        self._prices = prices
        self._leaf = leaf
        self._known: dict[tuple[int, Any, int], Place] = {}
        self._looked: dict[tuple[Shape, Any], Moves] = {}
        self._steps: dict[tuple[Standing, Sequence[int]], Standing] = {}
        self._lexed = lexed
        self._taken: dict[Standing, Standing] = {}
        self._lazy = lexed and any(isinstance(shape, Lexeme) and shape.lazy for shape in prices.shapes())
        self._end = Place(Chain(()), 0, None, prices)
        self.begin: Standing = (self._place(Chain([root]), -1, self._end),)

    def inside(self, matcher: Any) -> Standing:
        """The standing in a whole that only the library knows, where `matcher` stands."""
        return (Inside(self._prices, matcher, self._end),)

    def cost(self, standing: Standing) -> int:
        """Tokens of the nearest complete output, at most: the sum of its parts."""
        if self._lexed:
            standing = self._open(standing)
        return min([place.rest for place in standing]) if standing else UNREACHABLE

    def nearest(self, standing: Standing) -> tuple[int, Place | Inside]:
        """Tokens of the nearest complete output with neighbours spelled together, and the place it goes on from."""
        found = sorted(self._open(standing), key=lambda place: place.rest)[:TRIED]
        ways = ((self._spelled(place), place) for place in found)
        return min(ways, key=lambda item: item[0], default=(UNREACHABLE, self._end))

    def _open(self, standing: Standing) -> Standing:
        """The readings that count: where there is a lexer, the nearest ones that it lets go on as they want to."""
        if not self._lexed:
            return standing
        known = self._taken.get(standing)
        if known is None:
            if len(self._taken) >= MAX_PLACES:
                self._taken.clear()
            found = sorted(standing, key=lambda place: place.rest)[:TRIED]
            known = self._taken[standing] = tuple(place for place in found if self._takes(standing, place))
        return known

    def _takes(self, standing: Standing, place: Place | Inside) -> bool:
        """Whether all of a standing goes along with what one reading wants."""
        if not 0 < place.rest < UNREACHABLE:
            return place.rest == 0
        symbols = tuple(itertools.islice(self._symbols(place), AHEAD))
        try:
            found = self.step(standing, symbols, Effort(MAX_STEPS))
        except Lost:
            return False
        return found is not None and (len(symbols) == AHEAD or any(one.rest == 0 for one in found))

    def _symbols(self, place: Place | Inside) -> Iterator[int]:
        vocabulary = self._prices.speller.vocabulary
        for piece in self._pieces(place, to_the_end=True):
            if isinstance(piece, bytes):
                yield from piece.replace(BLANK, b"")
            else:
                yield from (symbol for token in piece[0] * piece[1] for symbol in vocabulary.symbols(token))

    def segments(self, place: Place | Inside) -> Iterator[Segment]:
        """Tokens of the output that `nearest` counted."""
        while True:
            yield from self._prices.segments(self._pieces(place, place.rest <= TOGETHER))
            if place.outer is None or place.rest <= TOGETHER:
                return
            place = place.outer

    def _pieces(self, place: Place | Inside, to_the_end: bool) -> Iterator[Piece]:
        """The rest of a place's own shape, or of all of them."""
        here: Place | Inside | None = place
        while here is not None and here.outer is not None:
            if isinstance(here, Inside):
                yield from self._prices.said(here.way or ())
            else:
                own = isinstance(here.shape, (Times, Unordered, Words))
                yield from self._prices.pieces(here.shape, here.index if own else here.index + 1)
            here = here.outer if to_the_end else None

    def _spelled(self, place: Place | Inside) -> int:
        """Tokens from a place to the end. Texts are spelled as a whole within one shape, and near the end over all."""
        total, open_here = 0, list[tuple[Place, int]]()
        here: Place | Inside | None = place
        while here is not None and here.outer is not None:
            if here.rest >= UNREACHABLE:
                return UNREACHABLE
            near = here.rest <= TOGETHER
            known = here.spelled if isinstance(here, Place) else None
            if known is None:
                known = sum(len(tokens) * times for tokens, times in self._prices.segments(self._pieces(here, near)))
                if isinstance(here, Place):
                    open_here.append((here, total))
            else:
                near = True
            total += known
            here = None if near else here.outer
        for above, before in open_here:
            above.spelled = total - before
        return total

    def step(self, standing: Standing, symbols: Sequence[int], effort: Effort) -> Standing | None:
        """Past `symbols`; None if no reading goes on with it. Raises `Lost`."""
        known = self._steps.get((standing, symbols))
        if known is None:
            known = self._walk(standing, symbols, effort)
            if known is None or any(isinstance(place, Inside) for place in (*standing, *known)):
                return known
            if len(self._steps) >= MAX_PLACES:
                self._steps.clear()
            self._steps[standing, symbols] = known
        return known

    def _walk(self, standing: Standing, symbols: Sequence[int], effort: Effort) -> Standing | None:
        at = 0
        while standing and at < len(symbols):
            taken, (first, *others) = 1, standing
            if others:
                found = [self._on(place, symbols[at], effort) for place in standing]
                on = dict.fromkeys(itertools.chain.from_iterable(on for on, _ in found))
                standing = tuple(on or dict.fromkeys(itertools.chain.from_iterable(left for _, left in found)))
            elif isinstance(first, Place) and isinstance(first.shape, Literal):
                taken, standing = self._along(first, symbols[at:])
            else:
                going_on, leaving = self._on(first, symbols[at], effort)
                standing = going_on or leaving
            at += taken
            effort.left -= len(standing)
            if effort.left < 0:
                raise Lost
            if self._lazy:
                standing = tuple(dict.fromkeys(self._lazy_ends(standing, effort))) or standing
        return standing or None

    def _along(self, place: Place, symbols: Sequence[int]) -> tuple[int, Standing]:
        """The number of symbols that a text goes on with, and the place behind them."""
        assert isinstance(place.shape, Literal)
        assert place.outer is not None
        rest = place.shape.data[place.index + 1 :]
        taken = min(len(rest), len(symbols))
        if any(map(operator.ne, rest, symbols)):
            return 0, ()
        ends = taken == len(rest)
        return taken, (place.outer if ends else self._place(place.shape, place.index + taken, place.outer),)

    def _on(self, place: Place | Inside, symbol: int, effort: Effort) -> tuple[Standing, Standing]:
        """Places behind `symbol`: those within the lexeme, and those behind its end."""
        if isinstance(place, Inside):
            found: Standing = tuple(place.on(symbol))
        elif place.outer is not None and isinstance(place.shape, (Literal, Words)):
            found = tuple(self._within(place.shape, place.index, place.outer, symbol))
        else:
            behind = place.next
            if behind is None:
                behind = place.next = {}
            known = behind.get(symbol)
            if known is None:  # `_forget` may come in between
                known = behind[symbol] = self._leave(place, symbol, effort)
            return known
        return (found, ()) if place.inside else ((), found)

    def _leave(self, place: Place, symbol: int, effort: Effort) -> tuple[Standing, Standing]:
        """The same for a place between parts of its shape."""
        going_on, leaving = list[Place | Inside](), list[Place | Inside]()
        behind = going_on if place.inside else leaving
        here = place
        while here.outer is not None:
            moves = self._moves(here.shape, here.index, effort)
            for text, link in moves.texts.get(symbol, ()):
                behind += self._within(text, -1, self._at(link, here.outer), symbol)
            for shape, link in moves.others:
                if not isinstance(shape, Letters) or symbol >= 0x80:
                    behind += self._into(shape, self._at(link, here.outer), symbol)
                elif shape.mask >> symbol & 1:
                    behind.append(self._at(link, here.outer))
            if not moves.ends:
                break
            if isinstance(here.shape, Lexeme):
                behind = leaving
            here = here.outer
        return _once(going_on), _once(leaving)

    def _into(self, shape: Shape, outer: Place, symbol: int) -> Iterable[Place | Inside]:
        """Places behind the first symbol of a shape."""
        if isinstance(shape, Letters):
            tails = shape.tails if symbol >= 0x80 else ()
            found = [self._place(tail, -1, outer) for low, high, tail in tails if low <= symbol <= high]
            return [outer, *found] if shape.mask >> symbol & 1 else found
        if isinstance(shape, Mark):
            return [outer] if shape.symbol == symbol else []
        if isinstance(shape, Opaque):
            return Inside(self._prices, self._leaf(shape), outer, self._prices.sample(shape)).on(symbol)
        return self._within(shape, b"", outer, symbol)

    def _within(self, shape: Shape, index: Any, outer: Place, byte: int) -> list[Place]:
        """Places behind `byte` in a text or in words."""
        if isinstance(shape, Literal):
            if shape.data[index + 1] != byte:
                return []
            return [outer if index + 2 == len(shape.data) else self._place(shape, index + 1, outer)]
        if byte >= 256:
            return []
        assert isinstance(shape, Words)
        state, ended = shape.on(index, byte)
        found = [outer] if ended else []
        return found if state is None else [*found, self._place(shape, state, outer)]

    def _lazy_ends(self, standing: Standing, effort: Effort) -> Iterator[Place]:
        """The ends of lazy lexemes that have been reached: they go on no further."""
        for place in standing:
            if isinstance(place, Inside):
                continue
            here: Place | None = place
            while here is not None and here.inside:
                text = isinstance(here.shape, (Literal, Words))
                ends = not text and self._moves(here.shape, here.index, effort).ends
                here = here.outer if ends else None
            if here is not None and isinstance(here.shape, Lexeme) and here.shape.lazy:
                yield here

    def _moves(self, shape: Shape, index: Any, effort: Effort) -> Moves:
        moves = self._looked.get((shape, index))
        if moves is None:
            if len(self._looked) >= MAX_PLACES:
                self._looked.clear()
            try:
                moves = self._looked[shape, index] = Moves(shape, index, MAX_STEPS)
            except Unmodelled as error:
                raise Lost from error
            effort.left -= moves.steps
        return moves

    def _at(self, link: Link, outer: Place) -> Place:
        """The place behind a move at a place inside `outer`."""
        links = []
        while link is not None:
            links.append(link)
            link = link[2]
        for shape, index, _ in reversed(links):
            outer = self._place(shape, index, outer)
        return outer

    def _place(self, shape: Shape, index: Any, outer: Place) -> Place:
        key = id(shape), index, id(outer)
        place = self._known.get(key)
        if place is None:
            if len(self._known) >= MAX_PLACES:
                self._forget()
            place = self._known[key] = Place(shape, index, outer, self._prices)
        return place

    def _forget(self) -> None:
        """Let go of all places but those of outputs that go on: each leads to those behind it."""
        known, self._known, self._taken, self._steps = self._known, {}, {}, {}
        for place in (*known.values(), *self.begin):
            if isinstance(place, Place):
                place.next = None


def _once(places: list[Place | Inside]) -> Standing:
    return tuple(places if len(places) < 2 else dict.fromkeys(places))
