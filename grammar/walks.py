"""One walk through a grammar towards a complete output, byte by byte, by a fixed order of preference.

What is open is closed before anything is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncengine.grammar.choices import BRACKETS, ESCAPE, Choices

PATIENCE = 256
"""Times that a walk takes the same choice in the same-looking place before it takes the next one. Places deep inside
nested values look alike, so it must not be impatient."""
LOOK_AGAIN = 48
"""Steps in one place after which what leads out of it is looked for again."""
STEP, LOOK = 8, 8
"""Costs of a step and of a tried symbol beside the symbols themselves, in symbols."""
MORE = 16
"""Texts that are tried after one that leads out of a place."""

QUOTE = 0x22
_SPECIAL = 0xFF


class Effort:
    """The effort left to a search, in symbols that the library steps over: half a microsecond each."""

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


Tail = list[int]
"""A known way, or its beginning. Where it is whole it ends in the end of sequence."""


class Walk(NamedTuple):
    """Symbols that lead to a complete output, or to where a known tail does."""

    symbols: list[int]
    tail: int
    """Index of the tail, -1: they lead to the end themselves."""


class Fork(NamedTuple):
    """A place on a walk where another choice was possible."""

    done: int
    """Symbols of the walk before it."""
    others: Sequence[int]


class Walker:
    """Walks once, from where `matcher` stands (it is left there)."""

    def __init__(
        self,
        choices: Callable[[bytes], Choices],
        ways_out: Sequence[list[int]],
        matcher: Any,
        limit: int,
        effort: Effort,
        next_way: int,
    ) -> None:
        """`ways_out`: texts that may end a free text; `next_way`: the one to try first. `limit`: symbols at most."""
        self.path: list[int] = []
        self.forks: list[Fork] = []
        self.next_way = next_way
        self._choices = choices
        self._ways_out = ways_out
        self._matcher = matcher
        self._limit = limit
        self._effort = effort
        self._places: dict[bytes, _Place] = {}
        self._last: _Place | None = None

    def run(self, tails: Sequence[Tail] = ()) -> Walk | None:
        """The way found, ended where one of `tails` leads to the end. None: there is none, it is longer than `limit`,
        or the effort was spent; `path` is then how far it came."""
        tail = self._go(tails)
        self._matcher.rollback(len(self.path))
        return None if tail is None else Walk(self.path, tail)

    def _go(self, tails: Sequence[Tail]) -> int | None:
        matcher, effort = self._matcher, self._effort
        while not matcher.is_accepting():
            effort.left -= STEP + len(tails)
            for index, tail in enumerate(tails):
                if leads(matcher, tail):
                    return index
            step: Sequence[int] = matcher.compute_ff_bytes()
            if _SPECIAL in step:  # a special token is spelled out there; as a symbol it is one
                step = matcher.compute_ff_tokens()
            step = step or self._choose()
            if not step or effort.left <= 0 or len(self.path) + len(step) > self._limit:
                return None
            taken = matcher.try_consume_tokens(list(step))
            if taken != len(step):
                matcher.rollback(taken)
                return None
            effort.left -= taken
            self.path += step
        return -1

    def _choose(self) -> Sequence[int]:
        """Choose what to do in a place: the most promising; if the last step changed nothing, a choice that does."""
        mask: bytes = self._matcher.compute_bitmask()
        place = self._places.get(mask)
        if place is None:
            place = self._places[mask] = _Place(mask, self._choices(mask))
            if not place.choices.free:
                self.forks.append(Fork(len(self.path), place.choices.symbols[1:]))
        symbols, free = place.choices
        if self._matcher.is_error() or not symbols:
            return ()
        stays = place is self._last
        place.run = place.run + 1 if stays else 0
        place.visits += 1
        self._last = place
        turn = place.visits // PATIENCE  # coming back and back, it is going round in a circle
        # closing one bracket of many changes nothing to be seen, and is progress all the same
        if (stays and self.path[-1] not in BRACKETS) or (free and self._ways_out):
            if place.exits or place.run % LOOK_AGAIN <= 1:
                place.exits = self._exits(place)
            if place.exits:
                place.left += 1
                return place.exits[place.left // 2 % len(place.exits)]
        return (symbols[0 if free else turn % len(symbols)],)

    # ---------------------------------------------------------------- what leads out

    def _exits(self, place: _Place) -> list[list[int]]:
        """Steps after which something else is allowed than here. In free text an escape and the first byte of a longer
        character are none: they come back."""
        free, symbols = place.choices.free, place.choices.symbols
        singles = [[c] for c in symbols if not free or (c != ESCAPE and not 128 <= c < 256)]
        found: list[list[int]] = [step for step in singles if self._is_exit(place, step)]
        if [QUOTE] in found:
            return found  # the end of a string, and with it of all that its text has to be
        ways, more = self._ways_out, len(self._ways_out)
        allowed = int.from_bytes(place.mask, "little")
        # one that led out of such a place before did not lead far
        begin = min(self.next_way + (place.left >= 0), len(ways))
        for at in (*range(begin, len(ways)), *range(begin)):
            # the values of a schema come in its order, and so do the ways out of them
            if allowed >> ways[at][0] & 1 and self._is_exit(place, ways[at]):
                if more > MORE:
                    more, self.next_way = MORE, at
                found.append(ways[at])
            more -= 1
            if not more or self._effort.left <= 0:
                break
        return found

    def _is_exit(self, place: _Place, step: list[int]) -> bool:
        matcher = self._matcher
        self._effort.left -= LOOK
        if matcher.validate_tokens(step) != len(step):
            return False
        self._effort.left -= len(step)
        taken = matcher.try_consume_tokens(step)
        found = taken == len(step) and (matcher.is_accepting() or matcher.compute_bitmask() != place.mask)
        matcher.rollback(taken)
        return bool(found)


def leads(matcher: Any, tail: Tail) -> bool:
    """`tail` can be followed from where `matcher` stands."""
    return bool(tail) and bool(matcher.validate_tokens(tail) == len(tail))


class _Place:
    """A walk's memory of places that look alike."""

    __slots__ = ("choices", "exits", "left", "mask", "run", "visits")

    def __init__(self, mask: bytes, choices: Choices) -> None:
        self.mask = mask
        self.choices = choices
        self.visits = 0
        self.run = 0
        """Visits since the walk was elsewhere."""
        self.exits: list[list[int]] = []
        """Steps that lead out of here, as far as they were looked for."""
        self.left = -1
        """Times that one of them was taken."""
