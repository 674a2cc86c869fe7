"""Completions of what only the grammar library knows, looked for symbol by symbol with the library as the oracle.

llguidance can say what may come next and whether a text may end, not how far the end is. So a matcher runs over single
bytes, where a step costs a microsecond. Paths are followed by their length, shortest first; places that allow the same
symbols are taken for the same one, unless a run of one symbol leads from one to the other. If that finds none, one path
is followed by the most promising symbol in each place. What is found is always a completion; it can be longer than the
shortest.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

VISITS = 3
"""Times that places which allow the same symbols are looked at, but for runs."""
STEP = 8
"""The cost of a step beside the symbols themselves, in symbols."""
_KINDS = (b'"', b"}", b"]", b">", b",", b":", b"0123456789", bytes(range(97, 123)), bytes(range(65, 91)), b" \n\t\r")
_MARKUP = frozenset(b"".join(_KINDS))
MAX_TRIED = 24
"""Symbols tried in one place."""


class Effort:
    """The effort left, in steps of a tracker or symbols that the library steps over: half a microsecond each."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def part(self, amount: int) -> Effort:
        """`amount` of it, on credit if need be. What is left of it goes back by `regain`."""
        self.left -= amount
        return Effort(amount)

    def regain(self, part: Effort) -> None:
        """Take back what is left of `part`; what it overspent is owed."""
        self.left += part.left


def leads(matcher: Any, symbols: Sequence[int]) -> bool:
    """Whether `symbols` can be followed from where `matcher` stands."""
    return bool(symbols) and bool(matcher.validate_tokens(symbols) == len(symbols))


def completion(matcher: Any, end: int, known: Iterable[Sequence[int]], effort: Effort) -> Sequence[int] | None:
    """The first of `known` that leads from where `matcher` stands to a complete text, or else the `shortest` found."""
    return next((symbols for symbols in known if leads(matcher, [*symbols, end])), None) or shortest(
        matcher, end, effort
    )


def shortest(matcher: Any, end: int, effort: Effort) -> list[int] | None:
    """Symbols that lead from where `matcher` stands (it is left there) to a complete text, few of them; None if none
    were found, which proves nothing. `end`: the symbol of the end, those below are bytes and special tokens."""
    part = effort.part(effort.left // 2)
    found = _nearest(matcher, end, part)
    effort.regain(part)
    return found or (found if found == [] else _straight(matcher, end, effort))


def _nearest(matcher: Any, end: int, effort: Effort) -> list[int] | None:
    heap: list[tuple[int, int, list[int], bytes]] = [(0, 0, [], b"")]
    count = itertools.count(1)
    visits: dict[bytes, int] = {}
    while heap and effort.left > 0:
        _, _, path, before = heapq.heappop(heap)
        effort.left -= STEP + len(path)
        taken = matcher.try_consume_tokens(path)
        if taken == len(path):
            if matcher.is_accepting():
                matcher.rollback(taken)
                return path
            mask: bytes = matcher.compute_bitmask()
            bits = int.from_bytes(mask, "little")
            runs = mask == before
            visits[mask] = visits.get(mask, 0) + (not runs)
            if visits[mask] <= VISITS:
                following: Iterable[int] = path[-1:] if runs and bits >> path[-1] & 1 else _tried(bits, end)
                for symbol in itertools.islice(following, MAX_TRIED):
                    heapq.heappush(heap, (len(path) + 1, next(count), [*path, symbol], mask))
        matcher.rollback(taken)
        if matcher.is_error():
            return None
    return None


def _straight(matcher: Any, end: int, effort: Effort) -> list[int] | None:
    """The same by the most promising symbol in each place: a long list, of which all that is open is closed."""
    path: list[int] = []
    while not matcher.is_accepting() and effort.left > 0 and not matcher.is_error():
        effort.left -= STEP
        symbols = [*itertools.islice(_tried(int.from_bytes(matcher.compute_bitmask(), "little"), end), 1)]
        if not symbols or not matcher.try_consume_tokens(symbols):
            break
        path += symbols
    found = matcher.is_accepting() and not matcher.is_error()
    matcher.rollback(len(path))
    return path if found else None


def _tried(bits: int, end: int) -> Iterator[int]:
    """One symbol of each kind that makes a difference, of those allowed (bit b: symbol b): special tokens first."""
    if bits >> 256:
        yield from (symbol for symbol in range(256, end) if bits >> symbol & 1)
    for kind in _KINDS:
        yield from itertools.islice((byte for byte in kind if bits >> byte & 1), 1)
    yield from (byte for byte in range(256) if bits >> byte & 1 and byte not in _MARKUP)
