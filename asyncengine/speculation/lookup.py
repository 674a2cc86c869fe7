"""Drafts by looking back: what followed the last tokens when they stood there before (prompt lookup, Saxena 2023).

Texts repeat themselves: a quotation, an edited file, a field's name, a loop. The last two tokens, or else the last one,
are looked up in the request's own text and in finished outputs; of all places the one whose past agrees longest is
followed (as in suffix decoding, Oliaro et al. 2024). How sure a draft is depends less on that length than on whether
all places that agree as long go on alike (`evidence`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Sequence
from typing import NamedTuple

from asyncengine.speculation.evidence import AFTER, LONG, Evidence, of_places

MOST = 16
"""Tokens up to which a longer agreement says more."""
FARTHEST = 16
"""Tokens of a guess up to which it is looked where places part."""
_KEPT = 4
"""Latest places that are looked at."""


Place = tuple[Sequence[int], int]
"""Somewhere in a text: (the text, position of the token that follows)."""


class Draft(NamedTuple):
    """A guess of the next tokens."""

    tokens: tuple[int, ...]
    evidence: Evidence
    """Of its first token; what the others rest on follows from it (`evidence.AFTER`), but for `joints`."""
    predicted: bool = False
    """It is its caller's."""
    joints: tuple[tuple[int, Evidence], ...] = ()
    """(place, evidence) of further tokens that come from somewhere else, ascending."""

    def rests_on(self, count: int) -> list[Evidence]:
        """Of each of the first `count` tokens, what it rests on."""
        count = min(count, len(self.tokens))
        joints = iter((*self.joints, (count, Evidence.TOKEN)))
        end, coming = next(joints)
        found: list[Evidence] = []
        evidence = self.evidence
        while len(found) < count:
            if len(found) == end:
                evidence = coming
                end, coming = next(joints)
            following = AFTER[evidence]
            found += [evidence] * (min(end, count) - len(found) if following is evidence else 1)
            evidence = following
        return found

    def rests_at(self, place: int) -> Evidence:
        """The same of the token at `place`."""
        begin, evidence = 0, self.evidence
        for joint in self.joints:
            if joint[0] <= place:
                begin, evidence = joint
        while begin < place and AFTER[evidence] is not evidence:
            begin, evidence = begin + 1, AFTER[evidence]
        return evidence

    def joined(self, place: int, tokens: tuple[int, ...], evidence: Evidence) -> Draft:
        """The same up to `place`, and then `tokens`."""
        if not place:
            return Draft(tokens, evidence, self.predicted)
        kept = [joint for joint in self.joints if joint[0] < place]
        return Draft((*self.tokens[:place], *tokens), self.evidence, self.predicted, (*kept, (place, evidence)))


class Match(NamedTuple):
    """The place that is followed, and why."""

    place: Place
    evidence: Evidence
    common: int = 0
    """Tokens from there on that all places have which agree as long; 0: there is no other, or they part at once."""

    def draft(self, limit: int) -> Draft:
        """Up to `limit` tokens from there on."""
        joints = ((self.common, Evidence.PARTED),) if 0 < self.common < limit else ()
        return Draft(follow(self.place, limit), self.evidence, joints=joints)


NOTHING = Draft((), Evidence.SPLIT_TOKEN)


class FixedIndex:
    """Where tokens and pairs of tokens stand in a text that does not change: sorted keys, 32 bytes a token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        import numpy as np  # not before somebody drafts: it takes longer to import than all the rest

        self.tokens = tokens
        values = np.array(tokens, dtype=np.int64)[:-1]  # the last one has nothing behind it
        pairs = (values[:-1] << 32) | values[1:]
        order, pair_order = np.argsort(values, kind="stable"), np.argsort(pairs, kind="stable")
        # a search in a numpy array takes several times as long
        self._values, self._places = array("q", values[order].tobytes()), array("q", (order + 1).tobytes())
        self._pairs, self._pair_places = array("q", pairs[pair_order].tobytes()), array("q", (pair_order + 2).tobytes())
        self._behind: dict[int, tuple[int, ...]] = {}
        """What `behind` has said: an answer asks about the same few tokens again and again."""

    def behind_pair(self, first: int, second: int) -> Sequence[int]:
        """Positions behind the pair, the latest ones, earliest first."""
        begin, end = _range_of(self._pairs, (first << 32) | second)
        return self._pair_places[max(begin, end - _KEPT) : end] if begin < end else ()

    def behind(self, token: int) -> Sequence[int]:
        """The same, behind the token."""
        found = self._behind.get(token)
        if found is None:
            begin, end = _range_of(self._values, token)
            found = self._behind[token] = tuple(self._places[max(begin, end - _KEPT) : end])
        return found

    def nearest_behind_pair(self, first: int, second: int, position: int) -> int | None:
        """That behind the pair which is nearest to `position`; None: the pair does not stand here."""
        return _nearest(self._pair_places, *_range_of(self._pairs, (first << 32) | second), position)

    def nearest_behind(self, token: int, position: int) -> int | None:
        """The same, behind the token."""
        return _nearest(self._places, *_range_of(self._values, token), position)


def _range_of(keys: Sequence[int], key: int) -> tuple[int, int]:
    """Begin and end of `key` among `keys`, which rise."""
    begin = bisect_left(keys, key)
    if begin == len(keys) or keys[begin] != key:
        return begin, begin
    return begin, bisect_right(keys, key, begin)


def _nearest(places: Sequence[int], begin: int, end: int, position: int) -> int | None:
    """Of places[begin:end], which rise."""
    place = bisect_left(places, position, begin, end)
    near = places[max(begin, place - 1) : min(end, place + 1)]
    return min(near, key=lambda found: abs(found - position), default=None)


class GrowingIndex:
    """The same of a text that grows at its end: of `tokens` from `start` on, as far as `catch_up` has looked."""

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self.tokens = tokens
        self._next = start + 1
        self._pairs: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._places: defaultdict[int, list[int]] = defaultdict(list)

    def catch_up(self) -> None:
        """Take in what has come; a token once it is known what follows it."""
        tokens, pairs, places = self.tokens, self._pairs, self._places
        for second in range(self._next, len(tokens) - 1):
            last, behind = tokens[second], second + 1
            pairs[tokens[second - 1], last].append(behind)
            places[last].append(behind)
        self._next = max(self._next, len(tokens) - 1)

    def behind_pair(self, first: int, second: int) -> Sequence[int]:
        return self._pairs.get((first, second), ())[-_KEPT:]

    def behind(self, token: int) -> Sequence[int]:
        return self._places.get(token, ())[-_KEPT:]


def agreement(tokens: Sequence[int], place: Place, most: int = MOST) -> int:
    """How many of the last of `tokens` stand before `place` as well, up to `most`."""
    text, position = place
    if most > position or most > len(tokens):
        most = min(position, len(tokens))
    for back in range(1, most + 1):
        if text[position - back] != tokens[-back]:
            return back - 1
    return most


def follow(place: Place, limit: int) -> tuple[int, ...]:
    """Up to `limit` tokens from `place` on. A text that ends there goes on as it went on since: a loop repeats."""
    text, position = place
    found = tuple(text[position : position + limit])
    if 0 < len(found) < limit:
        return (found * (limit // len(found) + 1))[:limit]
    return found


def best_place(tokens: Sequence[int], places: Sequence[Place], recent: Container[int] = ()) -> Match | None:
    """Of all `places` that of the longest agreement, the last one of equals. Where these do not go on alike, one whose
    last token stands at one of the `recent` positions is taken."""
    if len(places) == 1:
        return Match(places[0], of_places(agreement(tokens, places[0], LONG), 1, True))
    most, equals, last = 1, list(places[:0]), tuple(tokens[-MOST:])
    for place in places:
        text, position = place
        if position < most or text[position - most] != tokens[-most]:
            continue  # others agree for longer
        # where a text repeats itself most places agree all the way, and need no look at each token
        far = position - MOST
        whole = far >= 0 and text[far] == last[0] and tuple(text[far:position]) == last
        agreed = MOST if whole else agreement(tokens, place)
        if agreed > most:
            most, equals = agreed, [place]
        elif agreed == most:
            equals.append(place)
    if not equals:
        return None
    alike = len({text[position] for text, position in equals}) == 1
    if not alike:
        for text, position in equals:
            if position - 1 in recent:
                return Match((text, position), Evidence.NEXT)
    return Match(equals[-1], of_places(most, len(equals), alike), _common(equals) if alike and len(equals) > 1 else 0)


def _common(places: Sequence[Place]) -> int:
    """Tokens that are the same from all `places` on, as far as a guess goes."""
    text, position = places[-1]
    whole = tuple(text[position : position + FARTHEST])
    count = len(whole)
    for other, start in places[:-1]:
        found = tuple(other[start : start + count])
        if found != whole[:count]:
            count = next((place for place, token in enumerate(found) if token != whole[place]), len(found))
    return count
