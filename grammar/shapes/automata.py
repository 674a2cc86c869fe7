"""Shapes that are automata: words to choose from, and keys that are none of some. A byte leads to the next state by
binary search in a sorted list, so that neither many words nor long ones are unrolled into states beforehand."""

from __future__ import annotations

import heapq
import math
import re
from bisect import bisect_left
from collections.abc import Collection
from fractions import Fraction
from typing import Any

from asyncengine.grammar.shapes.nodes import Shape, utf8_length

MAX_ENDINGS = 16
"""Endings of a state that are compared by their cost in tokens."""
MORE_DIGITS = 20
"""Digits that a number may need to become a multiple: the library counts to 10**18."""
_NUMBER = re.compile(rb"-?(0|[1-9][0-9]*|)(?:(?<=[0-9])\.([0-9]*))?")
State = bytes | int
"""A prefix of a word, or a number for a text that no word begins with."""
_FREE, _ESCAPE = 1, 5
"""States of a key that no word begins with: behind whole characters (2 to 4: 1 to 3 bytes of one are missing), and
behind a backslash. The first byte of a character that restricts its second (`_SECOND`) is a state by itself."""
_SECOND = {0xE0: b"\xa0\x80", 0xED: b"\x80\x80", 0xF0: b"\x90\x80\x80", 0xF4: b"\x80\x80\x80"}
_ESCAPED = b'"\\bfnrt'
_LETTERS = re.compile(rb"(?:[^\\]|\\u.{4}|\\[^u])*", re.DOTALL)


class Words(Shape):
    """One of some texts. A state is the prefix so far."""

    __slots__ = ("words",)
    begin = b""

    def __init__(self, words: Collection[bytes]) -> None:
        self.words = sorted(set(words))

    def on(self, state: Any, byte: int) -> tuple[State | None, bool]:
        """(state behind `byte`, None if nothing may follow; whether the text may end there)."""
        prefix = state + bytes([byte])
        begin, end = self._range(prefix)
        is_word = begin < end and self.words[begin] == prefix
        return (prefix if end - begin > is_word else None), is_word

    def endings(self, state: Any) -> list[bytes]:
        """At most `MAX_ENDINGS` texts that lead from a state to an end, the shortest; none where no word begins so."""
        begin, end = self._range(state)
        return [word[len(state) :] for word in heapq.nsmallest(MAX_ENDINGS, self.words[begin:end], key=len)]

    def _range(self, prefix: bytes) -> tuple[int, int]:
        """(begin, end) in the sorted words of those that begin with `prefix`."""
        return bisect_left(self.words, prefix), bisect_left(self.words, prefix + b"\xff")


class Multiples(Words):
    """Decimal numbers between bounds that are multiples of a step. A state is the prefix so far."""

    __slots__ = ("_high", "_low", "_step")

    def __init__(self, step: Fraction, low: Fraction, high: Fraction) -> None:
        self._step, self._low, self._high = step, low, high
        super().__init__([])

    def on(self, state: Any, byte: int) -> tuple[State | None, bool]:
        prefix = state + bytes([byte])
        endings = self.endings(prefix)
        return (prefix if endings else None), b"" in endings

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
        """`names`: as they stand between the quotes; `escapes`: other keys may have escapes of two characters."""
        super().__init__([b'"%b"' % name.encode("utf-8", "replace") for name in names])
        self._escapes = escapes

    def on(self, state: Any, byte: int) -> tuple[State | None, bool]:
        if state == b"":
            return (b'"' if byte == 34 else None), False
        if isinstance(state, bytes):
            prefix = state + bytes([byte])
            begin, end = self._range(prefix)
            if begin < end:
                return (None if self.words[begin] == prefix else prefix), False
            state = _free_state(state)
        if state in (_ESCAPE, _FREE):
            return self._letter(state, byte)
        if not 0x80 <= byte < 0xC0:
            return None, False
        return (_FREE + len(_SECOND[state]) - 1 if state in _SECOND else state - 1), False

    def _letter(self, state: int, byte: int) -> tuple[State | None, bool]:
        """Past the first byte of a character, or past the one behind a backslash."""
        if state == _ESCAPE:
            return (_FREE if self._escapes and byte in _ESCAPED else None), False
        if byte < 0x80:
            plain = 32 <= byte < 127 and byte not in b'"\\'
            return (_FREE if plain else _ESCAPE if byte == 92 and self._escapes else None), byte == 34
        if byte in _SECOND:
            return byte, False
        return (_FREE + utf8_length(byte) - 1 if 0xC2 <= byte < 0xF5 else None), False

    def endings(self, state: Any) -> list[bytes]:
        prefix = b'"' if state == b"" else state
        if isinstance(prefix, int):
            return [b'n"' if prefix == _ESCAPE else _SECOND.get(prefix, b"\x80" * (prefix - _FREE)) + b'"']
        word = next(iter(self.words[slice(*self._range(prefix))]), b"")
        while _free_state(prefix) != _FREE:  # inside a character, which only a word can have begun
            prefix = word[: len(prefix) + 1]
        for byte in (34, *range(97, 123), *range(65, 91), *range(48, 58)):
            begin, end = self._range(prefix + bytes([byte]))
            if begin == end:
                text = prefix + (b'"' if byte == 34 else b'%c"' % byte)
                return [text[len(state) :]]
        return []


def _free_state(prefix: bytes) -> int:
    """The state of a key behind `prefix`, a prefix of some word, once it goes on otherwise than all words."""
    if not _LETTERS.fullmatch(prefix):
        return _ESCAPE
    for distance, byte in enumerate(reversed(prefix[-3:])):
        if byte >= 0xC0:
            missing = max(0, utf8_length(byte) - 1 - distance)
            return byte if not distance and byte in _SECOND else _FREE + missing
        if byte < 0x80:
            break
    return _FREE
