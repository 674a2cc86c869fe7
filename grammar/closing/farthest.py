"""The cost of the dearest completion of any output of a grammar, in tokens: while more of a budget is left, every token
fits, and the output's position in the grammar need not be known."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

from asyncengine.grammar.closing.prices import Prices
from asyncengine.grammar.schema.rules import MAX_NESTING
from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.automata import MORE_DIGITS, Multiples, OtherKey, Words
from asyncengine.grammar.shapes.nodes import Shape, Times, Unordered, span
from asyncengine.grammar.vocabulary import UNREACHABLE

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
