"""Completions of a grammar's states, looked for byte by byte with the grammar library as the oracle.

llguidance can say what may come next and whether the output may end, not how far the end is. So a second matcher of
the same grammar runs over single bytes, where a step costs a microsecond:

* `Search.greedy` walks towards the end by a fixed order of preference: close what is open before opening anything.
* `Search.shortest` improves that walk: at each place with a choice it tries the alternatives, each completed greedily
  (the pilot method, Duin & Voss 1999).

What is found is always a real completion, checked by the library itself. It can be longer than the true minimum where
a grammar offers alternatives whose worth shows only after several bytes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncengine.grammar.samples import pattern_samples, sample, suffixes
from asyncengine.grammar.spec import Grammar
from asyncengine.grammar.vocabulary import Vocabulary

EFFORT = 30_000
"""Symbols one search may step over, about 60 ms; a grammar with no completion found by then is refused."""
PATIENCE = 256
"""How often a walk takes the same choice in the same-looking place before it takes the next one. Places deep inside
nested values look alike, so it must not be impatient."""
LOOK_AGAIN = 48
"""Steps in one place after which what leads out of it is looked for again."""
MAX_ALTERNATIVES = 16
"""Choices tried at one place when looking for the shortest way."""
FREE_LETTERS = 40
"""A place that allows so many letters is inside free text: any letter will do."""
MAX_WAYS_OUT = 48

_CLOSERS = b'}])>,:"'
_BRACKETS = frozenset(b"}])>")
_SCALARS = b"0123456789ntf"
_BLANK = frozenset(b" \n\t\r")
_DIGITS = frozenset(b"0123456789")
_OTHER_IN_TEXT = frozenset(b'"\\')
_ESCAPE = 0x5C
_SPECIAL = 0xFF
_QUOTED = re.compile(r'"((?:[^"\\\n]|\\.){1,64})"')
_PATTERN = re.compile(r"/((?:[^/\\\n]|\\.){1,200})/")
_MARKUP = re.compile(r"<\\?/?[A-Za-z_|][^<>\s\\]{0,40}>|\[\\?/?[A-Z_]+\]")


class Choices(NamedTuple):
    """Symbols worth trying in one place, most promising first: one for each kind that makes a difference."""

    symbols: tuple[int, ...]
    free: bool
    """Inside free text, where what is chosen hardly matters."""


def ways_out(grammar: Grammar, text: str) -> list[bytes]:
    """Texts that may lead out of a free text of `grammar`, `text` being what the library compiles: samples of its
    patterns, its options, its quoted literals and what looks like markup in it."""
    match grammar.kind:
        case "json_schema":
            found = list(itertools.islice(pattern_samples(json.loads(grammar.text)), MAX_WAYS_OUT))
        case "regex":
            found = suffixes(sample(grammar.text) or "")
        case "choice":
            found = sorted(json.loads(grammar.text), key=len)
        case _:
            found = [literal.encode().decode("unicode_escape", "replace") for literal in _QUOTED.findall(text)]
            found += [markup.replace("\\", "") for markup in _MARKUP.findall(text)]
            found += [suffix for pattern in _PATTERN.findall(text) for suffix in suffixes(sample(pattern) or "")]
    return [item.encode() for item in dict.fromkeys(found) if item][:MAX_WAYS_OUT]


class Tail(NamedTuple):
    """A known way, or its beginning."""

    symbols: list[int]
    whole: bool


class Walk(NamedTuple):
    """Symbols that lead to a complete output, or to where a known tail does."""

    symbols: list[int]
    tail: int
    """Index of the tail, -1: they lead to the end themselves."""


class Search:
    """Finds completions of one grammar's states. Several threads may share it."""

    def __init__(self, vocabulary: Vocabulary, exits: Sequence[bytes] = (), *, prose: bool = False) -> None:
        """`exits`: texts that may end a free text (`ways_out`). `prose`: a comma goes on rather than it closes
        something, and a blank may be the way on; otherwise as in JSON."""
        self._end = 256 + len(vocabulary.marks)
        self._filler = vocabulary.filler
        self._prose = prose
        self._ways_out = [list(text) for text in exits]
        self._choices: dict[bytes, Choices] = {}

    def choices(self, mask: bytes) -> Choices:
        known = self._choices.get(mask)
        if known is None:
            if len(self._choices) >= 1024:
                self._choices.clear()
            bits = int.from_bytes(mask, "little")
            allowed = [symbol for symbol in range(self._end) if bits >> symbol & 1]
            known = _preferred(allowed, self._filler, self._prose)
            self._choices[mask] = known
        return known

    def greedy(self, matcher: Any, limit: int, tails: Sequence[Tail] = ()) -> Walk | None:
        """A completion of at most `limit` symbols from where `matcher` stands (it is left there), or None. The walk
        stops where one of `tails` leads to the end."""
        path: list[int] = []
        places: dict[bytes, _Place] = {}
        last: _Place | None = None
        tail = -1
        while not matcher.is_accepting():
            tail = next((index for index, way in enumerate(tails) if leads(matcher, way)), -1)
            if tail >= 0:
                break
            step: Sequence[int] = matcher.compute_ff_bytes()
            if _SPECIAL in step:  # a special token is spelled out there; as a symbol it is one
                step = matcher.compute_ff_tokens()
            if not step:
                mask: bytes = matcher.compute_bitmask()
                place = places.get(mask)
                if place is None:
                    place = places[mask] = _Place(self.choices(mask))
                # closing one bracket of many changes nothing to be seen, and is progress all the same
                stays = place is last and path[-1] not in _BRACKETS
                step = self._step(matcher, mask, place, stays=stays)
                last = place
            if not step or len(path) + len(step) > limit or not matcher.consume_tokens(list(step)):
                break
            path += step
        found = tail >= 0 or matcher.is_accepting()
        matcher.rollback(len(path))
        return Walk(path, tail) if found else None

    def _step(self, matcher: Any, mask: bytes, place: _Place, *, stays: bool) -> Sequence[int]:
        """What a walk does in a place: the most promising; if the last step changed nothing, one that does."""
        place.visits += 1
        symbols, free = place.choices
        if matcher.is_error() or not symbols:
            return ()
        turn = place.visits // PATIENCE  # coming back and back, it is going round in a circle
        if stays or (free and self._ways_out):
            if place.exits or place.visits % LOOK_AGAIN <= 1 or not place.tried:
                place.tried = True
                place.exits = self._exits(matcher, mask, place.choices)
            if place.exits:
                place.left += 1
                return place.exits[place.left // 2 % len(place.exits)]
        return (symbols[0 if free else turn % len(symbols)],)

    def _exits(self, matcher: Any, mask: bytes, choices: Choices) -> list[Sequence[int]]:
        """Steps after which something else is allowed than here. In free text an escape and the first byte of a longer
        character are none: they come back."""
        free = choices.free
        steps: list[Sequence[int]] = [[c] for c in choices.symbols if not free or (c != _ESCAPE and not 128 <= c < 256)]
        steps += self._ways_out
        found = []
        for step in steps:
            taken = matcher.try_consume_tokens(list(step))
            if taken == len(step) and (matcher.is_accepting() or matcher.compute_bitmask() != mask):
                found.append(step)
            matcher.rollback(taken)
        return found

    def shortest(self, matcher: Any, limit: int = EFFORT, effort: int = EFFORT) -> list[int] | None:
        """The shortest completion found, of at most `limit` symbols. `effort`: symbols it may step over."""
        walk = self.greedy(matcher, limit)
        best = None if walk is None else walk.symbols
        for way in self._ways_out:
            if (best is None or len(way) < len(best)) and leads(matcher, Tail(way, True)):
                best = list(way)
        done = 0
        while best is not None and done < len(best) and effort > 0:
            symbols, free = self.choices(matcher.compute_bitmask())
            if len(symbols) > 1 and not free:
                dense = [symbol for symbol in symbols if symbol not in _BLANK] or list(symbols)
                for symbol in dense[:MAX_ALTERNATIVES]:
                    room = len(best) - done - 2
                    if symbol == best[done] or room < 0:
                        continue
                    matcher.consume_token(symbol)
                    rest = self.greedy(matcher, room)
                    matcher.rollback(1)
                    effort -= room if rest is None else len(rest.symbols)
                    if rest is not None:
                        best = [*best[:done], symbol, *rest.symbols]
            matcher.consume_token(best[done])
            done += 1
        matcher.rollback(done)
        return best


def leads(matcher: Any, tail: Tail) -> bool:
    """`tail` can be followed from where `matcher` stands (it is left there); if `whole`, to a complete output."""
    symbols = tail.symbols
    if not symbols or matcher.validate_tokens(symbols) != len(symbols):
        return False
    if not tail.whole:
        return True
    matcher.consume_tokens(symbols)
    complete = bool(matcher.is_accepting())
    matcher.rollback(len(symbols))
    return complete


class _Place:
    """What a walk remembers about places that look alike."""

    __slots__ = ("choices", "exits", "left", "tried", "visits")

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.exits: list[Sequence[int]] = []
        """Steps that lead out of here, as far as they were looked for."""
        self.tried = False
        self.left = -1
        """How often one of them was taken."""
        self.visits = 0


def _preferred(allowed: list[int], filler: int, prose: bool) -> Choices:
    letters = [c for c in allowed if c < 128 and chr(c).isalpha()]
    marks = [c for c in allowed if c >= 256]
    lead = [c for c in allowed if 128 <= c < 256]
    if len(letters) >= FREE_LETTERS:
        quote = [c for c in b'"' if c in allowed]
        digits = [c for c in allowed if c in _DIGITS]
        kinds = [c for c in allowed if c < 128 and not chr(c).isalnum() and c not in _OTHER_IN_TEXT]
        kinds.sort(key=lambda c: c in _BLANK)
        escape = [c for c in allowed if c == _ESCAPE]
        fill = [filler] if filler in allowed else []
        ordered = (*marks, *quote, *fill, letters[0], *digits[:1], *kinds, *escape, *lead[:1])
        return Choices(tuple(dict.fromkeys(ordered)), True)
    scalars = _SCALARS if len(letters) <= 3 else _SCALARS[:10]
    closers = _CLOSERS.replace(b",", b"") if prose else _CLOSERS
    first = [c for c in closers if c in allowed] + [c for c in scalars if c in allowed]
    rest = [c for c in allowed if c < 128 and c not in first]
    rest.sort(key=lambda c: ((c in _BLANK) != prose and not chr(c).isalnum(), c in _BLANK, not chr(c).isalnum(), c))
    return Choices((*marks, *first, *rest, *lead[:16]), False)
