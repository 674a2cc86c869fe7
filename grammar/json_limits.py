"""Limits of JSON texts that a library's own grammar of JSON lacks: how many digits a number has, how many brackets are
open, and that no key is written by codes of letters, so that no declared key passes for an undeclared one.

Of a text so far, its end is kept: `[` for each list that is open, `:` for each object around a value, `{` where a key
is due, then the number that it ends in, or the quote of an open string and perhaps a backslash.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import numpy as np

from asyncengine.grammar.schema.numbers import WRITTEN_DIGITS
from asyncengine.grammar.schema.rules import MAX_NESTING
from asyncengine.grammar.shared_masks import Mask

NEAR = 9
"""Bytes of a number from which on one token may go beyond its limit."""
_PARTS = re.compile(
    rb'"(?:[^"\\]|\\(?:(?P<code>u)|[^u]))*(?:"|(?P<open>\\?)\Z)|(?P<number>[-0-9][-+.0-9eE]*)|(?P<sign>[][{}:,])',
    re.DOTALL,
)
_NUMBER = re.compile(
    rb"-?[0-9]{0,%d}(?:\.[0-9]{0,%d})?|-?[0-9]{1,9}(?:\.[0-9]{1,%d})?[eE](?:\+?[0-2]?[0-9]{0,2}|-[0-9]{0,3})"
    % ((WRITTEN_DIGITS,) * 3)
)
"""The beginnings of JSON's numbers that `numbers.Numbers` write where nothing is said of them."""
_RISKY = re.compile(rb"\\u|[0-9][eE]|[eE][-+]?[0-9]")
"""Parts of tokens that may go beyond a limit. Most vocabularies have no digit beside a letter."""


def behind(end: bytes, data: bytes) -> bytes | None:
    """The end of a text behind `data`, one more token; None where a number or a key goes beyond its limit."""
    return end if end[-1:] == b'"' and b'"' not in data and b"\\" not in data else _read(end + data)


@functools.lru_cache(1 << 14)
def _read(text: bytes) -> bytes | None:
    around, tail = bytearray(), b""
    for part in _PARTS.finditer(text):
        kind, said, tail = part.lastgroup, part[0], b""
        if said[:1] == b'"':
            if part["code"] and around[-1:] == b"{":
                return None
            tail = b"" if part["open"] is None else b'"' + part["open"]
        elif kind == "number":
            if not _NUMBER.fullmatch(said):
                return None
            tail = said if part.end() == len(text) else b""
        elif said in b"[{" or (said == b":" and around[-1:] != b"{"):
            around += said
        elif said in b":,":
            around[-1:] = b"[" if around[-1:] == b"[" else b":" if said == b":" else b"{"
        else:
            del around[-1:]
    return bytes(around) + tail


def _depth(end: bytes) -> int:
    return len(end) - len(end.lstrip(b"[{:"))


class Limits:
    """Takes tokens that go beyond a limit out of one vocabulary's masks. Any number of threads may share it."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._risky = [token for token, data in enumerate(token_bytes) if _RISKY.search(data)]
        self._near = NEAR if all(b"\\u" in token_bytes[token] for token in self._risky) else 0
        self._masks: dict[bytes, Mask] = {}
        """All tokens but those beyond a limit, by the innermost bracket and whether a string is open."""

    def narrow(self, mask: Mask, end: bytes) -> None:
        """Take the tokens that go beyond a limit behind `end` out of `mask`, unless these are all that may come."""
        depth = _depth(end)
        tail, around = end[depth:], end[max(0, depth - 1) : depth + 1]
        is_near = len(tail) > self._near or b"e" in tail.lower() or tail == b'"\\' or depth > MAX_NESTING // 2
        if is_near and tail != b'"':
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            ends = ((token, behind(end, self._token_bytes[token])) for token in allowed)
            beyond = [token for token, after in ends if after is None or _depth(after) > MAX_NESTING]
            bits[beyond if len(beyond) < len(allowed) else []] = 0
            mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        else:
            if around not in self._masks:
                bits = np.ones(32 * len(mask), dtype=np.uint8)
                bits[[token for token in self._risky if behind(around, self._token_bytes[token]) is None]] = 0
                self._masks[around] = np.packbits(bits, bitorder="little").view(np.int32)
            mask &= self._masks[around]
