"""Symbols to try in one place of a grammar: of those it allows, one for each kind that makes a difference."""

from __future__ import annotations

from typing import NamedTuple

FREE_LETTERS = 40
"""A place that allows so many letters is inside free text: any letter will do."""
BRACKETS = frozenset(b"}])>")
ESCAPE = 0x5C
BLANK = frozenset(b" \n\t\r")

_CLOSERS = b'}])>,:"'
_SCALARS = b"0123456789ntf"
_DIGITS = frozenset(b"0123456789")
_OTHER_IN_TEXT = frozenset(b'"\\')


class Choices(NamedTuple):
    """Symbols worth trying in one place, most promising first: one for each kind that makes a difference."""

    symbols: tuple[int, ...]
    free: bool
    """Inside free text, where what is chosen hardly matters."""


def preferred(allowed: list[int], filler: int, prose: bool) -> Choices:
    """`allowed`: symbols, ascending. `filler`: the letter to fill free text with. `prose`: a comma goes on rather than
    it closes something, and a blank may be the way on; otherwise as in JSON."""
    letters = [c for c in allowed if c < 128 and chr(c).isalpha()]
    marks = [c for c in allowed if c >= 256]
    lead = [c for c in allowed if 128 <= c < 256]
    if len(letters) >= FREE_LETTERS:
        quote = [c for c in b'"' if c in allowed]
        digits = [c for c in allowed if c in _DIGITS]
        kinds = [c for c in allowed if c < 128 and not chr(c).isalnum() and c not in _OTHER_IN_TEXT]
        kinds.sort(key=lambda c: c in BLANK)
        escape = [c for c in allowed if c == ESCAPE]
        fill = [filler] if filler in allowed else []
        ordered = (*marks, *quote, *fill, letters[0], *digits[:1], *kinds, *escape, *lead[:1])
        return Choices(tuple(dict.fromkeys(ordered)), True)
    scalars = _SCALARS if len(letters) <= 3 else _SCALARS[:10]
    closers = _CLOSERS.replace(b",", b"") if prose else _CLOSERS
    first = [c for c in closers if c in allowed] + [c for c in scalars if c in allowed]
    rest = [c for c in allowed if c < 128 and c not in first]
    rest.sort(key=lambda c: ((c in BLANK) != prose and not chr(c).isalnum(), c in BLANK, not chr(c).isalnum(), c))
    return Choices((*marks, *first, *rest, *lead[:16]), False)
