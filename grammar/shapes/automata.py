"""Shapes whose places are states: words to choose from, and keys that are none of some. A byte leads to the next state
by a look into a sorted list, so that neither many words nor long ones are taken apart beforehand."""

from __future__ import annotations

import heapq
import math
import re
from bisect import bisect_left
from collections.abc import Collection
from fractions import Fraction
from typing import Any

from asyncengine.grammar.shapes.nodes import Shape

FEW = 16
"""Texts to the end that are compared."""
MORE_DIGITS = 20
"""Digits that a number may need to become a multiple: the library counts to 10**18."""
_NUMBER = re.compile(rb"-?(0|[1-9][0-9]*|)(?:(?<=[0-9])\.([0-9]*))?")
State = bytes | int
"""The beginning of a word that was said so far, or a number beyond all words."""
_FREE, _ESCAPE = 1, 5
"""States of a key that is none of the words: behind whole letters (and 1 to 3 more where so many bytes of a letter are
missing), behind a backslash; the first byte of a letter whose second may not be any stands for itself."""
_SECOND = {0xE0: b"\xa0\x80", 0xED: b"\x80\x80", 0xF0: b"\x90\x80\x80", 0xF4: b"\x80\x80\x80"}
_ESCAPED = b'"\\bfnrt'
_LETTERS = re.compile(rb"(?:[^\\]|\\u.{4}|\\[^u])*", re.DOTALL)


class Words(Shape):
    """One of some texts. A state is what was said of it."""

    __slots__ = ("words",)
    begin = b""

    def __init__(self, words: Collection[bytes]) -> None:
        self.words = sorted(set(words))

    def on(self, state: Any, byte: int) -> tuple[State | None, bool]:
        """The state behind `byte`, None if nothing may follow; and whether it may end there."""
        said = state + bytes([byte])
        begin, end = self._begun(said)
        whole = begin < end and self.words[begin] == said
        return (said if end - begin > whole else None), whole

    def endings(self, state: Any) -> list[bytes]:
        """Some texts that lead from a state to an end, none where it is no beginning."""
        begin, end = self._begun(state)
        return [word[len(state) :] for word in heapq.nsmallest(FEW, self.words[begin:end], key=len)]

    def _begun(self, said: bytes) -> tuple[int, int]:
        """The words from one to another begin with `said`."""
        return bisect_left(self.words, said), bisect_left(self.words, said + b"\xff")


class Multiples(Words):
    """Decimal numbers between bounds that are multiples of a step. A state is what was said of one."""

    __slots__ = ("_high", "_low", "_step")

    def __init__(self, step: Fraction, low: Fraction, high: Fraction) -> None:
        self._step, self._low, self._high = step, low, high
        super().__init__([])

    def on(self, state: Any, byte: int) -> tuple[State | None, bool]:
        said = state + bytes([byte])
        found = self.endings(said)
        return (said if found else None), b"" in found

    def endings(self, state: Any) -> list[bytes]:
        match = _NUMBER.fullmatch(state)
        if match is None:
            return []
        whole, fraction, negative = match[1], match[2], state[:1] == b"-"
        digits, step = int(whole + (fraction or b"") or b"0"), self._step
        zero = fraction is None and whole == b"0"  # no digit may follow
        for more in range(0 if whole and fraction != b"" else 1, 1 if zero else MORE_DIGITS):
            scale = 1 if fraction is None else 10 ** (len(fraction) + more)
            first, last = digits * 10**more, (digits + 1) * 10**more - 1
            if not whole:
                first, last = (0 if more == 1 else 10 ** (more - 1)), 10**more - 1
            first = first or int(negative)
            ends = (-last, -first) if negative else (first, last)
            unit = Fraction(math.lcm(step.numerator * scale, step.denominator), step.denominator * scale)
            value = math.ceil(max(self._low, Fraction(ends[0], scale)) / unit) * unit
            if value <= min(self._high, Fraction(ends[1], scale)):
                text = str(abs(int(value * scale))).zfill(len(whole + (fraction or b"")) + more)
                return [text[len(text) - more :].encode() if more else b""]
        if whole and fraction is None and step.denominator > 1:
            return [b"." + rest for rest in self.endings(state + b".")]
        return []


class OtherKey(Words):
    """A JSON key, quotes included, that is none of some as JSON writes them."""

    __slots__ = ("_escapes",)

    def __init__(self, names: Collection[str], *, escapes: bool) -> None:
        """`names`: as they stand between the quotes; `escapes`: others may have short ones."""
        super().__init__([b'"%b"' % name.encode("utf-8", "replace") for name in names])
        self._escapes = escapes

    def on(self, state: Any, byte: int) -> tuple[State | None, bool]:
        if state == b"":
            return (b'"' if byte == 34 else None), False
        if isinstance(state, bytes):
            said = state + bytes([byte])
            begin, end = self._begun(said)
            if begin < end:
                return (None if self.words[begin] == said else said), False
            state = _missing(state)
        if state in (_ESCAPE, _FREE):
            return self._letter(state, byte)
        if not 0x80 <= byte < 0xC0:
            return None, False
        return (_FREE + len(_SECOND[state]) - 1 if state in _SECOND else state - 1), False

    def _letter(self, state: int, byte: int) -> tuple[State | None, bool]:
        """The first byte of a letter, or what follows a backslash."""
        if state == _ESCAPE:
            return (_FREE if self._escapes and byte in _ESCAPED else None), False
        if byte < 0x80:
            plain = 32 <= byte < 127 and byte not in b'"\\'
            return (_FREE if plain else _ESCAPE if byte == 92 and self._escapes else None), byte == 34
        if byte in _SECOND:
            return byte, False
        return (None if not 0xC2 <= byte < 0xF5 else _FREE + (1 if byte < 0xE0 else 2 if byte < 0xF0 else 3)), False

    def endings(self, state: Any) -> list[bytes]:
        said = b'"' if state == b"" else state
        if isinstance(said, int):
            return [b'n"' if said == _ESCAPE else _SECOND.get(said, b"\x80" * (said - _FREE)) + b'"']
        word = next(iter(self.words[slice(*self._begun(said))]), b"")
        while _missing(said) != _FREE:  # the letter begun is that of a word
            said = word[: len(said) + 1]
        for byte in (34, *range(97, 123), *range(65, 91), *range(48, 58)):
            begin, end = self._begun(said + bytes([byte]))
            if begin == end:
                text = said + (b'"' if byte == 34 else b'%c"' % byte)
                return [text[len(state) :]]
        return []


def _missing(said: bytes) -> int:
    """The state that a key which goes on with other letters is in behind `said`."""
    if not _LETTERS.fullmatch(said):
        return _ESCAPE
    for back, byte in enumerate(reversed(said[-3:])):
        if byte >= 0xC0:
            length = 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
            return byte if not back and byte in _SECOND else _FREE + max(0, length - back)
        if byte < 0x80:
            break
    return _FREE
