"""Finished outputs, to draft from: one text for all requests that may see each other's.

Keyed as the prefix cache is, by adapter and cache salt: a tenant's text must not be felt by another, not even by the
time that its tokens take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from asyncengine.speculation.evidence import LONG, USUAL, Evidence
from asyncengine.speculation.lookup import Draft, Match, Place, agreement

Namespace = tuple[Hashable, ...]

BYTES_PER_TOKEN = 640
"""Of a token here, where few repeat: two entries of a dictionary, a pair, two places."""
_LEAST = 0.1
"""That all tokens up to there are right: where that is less, an output is not followed further."""
_SURE = 3
"""Times in a row that tokens went on in the same way, after which earlier ones count no more."""


class _Text:
    """One output."""

    __slots__ = ("namespace", "tokens")

    def __init__(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        self.namespace = namespace
        self.tokens = tuple(tokens)


@dataclass(slots=True)
class _Latest:
    """Where one or two tokens stood last, and how steadily the same token has followed them."""

    text: _Text
    position: int
    """Of the token that follows."""
    seen: int = 1
    """Times they stood somewhere."""
    alike: int = 1
    """The last so many times they went on in the same way."""


_Key = int | tuple[int, int]


def _rests_on(found: _Latest, agreed: int) -> Evidence:
    """What follows there, which has `agreed` tokens before it in common with the text."""
    seen, alike = found.seen, found.alike
    if seen > 1:
        if alike >= seen or alike >= _SURE:
            return Evidence.THEIR_ALIKE
        return Evidence.THEIR_SPLIT_TOKEN if agreed < 2 else Evidence.THEIR_SPLIT
    if agreed < 2:
        return Evidence.THEIR_TOKEN
    return Evidence.THEIR_PAIR if agreed < LONG else Evidence.THEIR_LONG


def _put(places: dict[_Key, _Latest], key: _Key, text: _Text, position: int) -> None:
    found = places.get(key)
    if found is None:
        places[key] = _Latest(text, position)
        return
    same = found.text.tokens[found.position] == text.tokens[position]
    found.alike = found.alike + 1 if same else 1
    found.seen += 1
    found.text, found.position = text, position


class OutputStore:
    """Outputs by namespace, the oldest dropped first when they take more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes // BYTES_PER_TOKEN
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        self._places: dict[Namespace, dict[_Key, _Latest]] = {}
        self._added = 0
        self.num_tokens = 0

    @property
    def nbytes(self) -> int:
        """About."""
        return self.num_tokens * BYTES_PER_TOKEN

    def add(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        """Take in a finished output. One that is too short to be found, or too long to be kept, is left out."""
        if not 2 < len(tokens) <= self._most:
            return
        text = _Text(namespace, tokens)
        places = self._places.setdefault(namespace, {})
        for position in range(1, len(text.tokens)):
            _put(places, text.tokens[position - 1], text, position)
            if position > 1:
                _put(places, (text.tokens[position - 2], text.tokens[position - 1]), text, position)
        self._texts[self._added] = text
        self._added += 1
        self.num_tokens += len(text.tokens)
        while self.num_tokens > self._most:
            self._drop_oldest()

    def match(self, namespace: Namespace, tokens: Sequence[int], followed: Place | None = None) -> Match | None:
        """Where the last two of `tokens` (two at least), or else the last one, stood in an output the last time; or
        `followed`, a place where others were found before, if it has agreed for long."""
        if followed is not None:
            text, position = followed
            if LONG <= position < len(text) and text[position - LONG : position] == tuple(tokens[-LONG:]):
                return Match(followed, Evidence.THEIR_LONG)
        places = self._places.get(namespace)
        found = None if places is None else places.get((tokens[-2], tokens[-1])) or places.get(tokens[-1])
        if found is None:
            return None
        place = found.text.tokens, found.position
        return Match(place, _rests_on(found, agreement(tokens, place, LONG)))

    def follow(self, namespace: Namespace, match: Match, tokens: Sequence[int], limit: int) -> Draft:
        """Up to `limit` tokens from `match` on, that of `tokens`; each came behind the two before it the last time
        that these stood somewhere. For others' outputs are alike in part: what stands around a value, not the value.
        One that has agreed for long is followed itself."""
        if match.evidence is Evidence.THEIR_LONG:
            text, position = match.place
            return Draft(tuple(text[position : position + limit]), match.evidence)
        places = self._places[namespace]
        evidence: Evidence = match.evidence
        text, position = match.place
        last, first, agreed = tokens[-1], evidence, agreement(tokens, match.place, LONG)
        drafted: list[int] = []
        joints: list[tuple[int, Evidence]] = []
        chance = USUAL[evidence]
        while True:
            token = text[position]
            drafted.append(token)
            found = places.get((last, token)) if len(drafted) < limit and chance > _LEAST else None
            if found is None:
                break
            agreed = agreed + 1 if found.text.tokens is text and found.position == position + 1 else 2
            following = _rests_on(found, agreed)
            chance *= USUAL[following]
            if following is not evidence:
                joints.append((len(drafted), following))
            text, position, evidence, last = found.text.tokens, found.position, following, token
        return Draft(tuple(drafted), first, joints=tuple(joints))

    def clear(self) -> None:
        """Keep nothing."""
        self._texts.clear()
        self._places.clear()
        self.num_tokens = 0

    def _drop_oldest(self) -> None:
        _, text = self._texts.popitem(last=False)
        places = self._places[text.namespace]
        for position in range(1, len(text.tokens)):
            for key in (text.tokens[position - 1], (text.tokens[position - 2], text.tokens[position - 1])):
                found = places.get(key)
                if found is not None and found.text is text:
                    del places[key]
        if not places:
            del self._places[text.namespace]
        self.num_tokens -= len(text.tokens)
