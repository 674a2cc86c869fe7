"""A grammar as data that can be counted with: letters, sequences, alternatives, and repetitions kept as their counts.

What a library's automaton unrolls (`.{2000}` is two thousand states), stays one node here, so that how short its
texts can be is arithmetic (`prices`) and where an output stands in it is a count (`tracker`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

MAX_CODE = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
Ranges = list[tuple[int, int]]
"""Code points from one to another, ends included; ascending and apart."""


class Unmodelled(Exception):
    """This part of a grammar has no shape. Never leaves the package."""


class Shape:
    """A set of texts. Compared by identity: shapes may lead into themselves."""

    __slots__ = ()


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

    def __init__(self, body: Shape, least: int, most: int | None) -> None:
        self.body = body
        self.least = least
        self.most = most


class Unordered(Shape):
    """Members in any order, each but the undeclared ones once, with a comma between them.

    A state is a set of bits: members that were there.
    """

    __slots__ = ("again", "comma", "counts", "free", "items", "least", "members", "most", "needed", "one")

    def __init__(
        self,
        pairs: Sequence[Shape],
        free: Shape | None,
        comma: Sequence[Shape],
        needed: Sequence[int],
        one: Shape,
        bounds: tuple[int, int | None] = (1, None),
    ) -> None:
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
    beyond: list[tuple[tuple[int, int], ...]] = []
    low, high = _SURROGATES
    apart = union(
        (part for first, last in ranges for part in ((first, min(last, low - 1)), (max(first, high + 1), last)))
    )
    for first, last in apart:
        for code in range(first, min(last, 0x7F) + 1):
            mask |= 1 << code
        beyond += map(tuple, _sequences(max(first, 0x80), last))
    if not mask and not beyond:
        raise Unmodelled
    return Letters(mask, _tails(beyond))


def _tails(sequences: Iterable[tuple[tuple[int, int], ...]]) -> list[tuple[int, int, Shape]]:
    """Products of ranges of bytes, none a part of another, by their first bytes: each leads to one shape."""
    behind: dict[int, list[tuple[tuple[int, int], ...]]] = {}
    for (begin, end), *rest in sequences:
        for byte in range(begin, end + 1):
            behind.setdefault(byte, []).append(tuple(rest))
    found: list[tuple[int, int, Shape]] = []
    shapes: dict[tuple[tuple[tuple[int, int], ...], ...], Shape] = {}
    for byte, rests in behind.items():
        shape = shapes.get(key := tuple(rests))
        if shape is None:
            bits = [span(*rest[0]) for rest in rests if len(rest) == 1]
            shape = shapes[key] = Chain([Letters(sum(bits)) if bits else Letters(0, _tails(rests))])
        if found and found[-1][1:] == (byte - 1, shape):
            found[-1] = (found[-1][0], byte, shape)
        else:
            found.append((byte, byte, shape))
    return found


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


def _sequences(first: int, last: int) -> list[list[tuple[int, int]]]:
    """The UTF-8 of the code points from `first` to `last` as products of ranges of bytes."""
    found: list[list[tuple[int, int]]] = []
    todo = [(first, last)]
    while todo:
        first, last = todo.pop()
        if first > last:
            continue
        cut = _cut(first, last)
        if cut is None:
            found.append(list(zip(chr(first).encode(), chr(last).encode(), strict=True)))
        else:
            todo += [(cut + 1, last), (first, cut)]
    return found


def _cut(first: int, last: int) -> int | None:
    """The value at which the range must be cut so that each part is a product; None: it is one."""
    for top in (0x7F, 0x7FF, 0xFFFF):
        if first <= top < last:
            return top
    for size in (6, 12, 18):
        block = (1 << size) - 1
        if first & ~block != last & ~block:
            if first & block:
                return first | block
            if last & block != block:
                return (last & ~block) - 1
    return None


def parts(shape: Shape) -> Sequence[Shape]:
    """The shapes that a shape is made of."""
    if isinstance(shape, (Chain, Either, Unordered)):
        return shape.items
    if isinstance(shape, (Times, Lexeme)):
        return (shape.body,)
    if isinstance(shape, Letters):
        return [tail for _, _, tail in shape.tails]
    return ()


def within(root: Shape, most: int) -> dict[Shape, Sequence[Shape]]:
    """The parts of `root` and of every shape in it. Raises `Unmodelled` for more than `most`."""
    found: dict[Shape, Sequence[Shape]] = {root: parts(root)}
    for shape in (order := [root]):  # grows while it is walked
        for part in found[shape]:
            if part not in found:
                found[part] = parts(part)
                order.append(part)
        if len(order) > most:
            raise Unmodelled
    return found
