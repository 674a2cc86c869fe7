"""The nearest complete output beside a growing one (contract line 15: budget-aware closing), by arithmetic.

`Closing` follows the output through the grammar's shape (`tracker`), which knows after each byte what the rest costs at
most, however long it is: a token is taken if that still fits. Tokens to steer by are made one at a time, and what comes
next of them is checked by the library. An output that the shape does not follow, or of whose ways the library takes
none, is not steered any more.

While the budget is farther from spent than any completion costs, every token fits: those are followed later, some with
each token that comes, so that most outputs are never followed: `farthest` is that cost, of any output of the grammar.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from asyncengine.errors import GrammarError
from asyncengine.grammar.closing.prices import Prices, Segment
from asyncengine.grammar.closing.tracker import MAX_STEPS, Effort, Frames, Lost, Position, Tracker
from asyncengine.grammar.schema.rules import MAX_NESTING
from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.automata import MORE_DIGITS, Multiples, OtherKey, Words
from asyncengine.grammar.shapes.nodes import Literal, Shape, Times, Unordered, span
from asyncengine.grammar.vocabulary import UNREACHABLE

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
PACE = 8
"""Tokens that are followed with each one, where an output that was not has to be at last."""
ACCOUNT, REFILL = 200_000, 100
"""The account of all readings of one output at first, and its growth by each byte."""


class Counted:
    """The common part of all outputs of one grammar: its shape and the prices in it."""

    def __init__(self, shape: Shape, prices: Prices, lexed: bool = False) -> None:
        """`lexed`: as for a `Tracker`."""
        self.prices = prices
        self.tracker = Tracker(shape, prices, lexed)
        self.cost = self.tracker.cost(self.tracker.begin)
        """Tokens of the cheapest output, as the sum of its parts."""
        self.most = UNREACHABLE if lexed else farthest(shape, prices)
        """Tokens of the dearest completion of an output. A lexer may read one otherwise than its shape says."""

    def way(self) -> Iterator[Segment]:
        """Tokens of the cheapest output."""
        return self.tracker.segments(self.tracker.begin[0])


def length(way: Iterable[Segment]) -> int:
    return sum(len(tokens) * times for tokens, times in way)


def unrolled(way: Iterable[Segment]) -> Iterator[int]:
    return (token for tokens, times in way for _ in range(times) for token in tokens)


class Closing:
    """The nearest complete output known from where one output stands. It moves along with one request's output.

    Invariant: tokens that fit, beginning with `first()`, lead to a complete output, unless it is `lost`: then every
    token is taken.
    """

    def __init__(self, source: LlgTemplate, counted: Counted, tokens: Iterable[int] = ()) -> None:
        """`tokens`: taken so far."""
        self._source = source
        self._vocabulary = source.backend.vocabulary
        self._tracker = counted.tracker
        self._frames = counted.tracker.begin
        """Empty where nothing is known of the output any more."""
        self._account = ACCOUNT
        self._said: list[int] = []
        """Tokens that were followed."""
        self._late = deque(tokens)
        """Tokens taken after those and not followed yet."""
        self._near = max(counted.most + 1, source.reach)
        """Tokens left with which an output has to be followed."""
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
        """All readings of the output: two that have the same may go on alike. None where that is not known."""
        return None if self._late else tuple([frame.number for frame in self._frames]) or None

    @property
    def lost(self) -> bool:
        """The output cannot be followed: nothing is known of its ends any more."""
        return not self._frames

    def first(self) -> int:
        """The next token on the way; an end-of-sequence id where the output may end here."""
        if not self._planned():
            raise GrammarError("grammar", "no way to a complete output is known")
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
        self.follow(everything=True)
        if self.lost or token in self._vocabulary.eos_ids:
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
            nearest = min(behind, key=lambda frame: frame.rest).shape
            if after > before and (symbol >= 256 or symbol in _BEGINS) and not isinstance(nearest, (Literal, Words)):
                room = max(room, (after - before) // 2 + SPARE)
            here, before = behind, after
        if closes and first and before >= first:
            return False
        if 0 < before == first and symbols[0] in _BLANKS:
            room = max(room, before // 2 + WORD)  # what has to follow shall have some room, too
        return not room or at_most - before >= room

    def follow(self, everything: bool = False) -> None:
        """Follow tokens that were taken without: the next `PACE` of them, or all."""
        for _ in range(len(self._late) if everything else min(PACE, len(self._late))):
            self._advance(self._late.popleft(), UNREACHABLE)

    def advance(self, token: int, at_most: int) -> bool:
        """Move past `token`, which the grammar allows, if a completion of at most `at_most` tokens is known from there,
        or if there may be one and `at_most` is far from 0. Else False, unmoved."""
        spare = at_most - self._near
        if spare < 0:
            self.follow(everything=True)
            return self._advance(token, at_most)
        self._late.append(token)
        if spare * (PACE - 1) < len(self._late):
            self.follow()
        return True

    def _advance(self, token: int, at_most: int) -> bool:
        if token in self._vocabulary.eos_ids:
            return not self._frames or self._tracker.cost(self._frames) == 0
        frames = self._step(token) or ()
        if self._plan is not None and token == self._next and self._left - 1 <= at_most:
            self._next = next(self._plan, None)
            self._left -= 1
        elif self._fits(frames, at_most):
            self._plan = None
        elif self._planned():
            return False
        else:
            frames = ()
        self._frames = frames
        self._said.append(token)
        return True

    def _step(self, token: int) -> Frames | None:
        """Past `token`; None where the shape does not follow it."""
        symbols = self._vocabulary.symbols(token)
        account = min(ACCOUNT, self._account + REFILL * len(symbols))
        effort = Effort(most := min(MAX_STEPS, account))
        try:
            return self._tracker.step(self._frames, symbols, effort)
        except Lost:
            return None
        finally:  # what was overspent is owed
            self._account = account - most + effort.left

    def _fits(self, frames: Frames, at_most: int) -> bool:
        """A way of at most `at_most` tokens leads on from there; or none is known, and the end is far."""
        cost = self._tracker.cost(frames)
        if cost <= at_most:
            return True
        if cost >= UNREACHABLE:
            return at_most >= FAR
        return cost <= CLOSE * at_most and any(way <= at_most for way, _ in self._tracker.nearest(frames))

    def _planned(self) -> bool:
        """See that there are tokens to steer by. False: there are none, or the library does not agree with any."""
        self.follow(everything=True)
        if self._plan is not None:
            return True
        for cost, frame in self._tracker.nearest(self._frames):
            tokens = unrolled(self._tracker.segments(frame)) if cost < UNREACHABLE else iter(())
            ahead = list(itertools.islice(tokens, AHEAD))
            if cost < UNREACHABLE and self._agreed(ahead):
                self._left = cost
                self._plan = itertools.chain(ahead, tokens)
                self._next = next(self._plan, None)
                return True
        return False

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


ROUNDS = MAX_NESTING + 2
"""Times that a shape may lie within itself: each opens a bracket."""
CANDIDATES = 63
"""Letters that `OtherKey` tries behind the beginning of a word, each of which only another word can take."""
KEY_END = 5
"""Bytes that it then takes to the end of the key, at most."""


def farthest(root: Shape, prices: Prices) -> int:
    """Tokens of the dearest completion of an output that has begun; `UNREACHABLE` or more where there is no limit.

    One pass over the shapes, innermost first. Those that lie within themselves, and those between such, are one: each
    round through them costs no more than the dearest step of each together.
    """
    return max(_within(root, prices), prices.cost(root))


def _within(root: Shape, prices: Prices) -> int:
    known: dict[Shape, int] = {}
    for part, own in prices.kept.items():
        own.dearest = known[part] = _within(part, own) if own.dearest is None else own.dearest
    below = nodes.peeled(prices.inner, prices.inner, prices.users)
    above: dict[Shape, None] = {}
    if len(below) < len(prices.inner):
        above = nodes.peeled(prices.inner, prices.users, prices.inner)
    circle = [shape for shape in prices.inner if shape not in below and shape not in above]
    for shape in below:
        if shape not in known:
            known[shape] = _dearest(shape, prices, known)
    if circle:
        leaving = max(_dearest(shape, prices, known) for shape in circle)
        inside = dict.fromkeys(circle, 0)
        total = leaving + ROUNDS * sum(_dearest(shape, prices, inside) for shape in circle)
        known.update(dict.fromkeys(circle, total))
    for shape in reversed(list(above)):
        if shape not in known:
            known[shape] = _dearest(shape, prices, known)
    return known[root]


def _dearest(shape: Shape, prices: Prices, known: dict[Shape, int]) -> int:
    """Tokens from the dearest position in a shape to its end: within a part of it that is in `known`, or between
    parts."""
    if isinstance(shape, nodes.Literal):
        return prices.speller.dearest(shape.data)
    if isinstance(shape, Words):
        return _of_words(shape, prices)
    return max((known[part] + after for part, after in _steps(shape, prices) if part in known), default=0)


def _steps(shape: Shape, prices: Prices) -> Iterator[tuple[Shape, int]]:
    """The parts of a shape, each with the cost of what may have to follow it."""
    if isinstance(shape, nodes.Chain):
        yield from ((item, prices.suffix(shape, index + 1)) for index, item in enumerate(shape.items))
    elif isinstance(shape, Times):
        unit = prices.unit_of(shape) if shape.least > 1 else None
        fewest = max(0, shape.least - 1 - (unit.rounds if unit else 1))  # a whole unit may cost less than part of it
        yield shape.body, max(prices.times(shape, count) for count in range(fewest, max(1, shape.least)))
    elif isinstance(shape, Unordered):
        costs = [prices.cost(item) for item in shape.items[len(shape.items) // 2 :]]
        more = max(0, shape.least - len(shape.needed)) * max(costs) if shape.counts else 0
        for index, item in enumerate(shape.items):
            yield item, more + sum(costs[other] for other in shape.needed if other != index % len(costs))
    elif isinstance(shape, nodes.Letters):
        yield from ((tail, prices.cost(tail)) for _, _, tail in shape.tails)
    elif isinstance(shape, (nodes.Either, nodes.Lexeme)):
        yield from ((part, 0) for part in nodes.parts(shape))


def _of_words(shape: Words, prices: Prices) -> int:
    if type(shape) is OtherKey and len(shape.words) < CANDIDATES:
        letters, most = span(0, 255), KEY_END
    elif type(shape) is Multiples:
        letters, most = span(45, 46) | span(48, 57), 2 * MORE_DIGITS
    elif type(shape) is Words:
        letters = functools.reduce(operator.or_, (1 << byte for byte in set(b"".join(shape.words))), 0)
        most = max(map(len, shape.words), default=0)
    else:
        return UNREACHABLE
    return UNREACHABLE if letters & ~prices.speller.letters else most
