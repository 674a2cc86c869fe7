"""A grammar as data that can be counted with: letters, sequences, alternatives, and repetitions kept as their counts.

What a library's automaton unrolls (`.{2000}` is two thousand states), stays one node here, so that how short its
texts can be is arithmetic (`prices`) and where an output stands in it is a count (`tracker`).
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
"""Code points that are as many bytes in UTF-8: the bits in all but the first byte, and the bits that mark that one."""
Ranges = list[tuple[int, int]]
"""Code points from one to another, ends included; ascending and apart."""


class Unmodelled(Exception):
    """This part of a grammar has no shape. Never leaves the package."""


class Shape:
    """A set of texts. Compared by identity: shapes may lead into themselves."""

    __slots__ = ()
    begin: Any = -1
    """The index or state in front of it (`tracker.Frame`)."""


class Letters(Shape):
    """One character of a set, or one byte of one."""

    __slots__ = ("mask", "tails")

    def __init__(self, mask: int, tails: Sequence[tuple[int, int, Shape]] = ()) -> None:
        """`mask`: bit b for byte b by itself. `tails`: first bytes from one to another, and what follows them."""
        self.mask = mask
        self.tails = tails


class Literal(Shape):
    """One text, not empty."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class Chain(Shape):
    __slots__ = ("items",)

    def __init__(self, items: Sequence[Shape]) -> None:
        self.items = tuple(items)


class Either(Shape):
    __slots__ = ("items",)

    def __init__(self, items: Sequence[Shape]) -> None:
        self.items = tuple(items)


class Times(Shape):
    __slots__ = ("body", "least", "most")
    begin = 0

    def __init__(self, body: Shape, least: int, most: int | None) -> None:
        self.body = body
        self.least = least
        self.most = most


class Unordered(Shape):
    """Members in any order, each but the undeclared ones once, with a comma between them.

    A state is a set of bits: members that were there.
    """

    __slots__ = ("again", "comma", "counts", "free", "items", "least", "members", "most", "needed", "one")
    begin = 0

    def __init__(
        self, pairs: Sequence[Shape], free: Shape | None, comma: Sequence[Shape], needed: Sequence[int], one: Shape,
        bounds: tuple[int, int | None] = (1, None),
    ) -> None:  # fmt: skip
        """`pairs`: the declared members; `free`: one that is not; `needed`: the indices of those that must be there,
        `free` behind the others; `one`: any one of all; `bounds`: so many in all, without `free`."""
        self.needed = needed
        self.one = one
        self.least, self.most = bounds
        self.counts = bool(needed) or self.least > 1
        """One member, whichever is cheapest, is not enough."""
        self.put(pairs, free, comma)

    def put(self, pairs: Iterable[Shape], free: Shape | None, comma: Sequence[Shape]) -> None:
        """Have these in place of others."""
        self.free, self.comma = free, comma
        self.members = (*pairs, *([free] if free else []))
        self.again = len(self.members) - 1 if free else None
        """The index of undeclared members."""
        self.items: tuple[Shape, ...] = ()
        """The members, then the same behind a comma: once all names are resolved."""

    @property
    def pairs(self) -> tuple[Shape, ...]:
        return self.members[: self.again]

    def following(self, said: int) -> Iterator[tuple[Shape, int]]:
        """Members that may come next, and the state behind each."""
        count = len(self.members)
        full = self.most is not None and said.bit_count() >= self.most
        for index in range(0 if full else count):
            if not said >> index & 1 or index == self.again:
                yield self.items[index + count if said else index], said | 1 << index

    def left(self, said: int) -> list[Shape]:
        """The members needed still, each with its comma."""
        count = len(self.members)
        todo = [index for index in self.needed if not said >> index & 1]
        if (missing := self.least - said.bit_count() - len(todo)) > 0 and self.least > 1:
            todo += [i for i in range(count) if not said >> i & 1 and i not in todo][:missing]
        return [self.items[index + count if said or place else index] for place, index in enumerate(todo)]


class Lexeme(Shape):
    """Texts that a lexer takes as long as it can (`lazy`: up to where the first of them ends) before what follows."""

    __slots__ = ("body", "lazy")

    def __init__(self, body: Shape, lazy: bool = False) -> None:
        self.body = body
        self.lazy = lazy


class Mark(Shape):
    """A special token."""

    __slots__ = ("symbol", "token")

    def __init__(self, token: int, symbol: int) -> None:
        """`symbol`: what it is in the byte vocabulary."""
        self.token = token
        self.symbol = symbol


class Terminal(Shape):
    """Stands for the shape of Lark text, which the library gets as it is; with an `end`, a literal, for the shortest
    texts up to one with that behind it."""

    __slots__ = ("end", "text")

    def __init__(self, text: str, end: str = "") -> None:
        self.text = text
        self.end = end


class Name(Shape):
    """Stands for the shape of a rule while others are made."""

    __slots__ = ("options", "target")

    target: Shape

    def __init__(self) -> None:
        self.options: list[list[Shape]] = []
        """The rule's alternatives while they are made, each a sequence."""


NOTHING = Chain(())
Made = Chain | Either | Times | Unordered


def resolve(made: Iterable[Made], first: Shape) -> Shape:
    """Put the shapes that names stand for in place of these: with names, half of all shapes would be one."""
    for shape in made:
        if isinstance(shape, Times):
            shape.body = _itself(shape.body)
        elif isinstance(shape, Unordered):
            members, comma = [*map(_itself, shape.members)], [*map(_itself, shape.comma)]
            shape.items = (*members, *(Chain([*comma, member]) for member in members))
        else:
            shape.items = tuple(map(_itself, shape.items))
    return _itself(first)


def _itself(shape: Shape) -> Shape:
    while isinstance(shape, Name):
        shape = shape.target
    return shape


def literal(data: bytes) -> Shape:
    return Literal(data) if data else NOTHING


def chain(items: Iterable[Shape]) -> Shape:
    """A sequence; texts that follow one another are one."""
    found: list[Shape] = []
    for item in items:
        part = item
        if isinstance(item, Letters) and item.mask.bit_count() == 1 and not item.tails:
            part = Literal(bytes([item.mask.bit_length() - 1]))
        if found and isinstance(part, Literal) and isinstance(last := found[-1], Literal):
            found[-1] = Literal(last.data + part.data)
        else:
            found.append(part)
    return found[0] if len(found) == 1 else Chain(found)


def letters(ranges: Ranges) -> Shape:
    """One character of `ranges`, in UTF-8. Surrogates, which it cannot spell, are left out."""
    mask = 0
    tails: list[tuple[int, int, Shape]] = []
    for low, high, shift, mark in _LENGTHS:
        within = meet(ranges, [(low, high)])
        found = _bytes(tuple(within), shift, mark)
        mask |= found.mask
        tails += found.tails
    if not mask and not tails:
        raise Unmodelled
    return Letters(mask, tails)


@functools.lru_cache(4096)
def _bytes(ranges: tuple[tuple[int, int], ...], shift: int, mark: int) -> Letters:
    """One character by its bytes. The next one is `mark` and the bits of its code from `shift` on; a following one for
    each six bits below."""
    if not shift:
        return Letters(sum(span(mark | first, mark | last) for first, last in ranges))
    behind: dict[int, list[tuple[int, int]]] = {}
    below = (1 << shift) - 1
    for first, last in ranges:
        for lead in range(first >> shift, (last >> shift) + 1):
            part = max(first, lead << shift) & below, min(last, lead << shift | below) & below
            behind.setdefault(lead, []).append(part)
    tails: list[tuple[int, int, Shape]] = []
    for lead, parts in behind.items():
        shape = _tail(tuple(parts), shift - 6)
        if tails and tails[-1][1:] == (mark | lead - 1, shape):
            tails[-1] = (tails[-1][0], mark | lead, shape)
        else:
            tails.append((mark | lead, mark | lead, shape))
    return Letters(0, tails)


@functools.lru_cache(4096)
def _tail(ranges: tuple[tuple[int, int], ...], shift: int) -> Shape:
    return Chain([_bytes(ranges, shift, 0x80)])


def span(first: int, last: int) -> int:
    """The bits from `first` to `last`."""
    return (1 << last + 1) - (1 << first)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same code points as ranges that are ascending and apart."""
    found: Ranges = []
    for first, last in sorted((first, last) for first, last in ranges if first <= last):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    at, found = 0, []
    for first, last in union(ranges):
        found.append((at, first - 1))
        at = last + 1
    return union([*found, (at, MAX_CODE)])


def meet(ranges: Ranges, others: Ranges) -> Ranges:
    """Code points in both."""
    return complement([*complement(ranges), *complement(others)])


def parts(shape: Shape) -> Sequence[Shape]:
    """The shapes that a shape is made of."""
    if isinstance(shape, (Chain, Either, Unordered)):
        return shape.items
    if isinstance(shape, (Times, Lexeme)):
        return (shape.body,)
    if isinstance(shape, Letters):
        return [tail for _, _, tail in shape.tails]
    return ()


def within(root: Shape, most: int, closed: Container[Shape] = ()) -> dict[Shape, Sequence[Shape]]:
    """The parts of `root` and of every shape in it, those in `closed` taken for one. Raises `Unmodelled` for more than
    `most`."""
    found: dict[Shape, Sequence[Shape]] = {root: () if root in closed else parts(root)}
    for shape in (order := [root]):  # grows while it is walked
        for part in found[shape]:
            if part not in found:
                found[part] = () if part in closed else parts(part)
                order.append(part)
        if len(order) > most:
            raise Unmodelled
    return found


def peeled(
    shapes: Iterable[Shape], inner: Mapping[Any, Sequence[Shape]], users: Mapping[Any, Sequence[Shape]]
) -> dict[Shape, None]:
    """The shapes of which no circle is part, each behind those in it."""
    missing = {shape: len(inner.get(shape, ())) for shape in shapes}
    order = [shape for shape, count in missing.items() if not count]
    for shape in order:  # grows while it is walked
        for user in users.get(shape, ()):
            missing[user] -= 1
            if not missing[user]:
                order.append(user)
    return dict.fromkeys(order)
