"""Products of automata: texts that match several shapes and none of others, as terminals with `&` and `~` do, and
strings with several demands.

A state is the tuple of the parser states in each of the shapes. What may come next, and a short text to an end, are
found by a search from state to state, which makes states when it comes to them.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
from collections.abc import Collection, Sequence
from typing import Any

from asyncengine.grammar.closing.costs import MAX_SHAPES, CostTable, Memo, Speller
from asyncengine.grammar.closing.recognizer import Fuel, Recognizer, TooAmbiguous
from asyncengine.grammar.shapes.automata import Words
from asyncengine.grammar.shapes.nodes import CharSet, Lexeme, Literal, Repeat, Shape, Unmodelled, reachable, span
from asyncengine.grammar.vocabulary import UNREACHABLE, Vocabulary

MAX_STEPS, LEAST_STEPS = 30_000, 500
"""Steps from state to state that one search for an end may take, a third of a second. One that finds none leaves a
quarter of them to the next, so that a product without short ends does not take as long at each byte."""
READINGS = 4
"""Readings in a state that count as one step: up to so many take hardly longer than one."""
MAX_STATES = 4_000
"""States whose ends are kept."""
MAX_TRACKERS = 256
"""Recognizers that are kept: many terminals have factors in common."""
MAX_PART = 20_000
"""Most shapes in one factor."""
_USUAL = b'"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ ' + bytes([*range(33, 48), *range(58, 97)])
_STEP = 1_000
"""Fuel of one byte in one factor."""

State = tuple[frozenset[Any], ...]
"""The readings (`recognizer.Frame`) of a text in each factor; none in an excluded one that it does not match."""


class Product(Words):
    """Texts of all of some shapes that are none of others."""

    __slots__ = ("_ascii", "_begin", "_endings", "_max_steps", "_wanted", "_wrong", "classes", "masks")

    def __init__(self, parts: Sequence[Shape], wrong: Sequence[Shape] = ()) -> None:
        """Raises `Unmodelled` for a factor of more than `MAX_PART` shapes."""
        shapes = [shape for shape_of_all in (*parts, *wrong) for shape in reachable(shape_of_all, MAX_PART)]
        self.masks = frozenset().union(*map(_byte_sets, shapes))
        self.classes = _byte_classes(self.masks)
        """A byte for each equivalence class of bytes, and the class (bit b: byte b)."""
        self._ascii = [byte for byte in self.classes if byte < 0x80]
        """Tried alone at first: characters of several bytes lead through many more states to longer texts."""
        self._wanted, self._wrong = ([*map(_recognizer, group)] for group in (parts, wrong))
        self._begin: State = tuple(frozenset(recognizer.begin) for recognizer in (*self._wanted, *self._wrong))
        self._endings = Memo[State, list[bytes] | None](MAX_STATES)
        """The results of `_ending`."""
        self._max_steps = MAX_STEPS
        super().__init__([b""] if self._rest(self._begin) == 0 else [])

    def on(self, state: Any, byte: int) -> tuple[Any, bool]:
        following = self._step(state or self._begin, byte)
        if following is None or self._ending_of(following) == []:
            return None, False
        return following, self._rest(following) == 0

    def endings(self, state: Any) -> list[bytes]:
        return self._ending_of(state or self._begin) or []

    def _step(self, state: State, byte: int) -> State | None:
        readings = []
        for index, recognizer in enumerate((*self._wanted, *self._wrong)):
            try:
                frames = recognizer.step(tuple(state[index]), (byte,), Fuel(_STEP))
            except TooAmbiguous:
                return None
            if frames is None and index < len(self._wanted):
                return None
            readings.append(frozenset(frames or ()))
        return tuple(readings)

    def _rest(self, state: State) -> int:
        """Lower bound on the bytes to an end; 0 only where the text may end."""
        count = len(self._wanted)
        left = max(min(frame.rest for frame in readings) for readings in state[:count])
        return left or int(any(frame.rest == 0 for readings in state[count:] for frame in readings))

    def _ending_of(self, state: State) -> list[bytes] | None:
        """[a text to an end], [] where there is none; None: the search ran out of steps."""
        with contextlib.suppress(KeyError):
            return self._endings[state]
        text = b"" if self._rest(state) == 0 else self._shortest_of_one(state)
        endings = self._search(state, self._ascii) if text is None else [text]
        if endings == []:
            endings = self._search(state, self.classes)
        self._max_steps = MAX_STEPS if endings else max(LEAST_STEPS, self._max_steps // 4)
        self._endings[state] = endings
        return endings

    def _shortest_of_one(self, state: State) -> bytes | None:
        """The shortest text to an end of one factor, if it is one of the product."""
        for recognizer, readings in zip(self._wanted, state, strict=False):
            nearest = recognizer.nearest(tuple(readings))[:1]
            if not nearest or nearest[0][0] >= UNREACHABLE:
                continue  # a product, too, whose search ran out of steps
            text = b"".join(bytes(tokens) * times for tokens, times in recognizer.segments(nearest[0][1]))
            reached: State | None = state
            for byte in text:
                reached = reached and self._step(reached, byte)
            if reached is not None and self._rest(reached) == 0:
                return text
        return None

    def _search(self, state: State, classes: Collection[int]) -> list[bytes] | None:
        """The same by A* search over a byte of each of `classes`, with `_rest` as the lower bound of what is left."""
        came_from: dict[State, tuple[State, int] | None] = {state: None}
        count, steps = itertools.count(), self._max_steps
        heap = [(0, 0, next(count), state)]
        while heap:
            _, length, _, current = heapq.heappop(heap)
            if not self._rest(current):
                return [self._record(came_from, current)]
            steps -= len(classes) * max(1, sum(map(len, current)) // READINGS)
            if steps < 0:
                return None
            for byte in classes:
                following = self._step(current, byte)
                if following is None or following in came_from or self._endings.get(following) == []:
                    continue
                if (rest := self._rest(following)) < UNREACHABLE:
                    came_from[following] = current, byte
                    heapq.heappush(heap, (length + rest, length + 1, next(count), following))
        if len(classes) == len(self.classes):
            self._endings.update((current, []) for current in came_from)
        return []

    def _record(self, came_from: dict[State, tuple[State, int] | None], here: State) -> bytes:
        """The text from the first state to `here`, an end. Each state on the path gets its rest of it as its ending."""
        text = b""
        while (step := came_from[here]) is not None:
            self._endings[here] = [text]
            here, byte = step
            text = bytes([byte]) + text
        return text


@functools.cache
def _byte_speller() -> Speller:
    """A speller whose tokens are single bytes."""
    return Speller(Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [256], [], 257))


@functools.lru_cache(MAX_TRACKERS)
def _recognizer(shape: Shape) -> Recognizer:
    """A recognizer of the shape whose costs are bytes."""
    return Recognizer(shape, CostTable(shape, _byte_speller()))


def _byte_sets(shape: Shape) -> frozenset[int]:
    """The sets of bytes that a shape distinguishes (bit b: byte b)."""
    if isinstance(shape, CharSet):
        return frozenset([shape.mask, *(span(low, high) for low, high, _ in shape.tails)])
    if isinstance(shape, Product):
        return shape.masks
    texts = [shape.data] if isinstance(shape, Literal) else shape.words if isinstance(shape, Words) else []
    return frozenset(1 << byte for byte in {*b"".join(texts)})


@functools.lru_cache(1024)
def _byte_classes(masks: frozenset[int]) -> dict[int, int]:
    """The equivalence classes of bytes that no set in `masks` splits, by a byte of each: a usual one if there is."""
    classes, relevant = [span(0, 255)], functools.reduce(int.__or__, masks, 0)
    for mask in masks:
        classes = [half for group in classes for half in (group & mask, group & ~mask) if half]
    usual = (*_USUAL, *range(256))
    by_byte = {next(byte for byte in usual if group >> byte & 1): group for group in classes if group & relevant}
    return {byte: by_byte[byte] for byte in sorted(by_byte, key=usual.index)}


# Lexemes that may go on with one byte for ever: in these the library must not look for forced text. Where no other
# lexeme can follow, the forced text has no end, and neither has the search for it (`/a+/ /a+/`: the first takes all).
# Other endless rules are stopped by the library's limits.

MAX_FOLLOWED = 64
"""States of a lexeme that are looked at."""


def may_be_endless(root: Shape) -> bool:
    """Whether a lexeme of `root` may force text without an end; True if that is not known."""
    try:
        lexemes = [shape.body for shape in reachable(root, MAX_SHAPES) if isinstance(shape, Lexeme) and not shape.lazy]
        return any(map(_may_loop, dict.fromkeys(lexemes)))
    except Unmodelled:
        return True


@functools.lru_cache(MAX_TRACKERS)
def _may_loop(lexeme: Shape) -> bool:
    """Whether states from which a single byte leads on form a cycle."""
    shapes = reachable(lexeme, MAX_SHAPES)
    if not any(isinstance(shape, Product) or (isinstance(shape, Repeat) and shape.most is None) for shape in shapes):
        return False
    product = lexeme if isinstance(lexeme, Product) else Product([lexeme])
    leaving: dict[object, object] = {}
    todo: list[object] = [b""]
    for state in todo:  # grows while it is walked
        following = {byte: after for byte in product.classes if (after := product.on(state, byte)[0]) is not None}
        single = [after for byte, after in following.items() if product.classes[byte].bit_count() == 1]
        leaving[state] = single[0] if len(following) == len(single) == 1 else None
        todo += [after for after in dict.fromkeys(following.values()) if after not in leaving and after not in todo]
        if len(todo) > MAX_FOLLOWED:
            return True
    for state in todo:
        current: object = state
        for _ in todo:
            current = leaving.get(current)
        if current is not None:
            return True
    return False
