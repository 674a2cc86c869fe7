"""The position of an output in a shape: for each way to read it, what is open, how often it was repeated, what remains.

Every reading is a chain of places, innermost first, each with the cost of what follows it: so the cost of the nearest
complete output is known after each byte, without looking for it. Readings that have come to the same place are one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakValueDictionary

from asyncengine.grammar.prices import Prices
from asyncengine.grammar.shapes import Chain, Either, Letters, Named, Opaque, Shape, Times

MAX_STEPS = 20_000
"""Steps from place to place that one token may take, some twenty milliseconds."""
ACCOUNT, REFILL = 200_000, 100
"""The account of all readings of one output at first, and its growth by each byte."""


class Lost(Exception):
    """The output is where the shape says nothing, or can be read in too many ways. Never leaves the package."""


class Place:
    """Behind item `index` of a sequence, or behind round `index` of a repetition (from the least on all are one where
    there is no most). None in place of one: behind everything."""

    __slots__ = ("__weakref__", "index", "outer", "rest", "shape")

    def __init__(self, shape: Chain | Times, index: int, outer: Place | None, rest: int) -> None:
        self.shape = shape
        self.index = index
        self.outer = outer
        self.rest = rest
        """Tokens of the cheapest text from here to the end of the output."""


class Standing(NamedTuple):
    """All readings of what was said: places that have just been reached."""

    places: tuple[Place | None, ...]
    start: bool = False
    """Nothing was said yet."""


class Tracker:
    """Follows outputs through one shape. Keeps nothing about them but places that are alive."""

    def __init__(self, root: Shape, prices: Prices) -> None:
        self._root = root
        self._prices = prices
        self._known: WeakValueDictionary[tuple[int, int, int], Place] = WeakValueDictionary()
        self._account = ACCOUNT
        self.begin = Standing((), start=True)

    def cost(self, standing: Standing) -> int:
        """Tokens of the nearest complete output."""
        if standing.start:
            return self._prices.cost(self._root)
        return min(0 if place is None else place.rest for place in standing.places)

    def tokens(self, standing: Standing) -> Iterator[int]:
        """Tokens of the nearest complete output, `cost` of them."""
        if standing.start:
            yield from self._prices.tokens(self._root)
            return
        place = min(standing.places, key=lambda place: 0 if place is None else place.rest)
        while place is not None:
            shape = place.shape
            if isinstance(shape, Times):
                yield from self._prices.times_tokens(shape, shape.least - place.index)
            else:
                yield from self._prices.suffix_tokens(shape, place.index + 1)
            place = place.outer

    def step(self, standing: Standing, data: bytes) -> Standing | None:
        """Past `data`; None if no reading goes on with it. Raises `Lost`."""
        self._account = min(ACCOUNT, self._account + REFILL * len(data))
        least = max(0, self._account - MAX_STEPS)
        for byte in data:
            found: dict[Place | None, None] = {}
            for letters, outer in self._letters(standing):
                if letters.mask >> byte & 1:
                    found[outer] = None
                elif byte >= 0x80:
                    for low, high, tail in letters.tails:
                        if low <= byte <= high:
                            assert isinstance(tail, Chain)
                            found[self._place(tail, -1, outer)] = None
            if not found:
                return None
            if self._account < least:
                raise Lost
            standing = Standing(tuple(found))
        return standing

    def _letters(self, standing: Standing) -> Iterator[tuple[Letters, Place | None]]:
        """Letters that may come next, with the place behind each."""
        seen: dict[tuple[Shape | None, Place | None], None] = {}
        if standing.start:
            seen[self._root, None] = None
        for place in standing.places:
            seen[None, place] = None
        for shape, outer in (todo := list(seen)):  # grows while it is walked
            for step in self._beyond(outer) if shape is None else self._into(shape, outer):
                if step not in seen:
                    seen[step] = None
                    todo.append(step)
            if isinstance(shape, Letters):
                yield shape, outer
            if len(todo) > MAX_STEPS:
                raise Lost
        self._account -= len(todo)

    def _beyond(self, place: Place | None) -> Iterator[tuple[Shape | None, Place | None]]:
        """Shapes that follow a place."""
        if place is None:
            return
        shape, index, outer = place.shape, place.index, place.outer
        if isinstance(shape, Chain):
            if index + 1 < len(shape.items):
                yield self._item(shape, index + 1, outer)
            else:
                yield None, outer
            return
        if index >= shape.least:
            yield None, outer
        if shape.most is None or index < shape.most:
            counted = index + 1 if shape.most is not None else min(index + 1, shape.least)
            yield shape.body, self._place(shape, counted, outer)

    def _into(self, shape: Shape, outer: Place | None) -> Iterator[tuple[Shape | None, Place | None]]:
        """Shapes that a shape begins with."""
        if isinstance(shape, Chain):
            yield self._item(shape, 0, outer) if shape.items else (None, outer)
        elif isinstance(shape, Either):
            for item in shape.items:
                yield item, outer
        elif isinstance(shape, Named):
            yield shape.target, outer
        elif isinstance(shape, Times):
            if shape.least == 0:
                yield None, outer
            if shape.most != 0:
                one = 1 if shape.most is not None or shape.least else 0
                yield shape.body, self._place(shape, one, outer)
        elif isinstance(shape, Opaque):
            raise Lost

    def _item(self, shape: Chain, index: int, outer: Place | None) -> tuple[Shape, Place | None]:
        last = index + 1 == len(shape.items)
        return shape.items[index], outer if last else self._place(shape, index, outer)

    def _place(self, shape: Chain | Times, index: int, outer: Place | None) -> Place:
        key = id(shape), index, id(outer)
        place = self._known.get(key)
        if place is None:
            rest = 0 if outer is None else outer.rest
            if isinstance(shape, Times):
                rest += self._prices.times(shape, shape.least - index)
            else:
                rest += self._prices.suffix(shape, index + 1)
            place = self._known[key] = Place(shape, index, outer, rest)
        return place
