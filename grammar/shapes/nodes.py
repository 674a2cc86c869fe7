"""The syntax tree of a grammar: characters, concatenations, choices, and repetitions that keep their counts.

A repetition that an automaton unrolls (`.{2000}` is two thousand states) stays one node here, so that the length of
its shortest text is arithmetic (`closing.costs`) and a position in it is a count (`closing.recognizer`).
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

MAX_CODE = 0x10FFFF
_LENGTHS = (
    (0, 0x7F, 0, 0), (0x80, 0x7FF, 6, 0xC0), (0x800, 0xD7FF, 12, 0xE0), (0xE000, 0xFFFF, 12, 0xE0),
    (0x10000, MAX_CODE, 18, 0xF0),
)  # fmt: skip
"""(first, last, shift, mark) of the code points of one length in UTF-8: the bits behind the first byte, and those that
mark it. Surrogates are in none."""
Ranges = list[tuple[int, int]]
"""Sets of code points as (first, last), both included; ascending, with gaps between them."""


class Unmodelled(Exception):
    """A grammar has no shape, or too large a one. Never leaves the package."""


class Shape:
    """A set of texts. Compared by identity: shapes may lead into themselves."""

    __slots__ = ()
    begin: Any = -1
    """The index of a dot in front of it (`recognizer.Frame`)."""


class CharSet(Shape):
    """One character of a set, or one byte of a character."""

    __slots__ = ("mask", "tails")

    def __init__(self, mask: int, tails: Sequence[tuple[int, int, Shape]] = ()) -> None:
        """`mask`: bit b for byte b by itself. `tails`: (lowest, highest first byte, the shape of the bytes behind)."""
        self.mask = mask
        self.tails = tails


class Literal(Shape):
    """One text, not empty."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class Concat(Shape):
    __slots__ = ("items",)

    def __init__(self, items: Sequence[Shape]) -> None:
        self.items = tuple(items)


class Choice(Shape):
    __slots__ = ("items",)

    def __init__(self, items: Sequence[Shape]) -> None:
        self.items = tuple(items)


class Repeat(Shape):
    __slots__ = ("body", "least", "most")
    begin = 0

    def __init__(self, body: Shape, least: int, most: int | None) -> None:
        self.body = body
        self.least = least
        self.most = most


class Unordered(Shape):
    """Members in any order, each but the undeclared ones once, with a comma between them.

    A state is the set of members so far (bit i: member i).
    """

    __slots__ = ("again", "comma", "counts", "free", "items", "least", "members", "most", "needed", "one")
    begin = 0

    def __init__(
        self, pairs: Sequence[Shape], free: Shape | None, comma: Sequence[Shape], needed: Sequence[int], one: Shape,
        bounds: tuple[int, int | None] = (1, None),
    ) -> None:  # fmt: skip
        """`pairs`: the declared members; `free`: an undeclared one; `needed`: the indices of those that must come, with
        `free` behind the declared ones; `one`: a choice of all; `bounds`: least and most members without `free`."""
        self.needed = needed
        self.one = one
        self.least, self.most = bounds
        self.counts = bool(needed) or self.least > 1
        """The cheapest member alone is not enough."""
        self.put(pairs, free, comma)

    def put(self, pairs: Iterable[Shape], free: Shape | None, comma: Sequence[Shape]) -> None:
        """Replace the members and the comma."""
        self.free, self.comma = free, comma
        self.members = (*pairs, *([free] if free else []))
        self.again = len(self.members) - 1 if free else None
        """The index of undeclared members."""
        self.items: tuple[Shape, ...] = ()
        """The members, then each of them behind a comma. Set by `resolve`."""

    @property
    def pairs(self) -> tuple[Shape, ...]:
        return self.members[: self.again]

    def following(self, state: int) -> Iterator[tuple[Shape, int]]:
        """(member with its comma, state behind it) of those that may come next."""
        width = len(self.members)
        full = self.most is not None and state.bit_count() >= self.most
        for index in range(0 if full else width):
            if not state >> index & 1 or index == self.again:
                yield self.items[index + width if state else index], state | 1 << index

    def left(self, state: int) -> list[Shape]:
        """The cheapest way to enough members: those still needed, then others up to the least number, with commas."""
        width = len(self.members)
        indices = [index for index in self.needed if not state >> index & 1]
        if (missing := self.least - state.bit_count() - len(indices)) > 0 and self.least > 1:
            indices += [index for index in range(width) if not state >> index & 1 and index not in indices][:missing]
        return [self.items[index + width if state or position else index] for position, index in enumerate(indices)]


class Lexeme(Shape):
    """Texts of which a lexer takes the longest (`lazy`: the shortest) before the parser goes on."""

    __slots__ = ("body", "lazy")

    def __init__(self, body: Shape, lazy: bool = False) -> None:
        self.body = body
        self.lazy = lazy


class SpecialToken(Shape):
    """A special token."""

    __slots__ = ("symbol", "token")

    def __init__(self, token: int, symbol: int) -> None:
        """`symbol`: its symbol in the byte vocabulary (`Vocabulary.symbols`)."""
        self.token = token
        self.symbol = symbol


class Terminal(Shape):
    """Stands for the shape of Lark text, which the library gets as it is; with an `end`, a Lark literal, for the
    shortest texts that are followed by that."""

    __slots__ = ("end", "text")

    def __init__(self, text: str, end: str = "") -> None:
        self.text = text
        self.end = end


class Rule(Shape):
    """A nonterminal, which stands for the shape of its rule while others are made."""

    __slots__ = ("alternatives", "target")

    target: Shape

    def __init__(self) -> None:
        self.alternatives: list[list[Shape]] = []
        """Its productions while they are made."""


NOTHING = Concat(())
Composite = Concat | Choice | Repeat | Unordered


def resolve(composites: Iterable[Composite], first: Shape) -> Shape:
    """Replace rules by the shapes that they stand for: kept as nodes, they would be half of all shapes."""
    for shape in composites:
        if isinstance(shape, Repeat):
            shape.body = _resolved(shape.body)
        elif isinstance(shape, Unordered):
            members, comma = [*map(_resolved, shape.members)], [*map(_resolved, shape.comma)]
            shape.items = (*members, *(Concat([*comma, member]) for member in members))
        else:
            shape.items = tuple(map(_resolved, shape.items))
    return _resolved(first)


def _resolved(shape: Shape) -> Shape:
    while isinstance(shape, Rule):
        shape = shape.target
    return shape


def literal(data: bytes) -> Shape:
    return Literal(data) if data else NOTHING


def concat(items: Iterable[Shape]) -> Shape:
    """A concatenation in which neighbouring literals are merged."""
    merged: list[Shape] = []
    for item in items:
        shape = item
        if isinstance(item, CharSet) and item.mask.bit_count() == 1 and not item.tails:
            shape = Literal(bytes([item.mask.bit_length() - 1]))
        if merged and isinstance(shape, Literal) and isinstance(last := merged[-1], Literal):
            merged[-1] = Literal(last.data + shape.data)
        else:
            merged.append(shape)
    return merged[0] if len(merged) == 1 else Concat(merged)


def letters(ranges: Ranges) -> Shape:
    """One character of `ranges`, in UTF-8. Surrogates, which it cannot spell, are left out."""
    mask = 0
    tails: list[tuple[int, int, Shape]] = []
    for low, high, shift, mark in _LENGTHS:
        in_range = intersection(ranges, [(low, high)])
        charset = _bytes(tuple(in_range), shift, mark)
        mask |= charset.mask
        tails += charset.tails
    if not mask and not tails:
        raise Unmodelled
    return CharSet(mask, tails)


@functools.lru_cache(4096)
def _bytes(ranges: tuple[tuple[int, int], ...], shift: int, mark: int) -> CharSet:
    """A character of which the bits below `shift + 6` are left to encode. The next byte is `mark` plus the bits of the
    code from `shift` on; one more follows for each six bits below."""
    if not shift:
        return CharSet(sum(span(mark | first, mark | last) for first, last in ranges))
    by_lead: dict[int, list[tuple[int, int]]] = {}
    below = (1 << shift) - 1
    for first, last in ranges:
        for lead in range(first >> shift, (last >> shift) + 1):
            rest = max(first, lead << shift) & below, min(last, lead << shift | below) & below
            by_lead.setdefault(lead, []).append(rest)
    tails: list[tuple[int, int, Shape]] = []
    for lead, rests in by_lead.items():
        shape = _tail(tuple(rests), shift - 6)
        if tails and tails[-1][1:] == (mark | lead - 1, shape):
            tails[-1] = (tails[-1][0], mark | lead, shape)
        else:
            tails.append((mark | lead, mark | lead, shape))
    return CharSet(0, tails)


@functools.lru_cache(4096)
def _tail(ranges: tuple[tuple[int, int], ...], shift: int) -> Shape:
    return Concat([_bytes(ranges, shift, 0x80)])


def utf8_length(first: int) -> int:
    """Length in bytes of a character in UTF-8, by its first byte."""
    return 1 + (first >= 0xC0) + (first >= 0xE0) + (first >= 0xF0)


def span(first: int, last: int) -> int:
    """A mask of the bits from `first` to `last`, both included."""
    return (1 << last + 1) - (1 << first)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same code points as ranges that are ascending and apart."""
    merged: Ranges = []
    for first, last in sorted((first, last) for first, last in ranges if first <= last):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    next_code, gaps = 0, []
    for first, last in union(ranges):
        gaps.append((next_code, first - 1))
        next_code = last + 1
    return union([*gaps, (next_code, MAX_CODE)])


def intersection(ranges: Ranges, other: Ranges) -> Ranges:
    """Code points in both."""
    return complement([*complement(ranges), *complement(other)])


def children(shape: Shape) -> Sequence[Shape]:
    """The shapes that a shape refers to."""
    if isinstance(shape, (Concat, Choice, Unordered)):
        return shape.items
    if isinstance(shape, (Repeat, Lexeme)):
        return (shape.body,)
    if isinstance(shape, CharSet):
        return [tail for _, _, tail in shape.tails]
    return ()


def reachable(root: Shape, most: int, closed: Container[Shape] = ()) -> dict[Shape, Sequence[Shape]]:
    """The children of each shape that `root` leads to, itself included; those in `closed` are given none. Raises
    `Unmodelled` for more than `most` shapes."""
    children_of: dict[Shape, Sequence[Shape]] = {root: () if root in closed else children(root)}
    for shape in (order := [root]):  # grows while it is walked
        for child in children_of[shape]:
            if child not in children_of:
                children_of[child] = () if child in closed else children(child)
                order.append(child)
        if len(order) > most:
            raise Unmodelled
    return children_of


def acyclic_order(
    shapes: Iterable[Shape], children: Mapping[Any, Sequence[Shape]], parents: Mapping[Any, Sequence[Shape]]
) -> dict[Shape, None]:
    """The shapes that lead into no cycle, each behind its children (Kahn 1962, topological sorting)."""
    missing = {shape: len(children.get(shape, ())) for shape in shapes}
    order = [shape for shape, count in missing.items() if not count]
    for shape in order:  # grows while it is walked
        for parent in parents.get(shape, ()):
            missing[parent] -= 1
            if not missing[parent]:
                order.append(parent)
    return dict.fromkeys(order)
