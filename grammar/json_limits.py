"""Limits of JSON texts that llguidance's JSON compiler does not enforce: digits of a number, open brackets, and keys
without `\\u` escapes, by which a declared key could pass for an undeclared one.

A text so far is represented by its `end`: `[` for each open list, `:` for each object around a value, `{` for one in
which a key is next, then the unfinished number, or the quote of an open string and perhaps a backslash.
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
"""From this many bytes of a number on, one token may exceed its limit."""
_PARTS = re.compile(
    rb'"(?:[^"\\]|\\(?:(?P<code>u)|[^u]))*(?:"|(?P<open>\\?)\Z)|(?P<number>[-0-9][-+.0-9eE]*)|(?P<sign>[][{}:,])',
    re.DOTALL,
)
_NUMBER = re.compile(
    rb"-?[0-9]{0,%d}(?:\.[0-9]{0,%d})?|-?[0-9]{1,9}(?:\.[0-9]{1,%d})?[eE](?:\+?[0-2]?[0-9]{0,2}|-[0-9]{0,3})"
    % ((WRITTEN_DIGITS,) * 3)
)
"""Prefixes of the numbers that `numbers.Numbers` allows without bounds."""
_RISKY = re.compile(rb"\\u|[0-9][eE]|[eE][-+]?[0-9]")
"""Parts of tokens that may exceed a limit. Most vocabularies have no token with a digit beside a letter."""


def end_behind(end: bytes, data: bytes) -> bytes | None:
    """The end of a text behind `data`, one more token; None where a number or a key goes beyond its limit."""
    return end if end[-1:] == b'"' and b'"' not in data and b"\\" not in data else _read(end + data)


@functools.lru_cache(1 << 14)
def _read(text: bytes) -> bytes | None:
    brackets, tail = bytearray(), b""
    for match in _PARTS.finditer(text):
        group, piece, tail = match.lastgroup, match[0], b""
        if piece[:1] == b'"':
            if match["code"] and brackets[-1:] == b"{":
                return None
            tail = b"" if match["open"] is None else b'"' + match["open"]
        elif group == "number":
            if not _NUMBER.fullmatch(piece):
                return None
            tail = piece if match.end() == len(text) else b""
        elif piece in b"[{" or (piece == b":" and brackets[-1:] != b"{"):
            brackets += piece
        elif piece in b":,":
            brackets[-1:] = b"[" if brackets[-1:] == b"[" else b":" if piece == b":" else b"{"
        else:
            del brackets[-1:]
    return bytes(brackets) + tail


def _depth(end: bytes) -> int:
    return len(end) - len(end.lstrip(b"[{:"))


class Limits:
    """Removes tokens that exceed a limit from one vocabulary's masks. Any number of threads may share it."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._risky = [token for token, data in enumerate(token_bytes) if _RISKY.search(data)]
        self._near = NEAR if all(b"\\u" in token_bytes[token] for token in self._risky) else 0
        self._masks: dict[bytes, Mask] = {}
        """Masks without the risky tokens, by the innermost bracket and whether a string is open."""

    def narrow(self, mask: Mask, end: bytes) -> None:
        """Remove the tokens that exceed a limit behind `end` from `mask`, unless no token would be left."""
        depth = _depth(end)
        tail, innermost = end[depth:], end[max(0, depth - 1) : depth + 1]
        is_near = len(tail) > self._near or b"e" in tail.lower() or tail == b'"\\' or depth > MAX_NESTING // 2
        if is_near and tail != b'"':
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            ends = ((token, end_behind(end, self._token_bytes[token])) for token in allowed)
            beyond = [token for token, end_after in ends if end_after is None or _depth(end_after) > MAX_NESTING]
            bits[beyond if len(beyond) < len(allowed) else []] = 0
            mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        else:
            if innermost not in self._masks:
                bits = np.ones(32 * len(mask), dtype=np.uint8)
                bits[[token for token in self._risky if end_behind(innermost, self._token_bytes[token]) is None]] = 0
                self._masks[innermost] = np.packbits(bits, bitorder="little").view(np.int32)
            mask &= self._masks[innermost]
