"""Lexemes that may go on with one byte for ever: of these the library must not look for text that has to come.

Where no other lexeme can follow, what has to come has no end, and neither has the look for it (`/a+/ /a+/`: the first
takes all). Other endless rules are stopped by the library's limits.
"""

from __future__ import annotations

import functools

from asyncengine.grammar.closing.prices import MAX_SHAPES
from asyncengine.grammar.shapes.nodes import Lexeme, Shape, Times, Unmodelled, within
from asyncengine.grammar.shapes.products import MAX_TRACKERS, Product

MAX_STATES = 64
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
        if len(todo) > MAX_STATES:
            return True
    for state in todo:
        here: object = state
        for _ in todo:
            here = leaving.get(here)
        if here is not None:
            return True
    return False
