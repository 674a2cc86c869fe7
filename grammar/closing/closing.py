"""The nearest complete output beside a growing one (contract line 15: budget-aware closing), by arithmetic.

`Closing` follows the output through the grammar's shape (`tracker`), which knows after each byte what the rest costs at
most, however long it is: a token is taken if that still fits. Tokens to steer by are made one at a time, and what comes
next of them is checked by the library. Where the library says otherwise, it is followed in place of the shape, and ways
are looked for with it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from asyncengine.errors import GrammarError
from asyncengine.grammar.closing.prices import Prices, Segment
from asyncengine.grammar.closing.search import Effort
from asyncengine.grammar.closing.spelling import UNREACHABLE
from asyncengine.grammar.closing.tracker import MAX_STEPS, Frame, Frames, Lost, Position, Tracker
from asyncengine.grammar.shapes.automata import Words
from asyncengine.grammar.shapes.nodes import Literal, Opaque, Shape
from asyncengine.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from asyncengine.grammar.llguidance_backend import LlgTemplate

AHEAD = 64
"""Tokens of a way that are checked by the library."""
FAR = 256
"""Tokens left with which the end is far."""
CLOSE = 4
"""Times the budget that a way may cost by its parts to be spelled as a whole: mostly it takes half of that."""
SPARE, WORD = 2, 1
"""Tokens left over with which something may still be begun, beside half of what it costs, and a word of free text."""
_BLANKS = frozenset(b" \t\r\n")
_BEGINS = frozenset(b',[{"<(')
"""Bytes with which an item, a member, a list, an object, a call or a text begins."""
ACCOUNT, REFILL = 200_000, 100
"""The account of all readings of one output at first, and its growth by each byte."""


def _is_fixed(frames: Frames) -> bool:
    nearest = min(frames, key=lambda frame: frame.rest)
    return isinstance(nearest, Frame) and isinstance(nearest.shape, (Literal, Words))


class Counted:
    """The common part of all outputs of one grammar: its shape and the prices in it."""

    def __init__(self, shape: Shape, prices: Prices, leaf: Callable[[Opaque], Any], lexed: bool = False) -> None:
        """`lexed`: as for a `Tracker`."""
        self.prices = prices
        self.tracker = Tracker(shape, prices, leaf, lexed)
        self.cost = self.tracker.cost(self.tracker.begin)
        """Tokens of the cheapest output, as the sum of its parts."""

    def way(self) -> Iterator[Segment]:
        """Tokens of the cheapest output."""
        return self.tracker.segments(self.tracker.begin[0])


def length(way: Iterable[Segment]) -> int:
    return sum(len(tokens) * times for tokens, times in way)


def unrolled(way: Iterable[Segment]) -> Iterator[int]:
    return (token for tokens, times in way for _ in range(times) for token in tokens)


class Closing:
    """The nearest complete output known from where one output stands. It moves along with one request's output.

    Invariant: `cost` tokens, beginning with `first()`, lead to a complete output. Where none is known, `cost` is beyond
    all budgets and `first()` raises `GrammarError`: a token is not forbidden for that while the budget is far from
    spent.
    """

    def __init__(self, source: LlgTemplate, counted: Counted, vocabulary: Vocabulary) -> None:
        self._source = source
        self._vocabulary = vocabulary
        self._tracker = counted.tracker
        self._frames = counted.tracker.begin
        """Empty where nothing is known of it."""
        self._effort = Effort(ACCOUNT)
        self._said: list[int] = []
        self.alone = False
        """The library is followed in place of the shape, or cannot be."""
        self._matcher: Any = None
        """Behind the first `_checked` tokens that were said; None: not needed so far."""
        self._checked = 0
        self._trusted = False
        """The library failed: what the shape says has to do."""
        self._plan: Iterator[int] | None = None
        """Behind the next token of the way known; None: it has to be made."""
        self._next: int | None = None
        self._left = 0
        """Tokens of the way."""

    @property
    def position(self) -> Position | None:
        """All readings of the output: two that have the same may go on alike. None where that is not known: in what
        only the library knows."""
        numbers = tuple([frame.number for frame in self._frames if isinstance(frame, Frame)])
        return numbers if numbers and len(numbers) == len(self._frames) else None

    @property
    def cost(self) -> int:
        """Tokens to a complete output, end-of-sequence not counted; 0 where the output may end here."""
        return self._left if self._plan is not None else self._tracker.nearest(self._frames)[0]

    def first(self) -> int:
        """The next token on the way; an end-of-sequence id where `cost` is 0."""
        if not self._planned():
            self._follow_library()
            if not self._planned():
                raise GrammarError("grammar", "no way to a complete output was found in time")
        return self._vocabulary.eos_ids[0] if self._next is None else self._next

    def is_meant(self, token: int, other: int) -> bool:
        """Whether `other` writes nothing that an output which goes on with `token` would not: what that token says
        itself, blanks aside, and else what nothing but blanks could stand in the place of."""
        if other in self._vocabulary.eos_ids:
            return False
        (short, said), (_, whole) = sorted(
            ((one, [each for each in self._vocabulary.symbols(one) if each not in _BLANKS]) for one in (token, other)),
            key=lambda pair: len(pair[1]),
        )
        return whole[: len(said)] == said and self._forced(self._step(short), whole[len(said) :])

    def _forced(self, frames: Frames | None, symbols: list[int]) -> bool:
        """Whether these are all that can come behind `frames`, blanks aside."""
        step, effort = self._tracker.step, Effort(MAX_STEPS)
        with contextlib.suppress(Lost):
            for symbol in symbols:
                others = (each for each in range(self._vocabulary.end) if each != symbol and each not in _BLANKS)
                if not frames or any(step(frames, (each,), effort) for each in others):
                    return False
                frames = step(frames, (symbol,), effort)
            return True
        return False

    def is_apt(self, token: int, at_most: int, closes: bool = False) -> bool:
        """Whether `token`, of which it is not asked whether it fits, leaves room to say what it begins, and does not
        begin a word where none has room; `closes`: and brings the end nearer, if that is not here. True where it is not
        known."""
        if self.alone or token in self._vocabulary.eos_ids:
            return True
        symbols, here, room = self._vocabulary.symbols(token), self._frames, 0
        first = before = self._tracker.cost(here)
        for symbol in symbols:
            try:
                behind = self._tracker.step(here, (symbol,), Effort(MAX_STEPS))
            except Lost:
                return True
            if behind is None:
                return True
            after = self._tracker.cost(behind)
            # a value that is listed, or a key that was begun, has no room to ask for
            if after > before and (symbol >= 256 or symbol in _BEGINS) and not _is_fixed(behind):
                room = max(room, (after - before) // 2 + SPARE)
            here, before = behind, after
        if closes and first and before >= first:
            return False
        if 0 < before == first and symbols[0] in _BLANKS:
            room = max(room, before // 2 + WORD)  # what has to follow shall have some room, too
        return not room or at_most - before >= room

    def advance(self, token: int, at_most: int) -> bool:
        """Move past `token` if a completion of at most `at_most` tokens is known from there, or if there may be one and
        `at_most` is far from 0. Else False, unmoved."""
        if token in self._vocabulary.eos_ids:
            return not self._frames or self._tracker.cost(self._frames) == 0
        frames = self._step(token)
        if frames is None and not self.alone:
            self._follow_library()
            frames = self._step(token)
        frames = frames or ()
        if self._plan is not None and token == self._next and self._left - 1 <= at_most:
            self._next = next(self._plan, None)
            self._left -= 1
        elif self._fits(frames, at_most):
            self._plan = None
        elif self._planned() or self.alone:
            return False
        else:
            self._follow_library()
            return self.advance(token, at_most)
        self._frames = frames
        self._said.append(token)
        return True

    def _step(self, token: int) -> Frames | None:
        """Past `token`; None where the shape does not follow it."""
        symbols = self._vocabulary.symbols(token)
        self._effort.left = min(ACCOUNT, self._effort.left + REFILL * len(symbols))
        effort = self._effort.part(min(MAX_STEPS, self._effort.left))
        try:
            return self._tracker.step(self._frames, symbols, effort)
        except Lost:
            return None
        finally:
            self._effort.regain(effort)

    def _fits(self, frames: Frames, at_most: int) -> bool:
        """A way of at most `at_most` tokens leads on from there; or none was found so far, and the end is far
        or there is nothing else to do."""
        cost = self._tracker.cost(frames)
        if cost <= at_most:
            return True
        if cost >= UNREACHABLE:
            return at_most >= FAR or (self.alone and self.cost >= UNREACHABLE)
        return cost <= CLOSE * at_most and self._tracker.nearest(frames)[0] <= at_most

    def _planned(self) -> bool:
        """See that there are tokens to steer by. False: the library does not agree with them."""
        if self._plan is not None:
            return True
        cost, frame = self._tracker.nearest(self._frames)
        if cost >= UNREACHABLE:
            return False
        tokens = unrolled(self._tracker.segments(frame))
        ahead = list(itertools.islice(tokens, AHEAD))
        if not self._agreed(ahead):
            return False
        self._left = cost
        self._plan = itertools.chain(ahead, tokens)
        self._next = next(self._plan, None)
        return True

    def _agreed(self, ahead: list[int]) -> bool:
        if self._trusted:
            return True
        if self._matcher is None:
            self._matcher = self._source.new_matcher()
        matcher, behind = self._matcher, self._said[self._checked :]
        taken = matcher.try_consume_tokens(behind)
        self._checked += taken
        agreed = taken == len(behind) and matcher.validate_tokens(ahead) == len(ahead)
        if not agreed:
            matcher.compute_bitmask()  # says what a broken lexer keeps to itself when it refuses
            if matcher.is_error():
                self._source.spoil()
                self._trusted = True
                return True
        return bool(agreed)

    def _follow_library(self) -> None:
        """The shape does not say what the library does: from now on search with the library, if that can follow."""
        if self.alone:
            return
        self.alone, self._plan, self._frames = True, None, ()
        matcher = self._source.new_bytes()
        symbols = [symbol for token in self._said for symbol in self._vocabulary.symbols(token)]
        with contextlib.suppress(GrammarError):
            tracker = self._source.searched().tracker
            if matcher.try_consume_tokens(symbols) == len(symbols):
                self._tracker, self._frames = tracker, tracker.inside(matcher)
