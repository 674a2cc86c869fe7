"""The position of an output in a shape: for each way to read it, what is open, how often it was repeated, what remains.

Every reading is a chain of places, innermost first, each with the cost of what follows it: so the cost of the nearest
complete output is known after each byte, without looking for it. Readings that have come to the same place are one, and
where a byte leads from a place is found out once for all outputs of a grammar. In what only the library knows, a
matcher of the library for that part alone says what may come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from asyncengine.grammar.automata import Words
from asyncengine.grammar.prices import Piece, Prices, Segment
from asyncengine.grammar.search import Search
from asyncengine.grammar.shapes import Chain, Either, Letters, Literal, Opaque, Shape, Times, Unordered
from asyncengine.grammar.walks import Effort, leads
from asyncengine.grammar.ways import UNREACHABLE

MAX_STEPS = 20_000
"""Steps from place to place that one byte may take, some twenty milliseconds."""
MAX_PLACES = 4096
"""Places that are kept for outputs to come; those of an output that goes on stay."""
TOGETHER = 128
"""Tokens to the end from which on all that is left is spelled together."""
TRIED = 4
"""Readings whose way to the end is spelled."""
LEAF_EFFORT = 20_000
"""Effort of one search in what only the library knows, some ten milliseconds."""
GUESSES = 4
"""Known texts that are tried before it is searched for one."""
MAX_WAIT = 64
"""Bytes between two searches that find nothing."""


class Lost(Exception):
    """The output can be read in too many ways, or the library gave up. Never leaves the package."""


class Place:
    """A place behind item `index` of a sequence, byte `index` of a text, round `index` of a repetition (from the least
    on all are one where there is no most), the members with the bits `index`, or the state `index` of words."""

    __slots__ = ("_prices", "_rest", "index", "moves", "next", "outer", "shape", "spelled")

    def __init__(self, shape: Shape, index: Any, outer: Place | None, prices: Prices) -> None:
        self.shape = shape
        self.index = index
        self.outer = outer
        self._prices = prices
        self._rest: int | None = None if outer else 0
        self.spelled: int | None = None
        """`rest` with neighbours spelled together; None: not counted so far."""
        self.moves: Moves | None = None
        """None: not asked so far."""
        self.next: dict[int, tuple[Place | Inside, ...]] = {}

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


Moves = dict[int, list[tuple[Shape, Place]]]
"""The shapes that may come next, with the place behind each: texts by their first byte, all others by `ANY`."""
ANY = -1


class Leaf(NamedTuple):
    """A language that only the library knows: a matcher at its beginning, not to be moved, and a search in it."""

    matcher: Any
    search: Search


class Inside:
    """A place inside what only the library knows."""

    __slots__ = ("_guesses", "_leaf", "_matcher", "_prices", "_wait", "_way", "outer")

    def __init__(
        self, leaf: Leaf, prices: Prices, matcher: Any, outer: Place, guesses: Sequence[bytes], wait: int
    ) -> None:
        """`guesses`: texts that may lead to its end; `wait`: bytes until it is worth to search for one."""
        self._leaf = leaf
        self._prices = prices
        self._matcher = matcher
        self._guesses = guesses
        self._wait = wait
        self._way: bytes | None = None
        self.outer = outer

    @property
    def way(self) -> bytes | None:
        """A text that leads to its end; None if none was found."""
        if self._way is None and self._wait <= 0:
            self._way = self._found()
            self._wait = MAX_WAIT if self._way is None else 0
        return self._way

    def _found(self) -> bytes | None:
        copy = self._matcher.deep_copy()
        for guess in self._guesses:
            if leads(copy, [*guess, self._leaf.search.end]):
                return guess
        walk = self._leaf.search.find(copy, LEAF_EFFORT, Effort(LEAF_EFFORT)).walk
        return None if walk is None else bytes(walk.symbols)

    @property
    def rest(self) -> int:
        way = self.way
        if way is None:
            return UNREACHABLE
        return self.outer.rest + sum(len(tokens) * times for tokens, times in self._prices.segments([way]))

    def on(self, byte: int) -> Iterator[Place | Inside]:
        """Places behind `byte`."""
        matcher = self._matcher.deep_copy()
        if not matcher.try_consume_tokens([byte]):
            matcher.compute_bitmask()  # says what a broken lexer keeps to itself when it refuses
            if matcher.is_error():
                raise Lost
            return
        if matcher.is_accepting():
            yield self.outer
        if not matcher.is_stopped():
            known = self._guesses if self._way is None else [self._way]
            guesses = dict.fromkeys([*(guess[1:] for guess in known if guess[:1] == bytes([byte])), *known])
            wait = max(0, self._wait - 1)
            yield Inside(self._leaf, self._prices, matcher, self.outer, list(guesses)[:GUESSES], wait)


Standing = tuple[Place | Inside, ...]
"""All readings of what was said: places that have just been reached."""


class Tracker:
    """Follows outputs through one shape. Any number of threads may share it."""

    def __init__(self, root: Shape, prices: Prices, leaf: Callable[[Opaque], Leaf]) -> None:
        """`leaf`: how to follow what only the library knows."""
        self._prices = prices
        self._leaf = leaf
        self._known: dict[tuple[int, Any, int], Place] = {}
        self._end = Place(Chain(()), 0, None, prices)
        self.begin: Standing = (self._place(Chain([root]), -1, self._end),)

    def cost(self, standing: Standing) -> int:
        """Tokens of the nearest complete output, at most: the sum of its parts."""
        return min(place.rest for place in standing)

    def nearest(self, standing: Standing) -> tuple[int, Place | Inside]:
        """Tokens of the nearest complete output with neighbours spelled together, and the place it goes on from."""
        found = sorted(standing, key=lambda place: place.rest)[:TRIED]
        return min(((self._spelled(place), place) for place in found), key=lambda item: item[0])

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
                yield here.way or b""
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

    def step(self, standing: Standing, data: bytes, effort: Effort) -> Standing | None:
        """Past `data`; None if no reading goes on with it. Raises `Lost`."""
        for byte in data:
            found: dict[Place | Inside, None] = {}
            for place in standing:
                if isinstance(place, Inside):
                    following = tuple(place.on(byte))
                elif byte in place.next:
                    following = place.next[byte]
                else:
                    following = place.next[byte] = tuple(self._on(place, byte, effort))
                for item in following:
                    found[item] = None
            effort.left -= len(standing)
            if not found:
                return None
            if effort.left < 0:
                raise Lost
            standing = tuple(found)
        return standing

    def _on(self, place: Place, byte: int, effort: Effort) -> Iterator[Place | Inside]:
        if place.outer is not None and isinstance(place.shape, (Literal, Words)):
            yield from self._within(place.shape, place.index, place.outer, byte)
            return
        if place.moves is None:
            place.moves = self._look(place, effort)
        for shape, outer in place.moves.get(byte, ()):
            yield from self._within(shape, -1, outer, byte)
        for shape, outer in place.moves.get(ANY, ()):
            if isinstance(shape, Letters):
                if shape.mask >> byte & 1:
                    yield outer
                for low, high, tail in shape.tails if byte >= 0x80 else ():
                    if low <= byte <= high:
                        yield self._place(tail, -1, outer)
            elif isinstance(shape, Opaque):
                leaf = self._leaf(shape)
                yield from Inside(leaf, self._prices, leaf.matcher, outer, self._prices.samples(shape), 0).on(byte)
            else:
                yield from self._within(shape, b"", outer, byte)

    def _within(self, shape: Shape, index: Any, outer: Place, byte: int) -> Iterator[Place]:
        """Places behind `byte` in a text or in words."""
        if isinstance(shape, Literal):
            if shape.data[index + 1] == byte:
                last = index + 2 == len(shape.data)
                yield outer if last else self._place(shape, index + 1, outer)
        elif isinstance(shape, Words):
            state, ended = shape.on(index, byte)
            if ended:
                yield outer
            if state is not None:
                yield self._place(shape, state, outer)

    def _look(self, place: Place, effort: Effort) -> Moves:
        seen: set[tuple[Shape | None, Place]] = {(None, place)}
        found: Moves = {}
        for shape, outer in (todo := list(seen)):  # grows while it is walked
            if isinstance(shape, Literal):
                found.setdefault(shape.data[0], []).append((shape, outer))
                continue
            if isinstance(shape, (Letters, Opaque, Words)):
                found.setdefault(ANY, []).append((shape, outer))
                empty = isinstance(shape, Words) and b"" in shape.words[:1]
                steps: list[tuple[Shape | None, Place]] = [(None, outer)] if empty else []
            elif shape is not None:
                steps = self._following(shape, -1 if isinstance(shape, Chain) else 0, outer)
            elif outer.outer is not None:
                steps = self._following(outer.shape, outer.index, outer.outer)
            else:
                continue
            for step in steps:
                if step not in seen:
                    seen.add(step)
                    todo.append(step)
            if len(todo) > MAX_STEPS:
                raise Lost
        effort.left -= len(todo)
        return found

    def _following(self, shape: Shape, index: int, outer: Place) -> list[tuple[Shape | None, Place]]:
        """Shapes that follow a place; those that a shape begins with follow its first one."""
        if isinstance(shape, Chain):
            at, size = index + 1, len(shape.items)
            if at >= size:
                return [(None, outer)]
            return [(shape.items[at], outer if at + 1 == size else self._place(shape, at, outer))]
        if isinstance(shape, Either):
            return [(item, outer) for item in shape.items]
        if isinstance(shape, Unordered):
            members = [(item, self._place(shape, said, outer)) for item, said in shape.following(index)]
            return [*members, (None, outer)] if index and not shape.left(index) else [*members]
        assert isinstance(shape, Times)
        found: list[tuple[Shape | None, Place]] = [(None, outer)] if index >= shape.least else []
        if shape.most is None or index < shape.most:
            counted = index + 1 if shape.most is not None else min(index + 1, shape.least)
            found.append((shape.body, self._place(shape, counted, outer)))
        return found

    def _place(self, shape: Shape, index: Any, outer: Place) -> Place:
        key = id(shape), index, id(outer)
        place = self._known.get(key)
        if place is None:
            if len(self._known) >= MAX_PLACES:
                self._known.clear()
            place = self._known[key] = Place(shape, index, outer, self._prices)
        return place
