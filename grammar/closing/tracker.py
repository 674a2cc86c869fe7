"""A parser of outputs that knows, after each byte, what the nearest complete output costs.

Every reading of the text is a chain of frames, innermost first, each a position in a shape with the cost of what
follows it: so the cost of the nearest complete output is known without a search. Frames are shared as in a
graph-structured stack (Tomita 1985): readings that have come to the same frame are one, and where a byte leads from a
frame is computed once for all outputs of a grammar.

Where a grammar is read by a lexer, a reading inside a lexeme that can go on rules out all those that have left theirs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from asyncengine.grammar.closing.prices import BLANK, Piece, Prices, Segment
from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.automata import Words
from asyncengine.grammar.vocabulary import UNREACHABLE

MAX_STEPS = 20_000
"""Steps from frame to frame that one byte may take, some twenty milliseconds of them."""
MAX_FRAMES = 16_384
"""Frames that are kept for outputs to come, some 700 bytes each; those of an output that goes on stay."""
_numbers = itertools.count()
TOGETHER = 128
"""Tokens to the end from which on all that is left is spelled together."""
AHEAD = 64
"""Symbols of a way that are tried where a lexer may read them otherwise."""
TRIED = 4
"""Readings whose way to the end is spelled."""


class Lost(Exception):
    """The output can be read in too many ways. Never leaves the package."""


class Effort:
    """The effort left, in steps from frame to frame: half a microsecond each."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class Frame:
    """A position in a shape, within the position `outer` of the shape around it.

    It is behind item `index` of a sequence, byte `index` of a text, round `index` of a repetition (from the least on
    all are one where there is no most), the members with the bits `index`, the state `index` of words, or the end of
    a lexeme."""

    __slots__ = ("_prices", "_rest", "index", "inside", "next", "number", "outer", "shape", "spelled")

    def __init__(self, shape: nodes.Shape, index: Any, outer: Frame | None, prices: Prices) -> None:
        self.shape = shape
        self.index = index
        self.outer = outer
        self.number = next(_numbers)
        """The frame's number, which no other frame ever has."""
        self.inside: bool = outer is not None and (outer.inside or isinstance(outer.shape, nodes.Lexeme))
        """In the midst of a lexeme."""
        self._prices = prices
        self._rest: int | None = None if outer else 0
        self.spelled: int | None = None
        """`rest` with neighbours spelled together; None: not counted so far."""
        self.next: dict[int, tuple[Frames, Frames]] | None = None
        """None: no symbol came here so far."""

    @property
    def rest(self) -> int:
        """Tokens of the cheapest text from here to the end of the output, as the sum of its parts."""
        if self._rest is None:
            todo: list[Frame] = []
            here: Frame | None = self
            while here is not None and here._rest is None:
                todo.append(here)
                here = here.outer
            total = (here and here._rest) or 0
            for frame in reversed(todo):
                total = frame._rest = total + self._prices.rest(frame.shape, frame.index)
        return self._rest or 0


Frames = tuple[Frame, ...]
"""All readings of an output: the innermost frame of each."""
Position = tuple[int, ...]
"""The numbers of all readings: they keep nothing of a grammar in memory."""


FramePath = tuple[nodes.Shape, Any, "FramePath"] | None
"""The path of a frame: its shape, its index, the path of the frame around it. None: around the first shape."""


class Continuations:
    """The shapes that may come next at an index of a shape, each with the path of the frame behind it."""

    __slots__ = ("ends", "others", "steps", "texts")

    def __init__(self, shape: nodes.Shape, index: Any, most: int) -> None:
        """Raises `Unmodelled` for more than `most` steps from shape to shape: some rule begins with itself."""
        self.texts: dict[int, list[tuple[nodes.Literal, FramePath]]] = {}
        """Texts by their first byte."""
        self.others: list[tuple[nodes.Shape, FramePath]] = []
        self.ends = False
        """The shape may end here."""
        todo = following(shape, index, None)
        seen = dict.fromkeys(todo)
        for item, path in todo:  # grows while it is walked
            steps: list[tuple[nodes.Shape | None, FramePath]] = []
            if isinstance(item, nodes.Literal):
                self.texts.setdefault(item.data[0], []).append((item, path))
            elif isinstance(item, (nodes.Letters, nodes.Mark, Words)):
                self.others.append((item, path))
                if isinstance(item, Words) and b"" in item.words[:1]:
                    steps = [(None, path)]
            elif item is not None:
                steps = following(item, item.begin, path)
            elif path is not None:
                steps = following(*path)
            else:
                self.ends = True
            for step in steps:
                if step not in seen:
                    seen[step] = None
                    todo.append(step)
            if len(todo) > most:
                raise nodes.Unmodelled
        self.steps = len(todo)


def following(shape: nodes.Shape, index: int, outer: FramePath) -> list[tuple[nodes.Shape | None, FramePath]]:
    """Shapes that follow an index of a shape, each with the path behind it; those that a shape begins with follow its
    first index. None: what is around it goes on."""
    if isinstance(shape, nodes.Chain):
        at, size = index + 1, len(shape.items)
        if at >= size:
            return [(None, outer)]
        return [(shape.items[at], outer if at + 1 == size else (shape, at, outer))]
    if isinstance(shape, nodes.Lexeme):
        return [(None, outer) if index == 0 else (shape.body, (shape, 0, outer))]
    if isinstance(shape, nodes.Either):
        return [(item, outer) for item in shape.items]
    if isinstance(shape, nodes.Unordered):
        members = [(item, (shape, said, outer)) for item, said in shape.following(index)]
        return [*members, (None, outer)] if index and not shape.left(index) else [*members]
    assert isinstance(shape, nodes.Times)
    found: list[tuple[nodes.Shape | None, FramePath]] = [(None, outer)] if index >= shape.least else []
    if shape.most is None or index < shape.most:
        counted = index + 1 if shape.most is not None else min(index + 1, shape.least)
        found.append((shape.body, (shape, counted, outer)))
    return found


class Tracker:
    """Follows outputs through one shape. Any number of threads may share it."""

    def __init__(self, root: nodes.Shape, prices: Prices, lexed: bool = False) -> None:
        """`lexed`: there are lexemes."""
        self._prices = prices
        self._known: dict[tuple[int, Any, int], Frame] = {}
        self._continuations_of: dict[tuple[nodes.Shape, Any], Continuations] = {}
        self._steps: dict[tuple[Frames, Sequence[int]], Frames] = {}
        self._lexed = lexed
        self._agreeing: dict[Frames, Frames] = {}
        self._lazy = lexed and any(isinstance(shape, nodes.Lexeme) and shape.lazy for shape in prices.shapes())
        self._end = Frame(nodes.Chain(()), 0, None, prices)
        self.begin: Frames = (self._frame(nodes.Chain([root]), -1, self._end),)

    def cost(self, frames: Frames) -> int:
        """Tokens of the nearest complete output, at most: the sum of its parts."""
        if self._lexed:
            frames = self._open(frames)
        return min([frame.rest for frame in frames]) if frames else UNREACHABLE

    def nearest(self, frames: Frames) -> list[tuple[int, Frame]]:
        """The frames from which the nearest complete outputs go on, the nearest first, each behind the tokens to it
        with neighbours spelled together."""
        found = sorted(self._open(frames), key=lambda frame: frame.rest)[:TRIED]
        return sorted(((self._spelled(frame), frame) for frame in found), key=lambda way: way[0])

    def _open(self, frames: Frames) -> Frames:
        """The readings that count: where there is a lexer, the nearest ones that it lets go on as they want to."""
        if not self._lexed:
            return frames
        known = self._agreeing.get(frames)
        if known is None:
            if len(self._agreeing) >= MAX_FRAMES:
                self._agreeing.clear()
            found = sorted(frames, key=lambda frame: frame.rest)[:TRIED]
            known = self._agreeing[frames] = tuple(frame for frame in found if self._agrees(frames, frame))
        return known

    def _agrees(self, frames: Frames, frame: Frame) -> bool:
        """Whether the lexer, which reads `frames`, lets one of them go on to its own nearest end."""
        if not 0 < frame.rest < UNREACHABLE:
            return frame.rest == 0
        symbols = tuple(itertools.islice(self._symbols(frame), AHEAD))
        try:
            found = self.step(frames, symbols, Effort(MAX_STEPS))
        except Lost:
            return False
        return found is not None and (len(symbols) == AHEAD or any(one.rest == 0 for one in found))

    def _symbols(self, frame: Frame) -> Iterator[int]:
        vocabulary = self._prices.speller.vocabulary
        for piece in self._pieces(frame, to_the_end=True):
            if isinstance(piece, bytes):
                yield from piece.replace(BLANK, b"")
            else:
                yield from (symbol for token in piece[0] * piece[1] for symbol in vocabulary.symbols(token))

    def segments(self, frame: Frame) -> Iterator[Segment]:
        """Tokens of the output that `nearest` counted."""
        while True:
            yield from self._prices.segments(self._pieces(frame, frame.rest <= TOGETHER))
            if frame.outer is None or frame.rest <= TOGETHER:
                return
            frame = frame.outer

    def _pieces(self, frame: Frame, to_the_end: bool) -> Iterator[Piece]:
        """The rest of a frame's own shape, or of all of them."""
        here: Frame | None = frame
        while here is not None and here.outer is not None:
            own = isinstance(here.shape, (nodes.Times, nodes.Unordered, Words))
            yield from self._prices.pieces(here.shape, here.index if own else here.index + 1)
            here = here.outer if to_the_end else None

    def _spelled(self, frame: Frame) -> int:
        """Tokens from a frame to the end. Texts are spelled as a whole within one shape, and near the end over all."""
        total, open_here = 0, list[tuple[Frame, int]]()
        here: Frame | None = frame
        while here is not None and here.outer is not None:
            if here.rest >= UNREACHABLE:
                return UNREACHABLE
            near = here.rest <= TOGETHER
            known = here.spelled
            if known is None:
                known = sum(len(tokens) * times for tokens, times in self._prices.segments(self._pieces(here, near)))
                open_here.append((here, total))
            else:
                near = True
            total += known
            here = None if near else here.outer
        for above, before in open_here:
            above.spelled = total - before
        return total

    def step(self, frames: Frames, symbols: Sequence[int], effort: Effort) -> Frames | None:
        """Past `symbols`; None if no reading goes on with it. Raises `Lost`."""
        known = self._steps.get((frames, symbols))
        if known is None:
            known = self._walk(frames, symbols, effort)
            if known is None:
                return None
            if len(self._steps) >= MAX_FRAMES:
                self._steps.clear()
            self._steps[frames, symbols] = known
        return known

    def _walk(self, frames: Frames, symbols: Sequence[int], effort: Effort) -> Frames | None:
        at = 0
        while frames and at < len(symbols):
            taken, (first, *others) = 1, frames
            if others:
                found = [self._on(frame, symbols[at], effort) for frame in frames]
                on = dict.fromkeys(itertools.chain.from_iterable(on for on, _ in found))
                frames = tuple(on or dict.fromkeys(itertools.chain.from_iterable(left for _, left in found)))
            elif isinstance(first.shape, nodes.Literal):
                taken, frames = self._along(first, symbols[at:])
            else:
                going_on, leaving = self._on(first, symbols[at], effort)
                frames = going_on or leaving
            at += taken
            effort.left -= len(frames)
            if effort.left < 0:
                raise Lost
            if self._lazy:
                frames = tuple(dict.fromkeys(self._lazy_ends(frames, effort))) or frames
        return frames or None

    def _along(self, frame: Frame, symbols: Sequence[int]) -> tuple[int, Frames]:
        """The number of symbols that a text goes on with, and the frame behind them."""
        assert isinstance(frame.shape, nodes.Literal)
        assert frame.outer is not None
        rest = frame.shape.data[frame.index + 1 :]
        taken = min(len(rest), len(symbols))
        if any(map(operator.ne, rest, symbols)):
            return 0, ()
        ends = taken == len(rest)
        return taken, (frame.outer if ends else self._frame(frame.shape, frame.index + taken, frame.outer),)

    def _on(self, frame: Frame, symbol: int, effort: Effort) -> tuple[Frames, Frames]:
        """Frames behind `symbol`: those within the lexeme, and those behind its end."""
        if frame.outer is not None and isinstance(frame.shape, (nodes.Literal, Words)):
            found = tuple(self._within(frame.shape, frame.index, frame.outer, symbol))
            return (found, ()) if frame.inside else ((), found)
        behind = frame.next
        if behind is None:
            behind = frame.next = {}
        known = behind.get(symbol)
        if known is None:  # `_forget` may come in between
            known = behind[symbol] = self._leave(frame, symbol, effort)
        return known

    def _leave(self, frame: Frame, symbol: int, effort: Effort) -> tuple[Frames, Frames]:
        """The same for a frame between parts of its shape."""
        going_on, leaving = list[Frame](), list[Frame]()
        behind = going_on if frame.inside else leaving
        here = frame
        while here.outer is not None:
            continuations = self._continue(here.shape, here.index, effort)
            for text, path in continuations.texts.get(symbol, ()):
                behind += self._within(text, -1, self._at(path, here.outer), symbol)
            for shape, path in continuations.others:
                if not isinstance(shape, nodes.Letters) or symbol >= 0x80:
                    behind += self._into(shape, self._at(path, here.outer), symbol)
                elif shape.mask >> symbol & 1:
                    behind.append(self._at(path, here.outer))
            if not continuations.ends:
                break
            if isinstance(here.shape, nodes.Lexeme):
                behind = leaving
            here = here.outer
        return _once(going_on), _once(leaving)

    def _into(self, shape: nodes.Shape, outer: Frame, symbol: int) -> Iterable[Frame]:
        """Frames behind the first symbol of a shape."""
        if isinstance(shape, nodes.Letters):
            tails = shape.tails if symbol >= 0x80 else ()
            found = [self._frame(tail, -1, outer) for low, high, tail in tails if low <= symbol <= high]
            return [outer, *found] if shape.mask >> symbol & 1 else found
        if isinstance(shape, nodes.Mark):
            return [outer] if shape.symbol == symbol else []
        return self._within(shape, b"", outer, symbol)

    def _within(self, shape: nodes.Shape, index: Any, outer: Frame, byte: int) -> list[Frame]:
        """Frames behind `byte` in a text or in words."""
        if isinstance(shape, nodes.Literal):
            if shape.data[index + 1] != byte:
                return []
            return [outer if index + 2 == len(shape.data) else self._frame(shape, index + 1, outer)]
        if byte >= 256:
            return []
        assert isinstance(shape, Words)
        state, ended = shape.on(index, byte)
        found = [outer] if ended else []
        return found if state is None else [*found, self._frame(shape, state, outer)]

    def _lazy_ends(self, frames: Frames, effort: Effort) -> Iterator[Frame]:
        """The ends of lazy lexemes that have been reached: they go on no further."""
        for frame in frames:
            here: Frame | None = frame
            while here is not None and here.inside:
                text = isinstance(here.shape, (nodes.Literal, Words))
                ends = not text and self._continue(here.shape, here.index, effort).ends
                here = here.outer if ends else None
            if here is not None and isinstance(here.shape, nodes.Lexeme) and here.shape.lazy:
                yield here

    def _continue(self, shape: nodes.Shape, index: Any, effort: Effort) -> Continuations:
        continuations = self._continuations_of.get((shape, index))
        if continuations is None:
            if len(self._continuations_of) >= MAX_FRAMES:
                self._continuations_of.clear()
            try:
                continuations = self._continuations_of[shape, index] = Continuations(shape, index, MAX_STEPS)
            except nodes.Unmodelled as error:
                raise Lost from error
            effort.left -= continuations.steps
        return continuations

    def _at(self, path: FramePath, outer: Frame) -> Frame:
        """The frame that lies at `path` inside `outer`."""
        paths = []
        while path is not None:
            paths.append(path)
            path = path[2]
        for shape, index, _ in reversed(paths):
            outer = self._frame(shape, index, outer)
        return outer

    def _frame(self, shape: nodes.Shape, index: Any, outer: Frame) -> Frame:
        key = id(shape), index, id(outer)
        frame = self._known.get(key)
        if frame is None:
            if len(self._known) >= MAX_FRAMES:
                self._forget()
            frame = self._known[key] = Frame(shape, index, outer, self._prices)
        return frame

    def _forget(self) -> None:
        """Let go of all frames but those of outputs that go on: each leads to those behind it."""
        known, self._known, self._agreeing, self._steps = self._known, {}, {}, {}
        for frame in (*known.values(), *self.begin):
            frame.next = None


def _once(frames: list[Frame]) -> Frames:
    return tuple(frames if len(frames) < 2 else dict.fromkeys(frames))
