"""Texts that match several shapes and none of others: what terminals with `&` and `~` are, and strings with several
demands.

A state holds where a text stands in each of the shapes, so that what may come next, and a short text to an end, are
found by walking from state to state. States that have come to the same places are one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

from asyncengine.grammar.automata import Words
from asyncengine.grammar.prices import Prices
from asyncengine.grammar.search import Effort
from asyncengine.grammar.shapes import Letters, Literal, Opaque, Shape, Unmodelled, span, within
from asyncengine.grammar.tracker import Lost, Tracker

MAX_STEPS = 30_000
"""Steps from state to state that one search for an end may take, some 50 milliseconds."""
MAX_STATES = 20_000
"""States whose ends are kept."""
MAX_PART = 20_000
"""Shapes in one part."""
_USUAL = bytes(
    [34, *range(97, 123), *range(48, 58), *range(65, 91), *range(33, 48), 32, *range(58, 65), *range(91, 97)]
)
_STEP = 1_000
"""Readings of one shape that one byte may look at."""

State = tuple[frozenset[Any], ...]


class Product(Words):
    """Texts of all of some shapes that are none of others."""

    __slots__ = ("_begin", "_known", "_parts", "_wrong", "bytes", "masks")

    def __init__(self, parts: Sequence[Shape], wrong: Sequence[Shape] = ()) -> None:
        """Raises `Unmodelled` for what only the library knows."""
        found = [shape for part in (*parts, *wrong) for shape in within(part, MAX_PART)]
        if any(isinstance(shape, Opaque) for shape in found):
            raise Unmodelled
        self.masks = frozenset().union(*map(_masks, found))
        self.bytes = _alphabet(self.masks)
        # nothing is priced in them
        self._parts, self._wrong = (
            [Tracker(one, cast(Prices, None), _refuse) for one in each] for each in (parts, wrong)
        )
        self._begin: State = tuple(frozenset(one.begin) for one in (*self._parts, *self._wrong))
        self._known: dict[State, list[bytes] | None] = {}
        """A text to an end from each state, none where there is none; None: none was found in time."""
        super().__init__([b""] if self._accepts(self._begin) else [])

    def on(self, state: Any, byte: int) -> tuple[Any, bool]:
        following = self._after(state or self._begin, byte)
        if following is None or self._ending(following) == []:
            return None, False
        return following, self._accepts(following)

    def endings(self, state: Any) -> list[bytes]:
        return self._ending(state or self._begin) or []

    def _after(self, state: State, byte: int) -> State | None:
        found = []
        for index, tracker in enumerate((*self._parts, *self._wrong)):
            try:
                standing = tracker.step(state[index], (byte,), Effort(_STEP))
            except Lost:
                return None
            if standing is None and index < len(self._parts):
                return None
            found.append(frozenset(standing or ()))
        return tuple(found)

    def _accepts(self, state: State) -> bool:
        count = len(self._parts)
        return all(map(Tracker.ends, self._parts, state)) and not any(map(Tracker.ends, self._wrong, state[count:]))

    def _ending(self, state: State) -> list[bytes] | None:
        if state not in self._known:
            if len(self._known) >= MAX_STATES:
                self._known.clear()
            plain = bytes(byte for byte in self.bytes if 32 <= byte < 127 and byte != 92)
            self._search(state, plain)
            if state not in self._known:
                self._search(state, self.bytes)
        return self._known[state]

    def _search(self, state: State, alphabet: bytes) -> None:
        """Look for a text to an end in some bytes; with all of them, it is known in the end that there is none."""
        came: dict[State, tuple[State, int] | None] = {state: None}
        left = MAX_STEPS
        if self._accepts(state):
            self._known[state] = [b""]
            return
        for here in (todo := [state]):  # grows while it is walked
            left -= len(alphabet)
            if left < 0:
                break
            for byte in alphabet:
                following = self._after(here, byte)
                if following is None or following in came:
                    continue
                came[following] = here, byte
                known = [b""] if self._accepts(following) else self._known.get(following)
                if known:
                    self._keep(came, following, known[0])
                    return
                if following not in self._known:
                    todo.append(following)
        if alphabet == self.bytes:
            if left < 0:
                self._known[state] = None
            for here in came if left >= 0 else ():
                self._known.setdefault(here, [])

    def _keep(self, came: dict[State, tuple[State, int] | None], here: State, text: bytes) -> None:
        """The text from the first state to `here` and on to an end by `text`; kept for each state on the way."""
        self._known[here] = [text]
        while (before := came[here]) is not None:
            here, byte = before
            text = bytes([byte]) + text
            self._known[here] = [text]


def _refuse(_: Opaque) -> Any:
    raise Unmodelled


def _masks(shape: Shape) -> frozenset[int]:
    """The sets of bytes that a shape tells apart (bit b: byte b)."""
    if isinstance(shape, Letters):
        return frozenset([shape.mask, *(span(low, high) for low, high, _ in shape.tails)])
    if isinstance(shape, Product):
        return shape.masks
    texts = [shape.data] if isinstance(shape, Literal) else shape.words if isinstance(shape, Words) else []
    return frozenset(1 << byte for byte in {*b"".join(texts)})


@functools.lru_cache(1024)
def _alphabet(masks: frozenset[int]) -> bytes:
    """One byte for each kind that any of `masks` tells apart."""
    kinds, some = [span(0, 255)], functools.reduce(int.__or__, masks, 0)
    for mask in masks:
        kinds = [part for kind in kinds for part in (kind & mask, kind & ~mask) if part]
    usual = (*_USUAL, *range(33), *range(123, 256))
    return bytes(sorted((next(b for b in usual if kind >> b & 1) for kind in kinds if kind & some), key=usual.index))
