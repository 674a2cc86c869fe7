"""Drafts from a text's own past: the tokens that followed the last ones where these stood before.

Texts repeat themselves: a quotation, an edited file, a field's name, a loop. The last two tokens, or else the last one,
are looked up in prompt and output (prompt lookup, Saxena 2023); of all places the one whose past agrees longest is
followed (suffix decoding, Oliaro et al. 2024).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

from asyncengine.speculation.acceptance import AMBIGUOUS, NOTHING, Draft, Source

LONGEST = 16
"""Tokens up to which a longer agreement makes one place better than another."""
_LATEST = 4
"""Latest occurrences that are looked at."""

Place = tuple[Sequence[int], int]
"""A position in a text: (the text, position of the token that follows)."""


class FixedIndex:
    """Index of the tokens and pairs of tokens of a text that does not change: sorted keys, 32 bytes a token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        import numpy as np  # not before somebody drafts: it takes longer to import than all the rest

        self.tokens = tokens
        values = np.array(tokens, dtype=np.int64)[:-1]  # the last one has nothing behind it
        pairs = (values[:-1] << 32) | values[1:]
        order, pair_order = np.argsort(values, kind="stable"), np.argsort(pairs, kind="stable")
        # a search in a numpy array takes several times as long
        self._values, self._places = array("q", values[order].tobytes()), array("q", (order + 1).tobytes())
        self._pairs, self._pair_places = array("q", pairs[pair_order].tobytes()), array("q", (pair_order + 2).tobytes())

    def behind_pair(self, first: int, second: int) -> Sequence[int]:
        """Positions behind the pair, the latest ones, earliest first."""
        begin, end = _range_of(self._pairs, (first << 32) | second)
        return self._pair_places[max(begin, end - _LATEST) : end] if begin < end else ()

    def behind(self, token: int) -> Sequence[int]:
        """Positions behind the token, the latest ones, earliest first."""
        begin, end = _range_of(self._values, token)
        return self._places[max(begin, end - _LATEST) : end] if begin < end else ()

    def nearest_behind_pair(self, first: int, second: int, position: int) -> int | None:
        """Position behind the pair that is nearest to `position`; None: the pair does not occur."""
        return _nearest(self._pair_places, *_range_of(self._pairs, (first << 32) | second), position)

    def nearest_behind(self, token: int, position: int) -> int | None:
        """Position behind the token that is nearest to `position`; None: it does not occur."""
        return _nearest(self._places, *_range_of(self._values, token), position)


def _range_of(keys: Sequence[int], key: int) -> tuple[int, int]:
    """Begin and end of `key` among `keys`, which rise."""
    begin = bisect_left(keys, key)
    if begin == len(keys) or keys[begin] != key:
        return begin, begin
    return begin, bisect_right(keys, key, begin)


def _nearest(places: Sequence[int], begin: int, end: int, position: int) -> int | None:
    """The one of the rising places[begin:end] that is nearest to `position`."""
    place = bisect_left(places, position, begin, end)
    near = places[max(begin, place - 1) : min(end, place + 1)]
    return min(near, key=lambda found: abs(found - position), default=None)


class GrowingIndex:
    """Index of a text that grows at its end: of `tokens` from `start` on, as far as `catch_up` has looked."""

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self.tokens = tokens
        self._next = start + 1
        self._pairs: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._places: defaultdict[int, list[int]] = defaultdict(list)

    def catch_up(self) -> None:
        """Take in what has come; a token is taken in once the one behind it is known."""
        tokens, pairs, places = self.tokens, self._pairs, self._places
        for second in range(self._next, len(tokens) - 1):
            last, behind = tokens[second], second + 1
            pairs[tokens[second - 1], last].append(behind)
            places[last].append(behind)
        self._next = max(self._next, len(tokens) - 1)

    def behind_pair(self, first: int, second: int) -> Sequence[int]:
        return self._pairs.get((first, second), ())[-_LATEST:]

    def behind(self, token: int) -> Sequence[int]:
        return self._places.get(token, ())[-_LATEST:]


def agreement(tokens: Sequence[int], place: Place, most: int = LONGEST) -> int:
    """Number of last tokens that stand before `place` as well, up to `most`."""
    text, position = place
    if most > position or most > len(tokens):
        most = min(position, len(tokens))
    for back in range(1, most + 1):
        if text[position - back] != tokens[-back]:
            return back - 1
    return most


def follow(place: Place, limit: int) -> tuple[int, ...]:
    """The `limit` tokens from `place` on; a text that ends before is taken to repeat itself, as loops do."""
    text, position = place
    found = tuple(text[position : position + limit])
    if 0 < len(found) < limit:
        return (found * (limit // len(found) + 1))[:limit]
    return found


def best_draft(tokens: Sequence[int], places: Sequence[Place], limit: int) -> tuple[Draft, Place | None]:
    """The draft from the place that agrees longest with the end of `tokens`, the latest of equals, and that place."""
    longest, equals = 0, list[Place]()
    for place in places:
        agreed = agreement(tokens, place)
        if agreed > longest:
            longest, equals = agreed, []
        if agreed == longest:
            equals.append(place)
    if not longest:
        return NOTHING, None
    ambiguous = len({text[position] for text, position in equals}) > 1
    # that several places go on alike says as much as a longer agreement
    agreed = AMBIGUOUS if ambiguous else longest + len(equals) - 1
    return Draft(follow(equals[-1], limit), Source.OWN_TEXT, agreed), equals[-1]
