"""Lexemes that may go on with one byte for ever: of these the library must not look for text that has to come.

Where no other lexeme can follow, what has to come has no end, and neither has the look for it (`/a+/ /a+/`: the first
takes all). Other endless rules are stopped by the library's limits.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncengine.grammar.shapes.automata import Words
from asyncengine.grammar.shapes.nodes import Chain, Either, Letters, Lexeme, Literal, Shape, Times, Unmodelled, within
from asyncengine.grammar.shapes.products import Product

MAX_SHAPES = 100_000
MAX_STATES = 64
"""States of a product that are looked at."""


def may_be_endless(root: Shape) -> bool:
    """Whether a lexeme of `root` may: true, where that is not known."""
    try:
        lexemes = [shape.body for shape in within(root, MAX_SHAPES) if isinstance(shape, Lexeme) and not shape.lazy]
    except Unmodelled:
        return True
    return any(_goes_on(shape) for body in lexemes for shape in _last(body))


def _last(shape: Shape) -> Iterator[Shape]:
    """The parts of a lexeme that it may end in."""
    todo, seen = [shape], set[Shape]()
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        yield here
        if isinstance(here, Chain):
            for item in reversed(here.items):
                todo.append(item)
                if not _empty(item):
                    break
        elif isinstance(here, Either):
            todo += here.items
        elif isinstance(here, Times):
            todo.append(here.body)


def _goes_on(shape: Shape) -> bool:
    if isinstance(shape, Product):
        return _states_go_on(shape)
    return isinstance(shape, Times) and shape.most is None and _single(shape.body)


def _single(shape: Shape) -> bool:
    """One byte leads on from each place within. May be true where another does as well."""
    if isinstance(shape, Letters):
        tails = shape.tails
        if shape.mask:
            return shape.mask.bit_count() == 1 and not tails
        return len(tails) == 1 and tails[0][0] == tails[0][1] and _single(tails[0][2])
    if isinstance(shape, (Chain, Either)):
        return all(map(_single, shape.items))
    return _single(shape.body) if isinstance(shape, Times) else True


def _empty(shape: Shape) -> bool:
    """It may be empty. May be true where it may not."""
    if isinstance(shape, (Letters, Literal)):
        return False
    if isinstance(shape, Chain):
        return all(map(_empty, shape.items))
    if isinstance(shape, Either):
        return any(map(_empty, shape.items))
    if isinstance(shape, Times):
        return shape.least == 0 or _empty(shape.body)
    return isinstance(shape, Product) or not isinstance(shape, Words) or b"" in shape.words[:1]


def _states_go_on(product: Product) -> bool:
    """States that are left by at most one kind of bytes each form a circle."""
    leaving: dict[object, object] = {}
    todo: list[object] = [b""]
    for state in todo:  # grows while it is walked
        found = [behind for byte in product.bytes if (behind := product.on(state, byte)[0]) is not None]
        leaving[state] = found[0] if len(found) == 1 else None
        new = [behind for behind in dict.fromkeys(found) if behind not in leaving and behind not in todo]
        todo += new
        if len(todo) > MAX_STATES:
            return True
    for state in todo:
        here: object = state
        for _ in todo:
            here = leaving.get(here)
        if here is not None:
            return True
    return False
