"""The cheapest completion of a growing output (contract line 15: budget-aware closing), by arithmetic.

`Closing` parses the output beside the library (`recognizer`) and knows after each byte an upper bound on the tokens
that complete it, however many: a token is taken if that still fits the budget. The completion's tokens are made one at
a time, and the library checks the next ones of them. An output that the parser cannot follow, or none of whose
completions the library accepts, is not steered any more.

While the budget left exceeds what any completion costs (`farthest`), every token fits. Such tokens are parsed later, a
few with each token that comes, so that most outputs are never parsed at all.
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
from asyncengine.grammar.closing.costs import CostTable, Segment
from asyncengine.grammar.closing.recognizer import MAX_STEPS, Frames, Fuel, Position, Recognizer, TooAmbiguous
from asyncengine.grammar.schema.rules import MAX_NESTING
from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.automata import MORE_DIGITS, Multiples, OtherKey, Words
from asyncengine.grammar.shapes.nodes import Literal, Repeat, Shape, Unordered, span
from asyncengine.grammar.vocabulary import UNREACHABLE

if TYPE_CHECKING:
    from asyncengine.grammar.llguidance_backend import LlgTemplate


CHECKED_AHEAD = 64
"""Tokens of a completion that the library checks."""
FAR = 256
"""Tokens left with which an output whose completion is unknown may still go on."""
CLOSE = 4
"""A completion is spelled as a whole if its upper bound is at most this many times the budget: spelled, it mostly takes
half of the bound."""
ROOM, WORD_ROOM = 2, 1
"""Tokens to spare with which a value may still be opened, and a word of free text begun, beside half of the cost."""
_BLANKS = frozenset(b" \t\r\n")
_BEGINS = frozenset(b',[{"<(')
"""Bytes with which an item, a member, a list, an object, a call or a text begins."""
CATCH_UP = 8
"""Waiting tokens that are parsed with each new one once the budget comes near to `Closing._near`."""
FUEL, FUEL_PER_SYMBOL = 200_000, 100
"""Fuel for parsing one output at first, and what each of its symbols adds."""


class ClosingTables:
    """The parser and the costs that all outputs of one grammar share."""

    def __init__(self, shape: Shape, costs: CostTable, lexed: bool = False) -> None:
        """`lexed`: as for a `Recognizer`."""
        self.costs = costs
        self.recognizer = Recognizer(shape, costs, lexed)
        self.cost = self.recognizer.cost(self.recognizer.begin)
        """Upper bound on the tokens of the cheapest output."""
        self.farthest = UNREACHABLE if lexed else farthest(shape, costs)
        """Upper bound on the completion of any output. With a lexer there is none: it may read text otherwise."""

    def cheapest(self) -> Iterator[Segment]:
        """Tokens of the cheapest output."""
        return self.recognizer.segments(self.recognizer.begin[0])


def unrolled(segments: Iterable[Segment]) -> Iterator[int]:
    return (token for tokens, times in segments for _ in range(times) for token in tokens)


class Closing:
    """The cheapest known completion of one request's output, updated with each token.

    Invariant: tokens that fit the budget lead to a complete output, beginning with `first()`; unless the output is
    `lost`, for then every token is taken.
    """

    def __init__(self, template: LlgTemplate, tables: ClosingTables, tokens: Iterable[int] = ()) -> None:
        """`tokens`: those of the output so far."""
        self._template = template
        self._vocabulary = template.backend.vocabulary
        self._recognizer = tables.recognizer
        self._frames = tables.recognizer.begin
        """Empty once the output is lost."""
        self._fuel = FUEL
        self._followed: list[int] = []
        """Tokens that were parsed."""
        self._waiting = deque(tokens)
        """Tokens behind those, not parsed yet."""
        self._near = max(tables.farthest + 1, template.reach)
        """Tokens left with which an output has to be parsed up to its last token."""
        self._matcher: Any = None
        """The library's matcher behind the first `_checked` parsed tokens; None until the first check."""
        self._checked = 0
        self._trusted = False
        """The library failed, so that completions are used unchecked."""
        self._plan: Iterator[int] | None = None
        """Tokens of the completion behind `_next`; None: no completion was made for this position."""
        self._next: int | None = None
        """First token of the completion; None where the output may end."""
        self._left = 0
        """Tokens of the completion."""

    @property
    def position(self) -> Position | None:
        """The parser's state: outputs at one position have the same continuations. None if the output is lost, or not
        parsed up to its last token."""
        return None if self._waiting else tuple([frame.number for frame in self._frames]) or None

    @property
    def lost(self) -> bool:
        """The output cannot be parsed, so that no completion of it is known."""
        return not self._frames

    def first(self) -> int:
        """The first token of the completion, an end-of-sequence id where the output may end here. Raises `GrammarError`
        if no completion is known."""
        if not self._has_plan():
            raise GrammarError("grammar", "no way to a complete output is known")
        return self._vocabulary.eos_ids[0] if self._next is None else self._next

    def is_equivalent(self, token: int, replacement: int) -> bool:
        """Whether `replacement` leads to the output that `token` leads to, blanks aside: one writes what the other does
        and then only text that the grammar forces."""
        if replacement in self._vocabulary.eos_ids:
            return False
        written = (
            (one, [*itertools.filterfalse(_BLANKS.__contains__, self._vocabulary.symbols(one))])
            for one in (token, replacement)
        )
        (shorter, prefix), (_, longer) = sorted(written, key=lambda pair: len(pair[1]))
        return longer[: len(prefix)] == prefix and self._is_forced(self._step(shorter), longer[len(prefix) :])

    def _is_forced(self, frames: Frames | None, symbols: list[int]) -> bool:
        """Whether nothing but `symbols` can come behind `frames`, blanks aside."""
        step, fuel = self._recognizer.step, Fuel(MAX_STEPS)
        with contextlib.suppress(TooAmbiguous):
            for symbol in symbols:
                others = (one for one in range(self._vocabulary.end) if one != symbol and one not in _BLANKS)
                if not frames or any(step(frames, (other,), fuel) for other in others):
                    return False
                frames = step(frames, (symbol,), fuel)
            return True
        return False

    def leaves_room(self, token: int, at_most: int, closes: bool = False) -> bool:
        """Whether the budget behind `token` suffices for more than the shortest form of what it opens, and for a word
        where it begins one; `closes`: and the token brings the end nearer, unless the output is complete. True if that
        is unknown. Whether the token fits at all is not asked."""
        self.follow(everything=True)
        if self.lost or token in self._vocabulary.eos_ids:
            return True
        symbols, frames, needed_room = self._vocabulary.symbols(token), self._frames, 0
        first_cost = cost_before = self._recognizer.cost(frames)
        for symbol in symbols:
            try:
                next_frames = self._recognizer.step(frames, (symbol,), Fuel(MAX_STEPS))
            except TooAmbiguous:
                return True
            if next_frames is None:
                return True
            cost_after = self._recognizer.cost(next_frames)
            # literals and listed words are as long as they are: more room would change nothing in them
            is_fixed = isinstance(min(next_frames, key=lambda frame: frame.rest).shape, (Literal, Words))
            if cost_after > cost_before and (symbol >= 256 or symbol in _BEGINS) and not is_fixed:
                needed_room = max(needed_room, (cost_after - cost_before) // 2 + ROOM)
            frames, cost_before = next_frames, cost_after
        if closes and first_cost and cost_before >= first_cost:
            return False
        if 0 < cost_before == first_cost and symbols[0] in _BLANKS:
            needed_room = max(needed_room, cost_before // 2 + WORD_ROOM)  # the required rest wants some room, too
        return not needed_room or at_most - cost_before >= needed_room

    def follow(self, everything: bool = False) -> None:
        """Parse waiting tokens: the next `CATCH_UP` of them, or all."""
        for _ in range(len(self._waiting) if everything else min(CATCH_UP, len(self._waiting))):
            self._advance(self._waiting.popleft(), UNREACHABLE)

    def advance(self, token: int, at_most: int) -> bool:
        """Move past `token`, which the grammar allows, if a completion of at most `at_most` tokens is known behind it,
        or if none is known and `at_most` is large. Else False, unmoved."""
        spare = at_most - self._near
        if spare < 0:
            self.follow(everything=True)
            return self._advance(token, at_most)
        self._waiting.append(token)
        # each token takes one from `spare` and CATCH_UP - 1 from the backlog: so the backlog is gone when `spare` is
        if spare * (CATCH_UP - 1) < len(self._waiting):
            self.follow()
        return True

    def _advance(self, token: int, at_most: int) -> bool:
        if token in self._vocabulary.eos_ids:
            return not self._frames or self._recognizer.cost(self._frames) == 0
        frames = self._step(token) or ()
        if self._plan is not None and token == self._next and self._left - 1 <= at_most:
            self._next = next(self._plan, None)
            self._left -= 1
        elif self._fits(frames, at_most):
            self._plan = None
        elif self._has_plan():
            return False
        else:
            frames = ()
        self._frames = frames
        self._followed.append(token)
        return True

    def _step(self, token: int) -> Frames | None:
        """The readings behind `token`; None if there are none, or more than the fuel suffices for."""
        symbols = self._vocabulary.symbols(token)
        available = min(FUEL, self._fuel + FUEL_PER_SYMBOL * len(symbols))
        fuel = Fuel(allowance := min(MAX_STEPS, available))
        try:
            return self._recognizer.step(self._frames, symbols, fuel)
        except TooAmbiguous:
            return None
        finally:  # the last step may overdraw its fuel: later ones pay for that
            self._fuel = available - allowance + fuel.left

    def _fits(self, frames: Frames, at_most: int) -> bool:
        """Whether a completion of at most `at_most` tokens is known; or none is known, and `at_most` is large."""
        cost = self._recognizer.cost(frames)
        if cost <= at_most:
            return True
        if cost >= UNREACHABLE:
            return at_most >= FAR
        return cost <= CLOSE * at_most and any(tokens <= at_most for tokens, _ in self._recognizer.nearest(frames))

    def _has_plan(self) -> bool:
        """Make a completion, if none is at hand. False: none is known that the library accepts."""
        self.follow(everything=True)
        if self._plan is not None:
            return True
        for cost, frame in self._recognizer.nearest(self._frames):
            tokens = unrolled(self._recognizer.segments(frame)) if cost < UNREACHABLE else iter(())
            ahead = list(itertools.islice(tokens, CHECKED_AHEAD))
            if cost < UNREACHABLE and self._library_accepts(ahead):
                self._left = cost
                self._plan = itertools.chain(ahead, tokens)
                self._next = next(self._plan, None)
                return True
        return False

    def _library_accepts(self, ahead: list[int]) -> bool:
        if self._trusted:
            return True
        if self._matcher is None:
            self._matcher = self._template.new_matcher()
        matcher, unchecked = self._matcher, self._followed[self._checked :]
        consumed = matcher.try_consume_tokens(unchecked)
        self._checked += consumed
        accepted = consumed == len(unchecked) and matcher.validate_tokens(ahead) == len(ahead)
        if not accepted:
            matcher.compute_bitmask()  # a broken lexer refuses silently and reports its error with a mask only
            if matcher.is_error():
                self._template.spoil()
                self._trusted = True
                return True
        return bool(accepted)


ROUNDS = MAX_NESTING + 2
"""Times that a shape may lie within itself: each opens a bracket."""
CANDIDATES = 63
"""Characters that `OtherKey.endings` tries behind a prefix: with fewer words than that, one of them is free."""
KEY_END = 5
"""Most bytes that then complete the key."""


def farthest(root: Shape, costs: CostTable) -> int:
    """Upper bound on the tokens that complete any output that has begun; `UNREACHABLE` or more if there is none.

    One pass over the shapes in topological order. Shapes on cycles, and those between cycles, are counted together: a
    round through them costs at most the sum of the most expensive step of each.
    """
    return max(_farthest_rest(root, costs), costs.cost(root))


def _farthest_rest(root: Shape, costs: CostTable) -> int:
    known: dict[Shape, int] = {}
    for child, table in costs.kept.items():
        table.farthest = known[child] = _farthest_rest(child, table) if table.farthest is None else table.farthest
    before_cycles = nodes.acyclic_order(costs.children, costs.children, costs.parents)
    behind_cycles: dict[Shape, None] = {}
    if len(before_cycles) < len(costs.children):
        behind_cycles = nodes.acyclic_order(costs.children, costs.parents, costs.children)
    cyclic = [shape for shape in costs.children if shape not in before_cycles and shape not in behind_cycles]
    for shape in before_cycles:
        if shape not in known:
            known[shape] = _rest_within(shape, costs, known)
    if cyclic:
        exit_cost = max(_rest_within(shape, costs, known) for shape in cyclic)
        zeros = dict.fromkeys(cyclic, 0)
        total = exit_cost + ROUNDS * sum(_rest_within(shape, costs, zeros) for shape in cyclic)
        known.update(dict.fromkeys(cyclic, total))
    for shape in reversed(list(behind_cycles)):
        if shape not in known:
            known[shape] = _rest_within(shape, costs, known)
    return known[root]


def _rest_within(shape: Shape, costs: CostTable, known: dict[Shape, int]) -> int:
    """Tokens from the most expensive position in a shape to its end: between its children, or within one of those whose
    own figure is `known`."""
    if isinstance(shape, nodes.Literal):
        return costs.speller.farthest(shape.data)
    if isinstance(shape, Words):
        return _rest_of_words(shape, costs)
    children = _children_with_suffix(shape, costs)
    return max((known[child] + suffix_cost for child, suffix_cost in children if child in known), default=0)


def _children_with_suffix(shape: Shape, costs: CostTable) -> Iterator[tuple[Shape, int]]:
    """The children of a shape, each with the most that what has to follow it costs."""
    if isinstance(shape, nodes.Concat):
        yield from ((item, costs.suffix(shape, index + 1)) for index, item in enumerate(shape.items))
    elif isinstance(shape, Repeat):
        unit = costs.unit_of(shape) if shape.least > 1 else None
        fewest = max(0, shape.least - 1 - (unit.rounds if unit else 1))  # fewer rounds may cost more than a whole unit
        yield shape.body, max(costs.times(shape, count) for count in range(fewest, max(1, shape.least)))
    elif isinstance(shape, Unordered):
        member_costs = [costs.cost(item) for item in shape.items[len(shape.items) // 2 :]]
        extra = max(0, shape.least - len(shape.needed)) * max(member_costs) if shape.counts else 0
        for index, item in enumerate(shape.items):
            rest = [member_costs[needed] for needed in shape.needed if needed != index % len(member_costs)]
            yield item, extra + sum(rest)
    elif isinstance(shape, nodes.CharSet):
        yield from ((tail, costs.cost(tail)) for _, _, tail in shape.tails)
    elif isinstance(shape, (nodes.Choice, nodes.Lexeme)):
        yield from ((child, 0) for child in nodes.children(shape))


def _rest_of_words(shape: Words, costs: CostTable) -> int:
    if type(shape) is OtherKey and len(shape.words) < CANDIDATES:
        alphabet, longest = span(0, 255), KEY_END
    elif type(shape) is Multiples:
        alphabet, longest = span(45, 46) | span(48, 57), 2 * MORE_DIGITS
    elif type(shape) is Words:
        alphabet = functools.reduce(operator.or_, (1 << byte for byte in set(b"".join(shape.words))), 0)
        longest = max(map(len, shape.words), default=0)
    else:
        return UNREACHABLE
    return UNREACHABLE if alphabet & ~costs.speller.single_bytes else longest
