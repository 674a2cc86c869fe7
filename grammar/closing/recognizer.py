"""A parser of outputs that knows, after each byte, what the nearest complete output costs.

A reading is one parse of the text so far: a stack of frames, innermost first. Each frame is an item in Earley's sense
(1970), a shape as the production and an index as the dot, with the cost of what follows the dot. So the cost of the
nearest complete output is known without a search. Frames are shared as in a graph-structured stack (Tomita 1985):
readings that have come to the same frame are one, and where a byte leads from a frame is computed once for all outputs
of a grammar.

Where a grammar is read by a lexer, a reading inside a lexeme that can go on rules out all those that have left theirs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from asyncengine.grammar.closing.costs import BLANK, CostTable, Memo, Piece, Segment, token_count
from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.automata import Words
from asyncengine.grammar.vocabulary import UNREACHABLE

MAX_STEPS = 20_000
"""Steps from frame to frame that one byte may take, some twenty milliseconds of them."""
MAX_FRAMES = 16_384
"""Frames that are kept for outputs to come, some 700 bytes each; those of an output that goes on stay."""
_numbers = itertools.count()
SPELLED_WHOLE = 128
"""With so many tokens or fewer to the end, all that is left is spelled as one text."""
LEXED_AHEAD = 64
"""Symbols of a completion that are parsed to see whether the lexer reads them as the completion means them."""
MAX_SPELLED = 4
"""Readings, the cheapest ones, whose completions are spelled."""


class TooAmbiguous(Exception):
    """The output can be read in too many ways. Never leaves the package."""


class Fuel:
    """The fuel left, in steps from frame to frame: half a microsecond each."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class Frame:
    """An item on the stack: a shape with the dot at `index`, inside the frame `outer` of the shape around it.

    The dot is behind item `index` of a `Concat`, byte `index` of a `Literal` or round `index` of a `Repeat` (without a
    maximum, all rounds from the least on are one), behind the members of an `Unordered` whose bits `index` has, in
    state `index` of `Words`, or at the end of a `Lexeme`."""

    __slots__ = ("_costs", "_rest", "in_lexeme", "index", "number", "outer", "shape", "spelled", "transitions")

    def __init__(self, shape: nodes.Shape, index: Any, outer: Frame | None, costs: CostTable) -> None:
        self.shape = shape
        self.index = index
        self.outer = outer
        self.number = next(_numbers)
        """The frame's number, which no other frame ever has."""
        self.in_lexeme: bool = outer is not None and (outer.in_lexeme or isinstance(outer.shape, nodes.Lexeme))
        """The dot is inside a lexeme."""
        self._costs = costs
        self._rest: int | None = None if outer else 0
        self.spelled: int | None = None
        """`rest` with neighbouring texts spelled as one; None until it is first asked for."""
        self.transitions: dict[int, tuple[Frames, Frames]] | None = None
        """Results of `_scan` by symbol; None until the first symbol comes."""

    @property
    def rest(self) -> int:
        """Tokens of the cheapest text from here to the end of the output, as the sum of its parts."""
        if self._rest is None:
            unpriced: list[Frame] = []
            current: Frame | None = self
            while current is not None and current._rest is None:
                unpriced.append(current)
                current = current.outer
            # outermost first: a loop, for a recursive grammar nests deeper than Python's stack
            total = (current and current._rest) or 0
            for frame in reversed(unpriced):
                total = frame._rest = total + self._costs.rest(frame.shape, frame.index)
        return self._rest or 0


Frames = tuple[Frame, ...]
"""The readings of an output, by the innermost frame of each: a parser's state."""
Position = tuple[int, ...]
"""The numbers of `Frames`: a key that keeps no grammar in memory."""


FramePath = tuple[nodes.Shape, Any, "FramePath"] | None
"""Frames to be pushed: the shape and index of the innermost, the path of those around it. None: nothing to push."""


class Continuations:
    """The terminals that may come next at an item, each with the frames to push behind it: what Earley's predictor and
    completer add to an item, or the closure of an LR item. Computed once for each shape and index."""

    __slots__ = ("expansions", "literals", "may_end", "shapes")

    def __init__(self, shape: nodes.Shape, index: Any, max_expansions: int) -> None:
        """Raises `Unmodelled` for more than `max_expansions` shapes: then some rule begins with itself."""
        self.literals: dict[int, list[tuple[nodes.Literal, FramePath]]] = {}
        """Literals by their first byte."""
        self.shapes: list[tuple[nodes.Shape, FramePath]] = []
        self.may_end = False
        """The shape may end here, so that the frame around it goes on."""
        pending = expand(shape, index, None)
        seen = dict.fromkeys(pending)
        for item, path in pending:  # grows while it is walked
            expanded: list[tuple[nodes.Shape | None, FramePath]] = []
            if isinstance(item, nodes.Literal):
                self.literals.setdefault(item.data[0], []).append((item, path))
            elif isinstance(item, (nodes.CharSet, nodes.SpecialToken, Words)):
                self.shapes.append((item, path))
                if isinstance(item, Words) and b"" in item.words[:1]:
                    expanded = [(None, path)]
            elif item is not None:
                expanded = expand(item, item.begin, path)
            elif path is not None:
                expanded = expand(*path)
            else:
                self.may_end = True
            for step in expanded:
                if step not in seen:
                    seen[step] = None
                    pending.append(step)
            if len(pending) > max_expansions:
                raise nodes.Unmodelled
        self.expansions = len(pending)


def expand(shape: nodes.Shape, index: int, outer: FramePath) -> list[tuple[nodes.Shape | None, FramePath]]:
    """The shapes behind the dot at `index`, each with the frames to push behind it. None in place of a shape: the item
    is complete, and the frame around it goes on."""
    if isinstance(shape, nodes.Concat):
        next_index, size = index + 1, len(shape.items)
        if next_index >= size:
            return [(None, outer)]
        return [(shape.items[next_index], outer if next_index + 1 == size else (shape, next_index, outer))]
    if isinstance(shape, nodes.Lexeme):
        return [(None, outer) if index == 0 else (shape.body, (shape, 0, outer))]
    if isinstance(shape, nodes.Choice):
        return [(item, outer) for item in shape.items]
    if isinstance(shape, nodes.Unordered):
        members = [(item, (shape, state, outer)) for item, state in shape.following(index)]
        return [*members, (None, outer)] if index and not shape.left(index) else [*members]
    assert isinstance(shape, nodes.Repeat)
    continuations: list[tuple[nodes.Shape | None, FramePath]] = [(None, outer)] if index >= shape.least else []
    if shape.most is None or index < shape.most:
        rounds = index + 1 if shape.most is not None else min(index + 1, shape.least)
        continuations.append((shape.body, (shape, rounds, outer)))
    return continuations


class Recognizer:
    """A parser of one grammar. Any number of threads may share it: its tables only grow or are emptied."""

    def __init__(self, root: nodes.Shape, costs: CostTable, lexed: bool = False) -> None:
        """`lexed`: the grammar has lexemes, which a lexer takes as long as it can."""
        self._costs = costs
        self._frames: dict[tuple[int, Any, int], Frame] = {}
        self._continuations_of = Memo[tuple[nodes.Shape, Any], Continuations](MAX_FRAMES)
        self._stepped = Memo[tuple[Frames, Sequence[int]], Frames](MAX_FRAMES)
        self._lexed = lexed
        self._viable_of = Memo[Frames, Frames](MAX_FRAMES)
        self._has_lazy = lexed and any(isinstance(shape, nodes.Lexeme) and shape.lazy for shape in costs.children)
        self._bottom = Frame(nodes.Concat(()), 0, None, costs)
        self.begin: Frames = (self._interned(nodes.Concat([root]), -1, self._bottom),)

    def cost(self, frames: Frames) -> int:
        """Upper bound on the tokens of the cheapest completion: the sum over its shapes."""
        if self._lexed:
            frames = self._viable(frames)
        return min([frame.rest for frame in frames]) if frames else UNREACHABLE

    def nearest(self, frames: Frames) -> list[tuple[int, Frame]]:
        """(tokens to a complete output with neighbouring texts spelled as one, the reading that it continues) of the
        `MAX_SPELLED` cheapest readings, ascending."""
        cheapest = sorted(self._viable(frames), key=lambda frame: frame.rest)[:MAX_SPELLED]
        return sorted(((self._spelled_cost(frame), frame) for frame in cheapest), key=lambda pair: pair[0])

    def _viable(self, frames: Frames) -> Frames:
        """The readings that may be completed: with a lexer, those of the cheapest whose completion it reads alike."""
        if not self._lexed:
            return frames
        viable = self._viable_of.get(frames)
        if viable is None:
            cheapest = sorted(frames, key=lambda frame: frame.rest)[:MAX_SPELLED]
            viable = self._viable_of[frames] = tuple(frame for frame in cheapest if self._is_viable(frames, frame))
        return viable

    def _is_viable(self, frames: Frames, frame: Frame) -> bool:
        """Whether the cheapest completion of `frame` parses when it continues all of `frames`, as a lexer does."""
        if not 0 < frame.rest < UNREACHABLE:
            return frame.rest == 0
        symbols = tuple(itertools.islice(self._symbols(frame), LEXED_AHEAD))
        try:
            reached = self.step(frames, symbols, Fuel(MAX_STEPS))
        except TooAmbiguous:
            return False
        return reached is not None and (len(symbols) == LEXED_AHEAD or any(end.rest == 0 for end in reached))

    def _symbols(self, frame: Frame) -> Iterator[int]:
        vocabulary = self._costs.speller.vocabulary
        for piece in self._pieces(frame, to_the_end=True):
            if isinstance(piece, bytes):
                yield from piece.replace(BLANK, b"")
            else:
                yield from (symbol for token in piece[0] * piece[1] for symbol in vocabulary.symbols(token))

    def segments(self, frame: Frame) -> Iterator[Segment]:
        """The completion that `nearest` counted."""
        while True:
            yield from self._costs.segments(self._pieces(frame, frame.rest <= SPELLED_WHOLE))
            if frame.outer is None or frame.rest <= SPELLED_WHOLE:
                return
            frame = frame.outer

    def _pieces(self, frame: Frame, to_the_end: bool) -> Iterator[Piece]:
        """The cheapest text behind the dot of a frame, up to the end of its shape or `to_the_end` of the output."""
        current: Frame | None = frame
        while current is not None and current.outer is not None:
            at_index = isinstance(current.shape, (nodes.Repeat, nodes.Unordered, Words))
            yield from self._costs.pieces(current.shape, current.index if at_index else current.index + 1)
            current = current.outer if to_the_end else None

    def _spelled_cost(self, frame: Frame) -> int:
        """Tokens from a frame to the end of the output. Texts are spelled as one within a shape, and near the end
        across shapes."""
        total, uncached = 0, list[tuple[Frame, int]]()
        current: Frame | None = frame
        while current is not None and current.outer is not None:
            if current.rest >= UNREACHABLE:
                return UNREACHABLE
            is_last = current.rest <= SPELLED_WHOLE
            cost = current.spelled
            if cost is None:
                cost = token_count(self._costs.segments(self._pieces(current, is_last)))
                uncached.append((current, total))
            else:
                is_last = True
            total += cost
            current = None if is_last else current.outer
        for outer, inner_tokens in uncached:
            outer.spelled = total - inner_tokens
        return total

    def step(self, frames: Frames, symbols: Sequence[int], fuel: Fuel) -> Frames | None:
        """The readings behind `symbols`; None if there are none. Raises `TooAmbiguous` when `fuel` runs out."""
        next_frames = self._stepped.get((frames, symbols))
        if next_frames is None:
            next_frames = self._scan_all(frames, symbols, fuel)
            if next_frames is None:
                return None
            self._stepped[frames, symbols] = next_frames
        return next_frames

    def _scan_all(self, frames: Frames, symbols: Sequence[int], fuel: Fuel) -> Frames | None:
        offset = 0
        while frames and offset < len(symbols):
            consumed, (first, *other_frames) = 1, frames
            if other_frames:
                # the longest lexeme wins: readings that left theirs count only where none is inside one
                scanned = [self._scan(frame, symbols[offset], fuel) for frame in frames]
                within = dict.fromkeys(itertools.chain.from_iterable(inside for inside, _ in scanned))
                frames = tuple(within or dict.fromkeys(itertools.chain.from_iterable(left for _, left in scanned)))
            elif isinstance(first.shape, nodes.Literal):
                consumed, frames = self._scan_literal(first, symbols[offset:])
            else:
                inside, outside = self._scan(first, symbols[offset], fuel)
                frames = inside or outside
            offset += consumed
            fuel.left -= len(frames)
            if fuel.left < 0:
                raise TooAmbiguous
            if self._has_lazy:
                frames = tuple(dict.fromkeys(self._lazy_ends(frames, fuel))) or frames
        return frames or None

    def _scan_literal(self, frame: Frame, symbols: Sequence[int]) -> tuple[int, Frames]:
        """(symbols consumed, the one reading behind them) in a literal, at once; (0, ()) where a symbol differs."""
        assert isinstance(frame.shape, nodes.Literal)
        assert frame.outer is not None
        remaining = frame.shape.data[frame.index + 1 :]
        consumed = min(len(remaining), len(symbols))
        if any(map(operator.ne, remaining, symbols)):
            return 0, ()
        is_whole = consumed == len(remaining)
        index = frame.index + consumed
        return consumed, (frame.outer if is_whole else self._interned(frame.shape, index, frame.outer),)

    def _scan(self, frame: Frame, symbol: int, fuel: Fuel) -> tuple[Frames, Frames]:
        """Earley's scanner for one reading: (readings behind `symbol` inside the lexeme, readings that left it)."""
        if frame.outer is not None and isinstance(frame.shape, (nodes.Literal, Words)):
            scanned = tuple(self._scan_byte(frame.shape, frame.index, frame.outer, symbol))
            return (scanned, ()) if frame.in_lexeme else ((), scanned)
        transitions = frame.transitions
        if transitions is None:
            transitions = frame.transitions = {}
        known = transitions.get(symbol)  # not `frame.transitions`: another thread's `_forget` may have come between
        if known is None:
            known = transitions[symbol] = self._scan_behind(frame, symbol, fuel)
        return known

    def _scan_behind(self, frame: Frame, symbol: int, fuel: Fuel) -> tuple[Frames, Frames]:
        """The same for a dot between the parts of a shape. Where a shape may end, the frame around it goes on."""
        inside, outside = list[Frame](), list[Frame]()
        target = inside if frame.in_lexeme else outside
        current = frame
        while current.outer is not None:
            continuations = self._continuations(current.shape, current.index, fuel)
            for text, path in continuations.literals.get(symbol, ()):
                target += self._scan_byte(text, -1, self._push(path, current.outer), symbol)
            for shape, path in continuations.shapes:
                if not isinstance(shape, nodes.CharSet) or symbol >= 0x80:
                    target += self._scan_shape(shape, self._push(path, current.outer), symbol)
                elif shape.mask >> symbol & 1:
                    target.append(self._push(path, current.outer))
            if not continuations.may_end:
                break
            if isinstance(current.shape, nodes.Lexeme):
                target = outside
            current = current.outer
        return _unique(inside), _unique(outside)

    def _scan_shape(self, shape: nodes.Shape, outer: Frame, symbol: int) -> Iterable[Frame]:
        """Frames behind the first symbol of a terminal inside `outer`."""
        if isinstance(shape, nodes.CharSet):
            tails = shape.tails if symbol >= 0x80 else ()
            frames = [self._interned(tail, -1, outer) for low, high, tail in tails if low <= symbol <= high]
            return [outer, *frames] if shape.mask >> symbol & 1 else frames
        if isinstance(shape, nodes.SpecialToken):
            return [outer] if shape.symbol == symbol else []
        return self._scan_byte(shape, b"", outer, symbol)

    def _scan_byte(self, shape: nodes.Shape, index: Any, outer: Frame, byte: int) -> list[Frame]:
        """Frames behind `byte`, with the dot at `index` of a literal or in that state of words."""
        if isinstance(shape, nodes.Literal):
            if shape.data[index + 1] != byte:
                return []
            return [outer if index + 2 == len(shape.data) else self._interned(shape, index + 1, outer)]
        if byte >= 256:
            return []
        assert isinstance(shape, Words)
        state, ended = shape.on(index, byte)
        frames = [outer] if ended else []
        return frames if state is None else [*frames, self._interned(shape, state, outer)]

    def _lazy_ends(self, frames: Frames, fuel: Fuel) -> Iterator[Frame]:
        """The frames of lazy lexemes whose first end is reached: these lexemes go on no further."""
        for frame in frames:
            current: Frame | None = frame
            while current is not None and current.in_lexeme:
                is_text = isinstance(current.shape, (nodes.Literal, Words))
                ends = not is_text and self._continuations(current.shape, current.index, fuel).may_end
                current = current.outer if ends else None
            if current is not None and isinstance(current.shape, nodes.Lexeme) and current.shape.lazy:
                yield current

    def _continuations(self, shape: nodes.Shape, index: Any, fuel: Fuel) -> Continuations:
        continuations = self._continuations_of.get((shape, index))
        if continuations is None:
            try:
                continuations = self._continuations_of[shape, index] = Continuations(shape, index, MAX_STEPS)
            except nodes.Unmodelled as error:
                raise TooAmbiguous from error
            fuel.left -= continuations.expansions
        return continuations

    def _push(self, path: FramePath, outer: Frame) -> Frame:
        """The innermost frame after those of `path` were pushed onto `outer`."""
        levels = []
        while path is not None:
            levels.append(path)
            path = path[2]
        for shape, index, _ in reversed(levels):
            outer = self._interned(shape, index, outer)
        return outer

    def _interned(self, shape: nodes.Shape, index: Any, outer: Frame) -> Frame:
        key = id(shape), index, id(outer)  # both are alive, so the ids are theirs, as long as the frame is in the table
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= MAX_FRAMES:
                self._forget()
            frame = self._frames[key] = Frame(shape, index, outer, self._costs)
        return frame

    def _forget(self) -> None:
        """Drop all frames but those on the stacks of outputs that go on: transitions would keep the others alive."""
        dropped, self._frames = self._frames, {}
        self._viable_of, self._stepped = Memo(MAX_FRAMES), Memo(MAX_FRAMES)
        for frame in (*dropped.values(), *self.begin):
            frame.transitions = None


def _unique(frames: list[Frame]) -> Frames:
    return tuple(frames if len(frames) < 2 else dict.fromkeys(frames))
