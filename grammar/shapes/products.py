"""Texts that match several shapes and none of others: what terminals with `&` and `~` are, and strings with several
demands.

A state holds where a text stands in each of the shapes, so that what may come next, and a short text to an end, are
found by walking from state to state. States that have come to the same places are one.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
from collections.abc import Collection, Sequence
from typing import Any

from asyncengine.grammar.closing.prices import MAX_SHAPES, Prices, Speller
from asyncengine.grammar.closing.tracker import Effort, Lost, Tracker
from asyncengine.grammar.shapes.automata import Words
from asyncengine.grammar.shapes.nodes import Letters, Lexeme, Literal, Shape, Times, Unmodelled, span, within
from asyncengine.grammar.vocabulary import UNREACHABLE, Vocabulary

MAX_STEPS, LEAST_STEPS = 30_000, 500
"""Steps from state to state that one search for an end may take, a third of a second; fewer after one that found none
in time."""
READINGS = 4
"""Readings in a state that cost no more than one."""
MAX_STATES = 4_000
"""States whose ends are kept."""
MAX_TRACKERS = 256
"""Shapes whose trackers are kept: many terminals have the same parts."""
MAX_PART = 20_000
"""Shapes in one part."""
_USUAL = b'"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ ' + bytes([*range(33, 48), *range(58, 97)])
_STEP = 1_000
"""Readings of one shape that one byte may look at."""

State = tuple[frozenset[Any], ...]


class Product(Words):
    """Texts of all of some shapes that are none of others."""

    __slots__ = ("_ascii", "_begin", "_known", "_parts", "_steps", "_wrong", "kinds", "masks")

    def __init__(self, parts: Sequence[Shape], wrong: Sequence[Shape] = ()) -> None:
        """Raises `Unmodelled` for parts that are too large."""
        found = [shape for part in (*parts, *wrong) for shape in within(part, MAX_PART)]
        self.masks = frozenset().union(*map(_masks, found))
        self.kinds = _kinds(self.masks)
        """One byte for each kind that it tells apart, and all of that kind (bit b: byte b)."""
        self._ascii = [byte for byte in self.kinds if byte < 0x80]
        """Tried alone at first: letters of several bytes lead by many more states to longer texts."""
        self._parts, self._wrong = ([*map(_tracker, each)] for each in (parts, wrong))
        self._begin: State = tuple(frozenset(one.begin) for one in (*self._parts, *self._wrong))
        self._known: dict[State, list[bytes] | None] = {}
        """The results of `_ending`."""
        self._steps = MAX_STEPS
        super().__init__([b""] if self._left(self._begin) == 0 else [])

    def on(self, state: Any, byte: int) -> tuple[Any, bool]:
        following = self._after(state or self._begin, byte)
        if following is None or self._ending(following) == []:
            return None, False
        return following, self._left(following) == 0

    def endings(self, state: Any) -> list[bytes]:
        return self._ending(state or self._begin) or []

    def _after(self, state: State, byte: int) -> State | None:
        found = []
        for index, tracker in enumerate((*self._parts, *self._wrong)):
            try:
                standing = tracker.step(tuple(state[index]), (byte,), Effort(_STEP))
            except Lost:
                return None
            if standing is None and index < len(self._parts):
                return None
            found.append(frozenset(standing or ()))
        return tuple(found)

    def _left(self, state: State) -> int:
        """Bytes to an end at least; 0 only where it may end."""
        count = len(self._parts)
        left = max(min(place.rest for place in standing) for standing in state[:count])
        return left or int(any(place.rest == 0 for standing in state[count:] for place in standing))

    def _ending(self, state: State) -> list[bytes] | None:
        """A text to an end, none where there is none; None: none was found in time."""
        with contextlib.suppress(KeyError):
            return self._known[state]
        if len(self._known) >= MAX_STATES:
            self._known.clear()
        text = b"" if self._left(state) == 0 else self._of_a_part(state)
        found = self._search(state, self._ascii) if text is None else [text]
        if found == []:
            found = self._search(state, self.kinds)
        self._steps = MAX_STEPS if found else max(LEAST_STEPS, self._steps // 4)
        self._known[state] = found
        return found

    def _of_a_part(self, state: State) -> bytes | None:
        """The nearest end of one of the shapes, if it is one of all."""
        for tracker, standing in zip(self._parts, state, strict=False):
            ways = tracker.nearest(tuple(standing))[:1]
            if not ways or ways[0][0] >= UNREACHABLE:  # this one is a product, too, whose end was not found in time
                continue
            text = b"".join(bytes(tokens) * times for tokens, times in tracker.segments(ways[0][1]))
            here: State | None = state
            for byte in text:
                here = here and self._after(here, byte)
            if here is not None and self._left(here) == 0:
                return text
        return None

    def _search(self, state: State, kinds: Collection[int]) -> list[bytes] | None:
        """The same by walking from state to state by `kinds` of bytes, nearest first."""
        came: dict[State, tuple[State, int] | None] = {state: None}
        count, steps = itertools.count(), self._steps
        heap = [(0, 0, next(count), state)]
        while heap:
            _, length, _, here = heapq.heappop(heap)
            if not self._left(here):
                return [self._keep(came, here)]
            steps -= len(kinds) * max(1, sum(map(len, here)) // READINGS)
            if steps < 0:
                return None
            for byte in kinds:
                following = self._after(here, byte)
                if following is None or following in came or self._known.get(following) == []:
                    continue
                if (left := self._left(following)) < UNREACHABLE:
                    came[following] = here, byte
                    heapq.heappush(heap, (length + left, length + 1, next(count), following))
        if len(kinds) == len(self.kinds):
            self._known.update((here, []) for here in came)
        return []

    def _keep(self, came: dict[State, tuple[State, int] | None], here: State) -> bytes:
        """The text from the first state to `here`, an end; kept for each state on the way."""
        text = b""
        while (before := came[here]) is not None:
            self._known[here] = [text]
            here, byte = before
            text = bytes([byte]) + text
        return text


@functools.cache
def _bytes() -> Speller:
    """A speller whose tokens are single bytes."""
    return Speller(Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [256], [], 257))


@functools.lru_cache(MAX_TRACKERS)
def _tracker(shape: Shape) -> Tracker:
    """The shape priced in bytes."""
    return Tracker(shape, Prices(shape, _bytes()))


def _masks(shape: Shape) -> frozenset[int]:
    """The sets of bytes that a shape tells apart (bit b: byte b)."""
    if isinstance(shape, Letters):
        return frozenset([shape.mask, *(span(low, high) for low, high, _ in shape.tails)])
    if isinstance(shape, Product):
        return shape.masks
    texts = [shape.data] if isinstance(shape, Literal) else shape.words if isinstance(shape, Words) else []
    return frozenset(1 << byte for byte in {*b"".join(texts)})


@functools.lru_cache(1024)
def _kinds(masks: frozenset[int]) -> dict[int, int]:
    """One byte for each kind that any of `masks` tells apart, and the kind."""
    kinds, some = [span(0, 255)], functools.reduce(int.__or__, masks, 0)
    for mask in masks:
        kinds = [part for kind in kinds for part in (kind & mask, kind & ~mask) if part]
    usual = (*_USUAL, *range(256))
    found = {next(byte for byte in usual if kind >> byte & 1): kind for kind in kinds if kind & some}
    return {byte: found[byte] for byte in sorted(found, key=usual.index)}


# Lexemes that may go on with one byte for ever: of these the library must not look for text that has to come. Where no
# other lexeme can follow, what has to come has no end, and neither has the look for it (`/a+/ /a+/`: the first takes
# all). Other endless rules are stopped by the library's limits.

MAX_FOLLOWED = 64
"""States of a lexeme that are looked at."""


def may_be_endless(root: Shape) -> bool:
    """Whether a lexeme of `root` may: true, where that is not known."""
    try:
        lexemes = [shape.body for shape in within(root, MAX_SHAPES) if isinstance(shape, Lexeme) and not shape.lazy]
        return any(map(_goes_on, dict.fromkeys(lexemes)))
    except Unmodelled:
        return True


@functools.lru_cache(MAX_TRACKERS)
def _goes_on(lexeme: Shape) -> bool:
    """States that are left by one byte each form a circle."""
    parts = within(lexeme, MAX_SHAPES)
    if not any(isinstance(shape, Product) or (isinstance(shape, Times) and shape.most is None) for shape in parts):
        return False
    product = lexeme if isinstance(lexeme, Product) else Product([lexeme])
    leaving: dict[object, object] = {}
    todo: list[object] = [b""]
    for state in todo:  # grows while it is walked
        found = {byte: behind for byte in product.kinds if (behind := product.on(state, byte)[0]) is not None}
        alone = [behind for byte, behind in found.items() if product.kinds[byte].bit_count() == 1]
        leaving[state] = alone[0] if len(found) == len(alone) == 1 else None
        todo += [behind for behind in dict.fromkeys(found.values()) if behind not in leaving and behind not in todo]
        if len(todo) > MAX_FOLLOWED:
            return True
    for state in todo:
        here: object = state
        for _ in todo:
            here = leaving.get(here)
        if here is not None:
            return True
    return False
