"""Shapes of regular expressions, read by Python's own parser. Syntax that llguidance's may read otherwise has none."""

from __future__ import annotations

import functools
import importlib
import re
import string
from typing import Any

import llguidance

from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.automata import Words


@functools.cache
def characters(name: str) -> nodes.Ranges:
    r"""The characters of `\d`, `\s`, `\w` or `\p{...}` by llguidance's masks, byte by byte. 60 ms for `\w`."""
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(f"start: /{name}/"), log_level=0
    )
    ranges: nodes.Ranges = []
    prefixes = [b""]
    for prefix in prefixes:  # grows while it is walked
        state = matcher.deep_copy()
        state.consume_tokens([*prefix])
        bits = int.from_bytes(state.compute_bitmask()[:32], "little")
        bytes_left = nodes.utf8_length(prefix[0]) - len(prefix) if prefix else 0
        for byte in (byte for byte in range(256) if bits >> byte & 1):
            if bytes_left == 1 or (not prefix and byte < 0x80):
                code = ord((prefix + bytes([byte])).decode())
                ranges.append((code, code))
            else:
                prefixes.append(prefix + bytes([byte]))
    return nodes.union(ranges)


sre: Any = importlib.import_module("re._parser")
"""Python's own parser of patterns; private, so whatever it raises or changes leaves a pattern to the library."""
_DOTALL, _ANY_CASE = re.DOTALL.value, re.IGNORECASE.value
_READ_FLAGS = re.UNICODE.value | re.VERBOSE.value | _DOTALL | _ANY_CASE
MAX_KEPT, MAX_KEPT_LENGTH = 1600, 2560
"""Patterns whose shapes are kept, and most characters in each: the shape of 64,000 takes 2 MB. The formats uri and iri
are shorter."""
_NEWLINE = [(10, 10)]
_IN_JSON: dict[str, nodes.Ranges] = {r"\d": [(48, 57)], r"\w": [(48, 57), (65, 90), (95, 95), (97, 122)]}
"""Classes that are ASCII in the pattern of a schema, as ECMAScript has them. Read only."""
_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}
_OTHER_CASES = {"k": "\u212a", "s": "\u017f"}  # the signs of Kelvin and the long s, which fold to ASCII
_CASES = [(char, char.upper(), *_OTHER_CASES.get(char, "")) for char in string.ascii_lowercase]
"""Characters that match one another where case is ignored."""
RAW: nodes.Ranges = [(32, 33), (35, 91), (93, 126), (128, nodes.MAX_CODE)]
"""Characters that stand for themselves in a JSON string."""
_ESCAPE = re.compile(r"\\(?:[xu]\{([0-9A-Fa-f]{1,6})\}|([pP](?:\{\w{1,40}\}|\w))|.)", re.DOTALL)
_PRIVATE = range(0xF0000, 0xF0400)
"""Characters of private use that stand for `\\p{...}`, which Python's parser does not know."""
_LISTED = re.compile(r"\(\?:((?:[^\\()\[\]{}.*+?^$]|\\[^A-Za-z0-9])+)\)", re.DOTALL)
_WORD = re.compile(r"(?:[^|\\]|\\.)+", re.DOTALL)
_CONTROL = r"\\u00(?:[01][0-9A-Fa-f]|7[Ff])"
_ESCAPES = {34: b'\\"', 92: b"\\\\", 8: b"\\b", 12: b"\\f", 10: b"\\n", 13: b"\\r", 9: b"\\t"}


def regex_shape(pattern: str, flags: str = "", json: bool = False) -> nodes.Shape:
    """The texts that `pattern` matches from end to end. `flags`: letters of inline flags; `json`: the texts as they are
    written between the quotes of a JSON string. Raises `Unmodelled`."""
    return (_cached_shape if len(pattern) <= MAX_KEPT_LENGTH else _uncached_shape)(pattern, flags, json)


def _uncached_shape(pattern: str, flags: str, json: bool) -> nodes.Shape:
    if not flags and not json and (listed := _LISTED.fullmatch(pattern)) is not None:
        words = (re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL) for word in _WORD.findall(listed[1]))
        return Words([word.encode("utf-8", "replace") for word in words])
    parsed, properties = _parsed(f"(?{flags})" + pattern if flags else pattern)
    return _Reader(json, properties).either([list(parsed)], parsed.state.flags)


_cached_shape = functools.lru_cache(MAX_KEPT)(_uncached_shape)


def json_letters(ranges: nodes.Ranges) -> nodes.Shape:
    """A character as it may be written in a JSON string."""
    unescaped = nodes.intersection(ranges, RAW)
    characters_in = nodes.union(ranges)
    escapes = [text for code, text in _ESCAPES.items() if any(first <= code <= last for first, last in characters_in)]
    options = ([nodes.letters(unescaped)] if unescaped else []) + [nodes.literal(text) for text in escapes]
    if characters_in[:1] and characters_in[0][0] < 32:
        options.append(regex_shape(_CONTROL))
    if not options:
        raise nodes.Unmodelled
    return options[0] if len(options) == 1 else nodes.Choice(options)


def _parsed(pattern: str) -> tuple[Any, list[str]]:
    """The parse tree of a pattern, and the `\\p{...}` in it, each of which a character of private use stands for."""
    properties = [escape[0] for escape in _ESCAPE.finditer(pattern) if escape[2]]
    signs = map(chr, _PRIVATE)
    try:
        text = _ESCAPE.sub(lambda m: next(signs) if m[2] else re.escape(chr(int(m[1], 16))) if m[1] else m[0], pattern)
        parsed = sre.parse(text)
    except Exception:
        raise nodes.Unmodelled from None
    if parsed.state.flags & ~_READ_FLAGS:
        raise nodes.Unmodelled
    return parsed, properties


class _Reader:
    def __init__(self, json: bool, properties: list[str]) -> None:
        """`json`: characters are written as in a JSON string; `properties`: from `_parsed`."""
        self._json = json
        self._properties = properties

    def either(self, branches: Any, flags: int) -> nodes.Shape:
        return nodes.Choice([self._sequence(branch, flags) for branch in branches])

    def _sequence(self, items: Any, flags: int) -> nodes.Shape:
        return nodes.concat(self._one(str(operator), argument, flags) for operator, argument in items)

    def _one(self, operator: str, argument: Any, flags: int) -> nodes.Shape:
        match operator:
            case "LITERAL":
                return self._set([(operator, argument)], flags)
            case "NOT_LITERAL":
                return self._set([("NEGATE", None), ("LITERAL", argument)], flags)
            case "ANY":
                return self._spelled(nodes.complement([] if flags & _DOTALL else _NEWLINE))
            case "IN":
                return self._set(argument, flags)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = argument
                return nodes.Repeat(
                    self._sequence(inner, flags), int(least), None if str(most) == "MAXREPEAT" else int(most)
                )
            case "SUBPATTERN":
                _, more, less, inner = argument
                if (more | less) & ~_READ_FLAGS:
                    raise nodes.Unmodelled
                return self._sequence(inner, (flags | more) & ~less)
            case "BRANCH":
                return self.either(argument[1], flags)
        raise nodes.Unmodelled

    def _set(self, items: Any, flags: int) -> nodes.Shape:
        """A character class. Where case is ignored, only ASCII is folded here: a class with more has no shape."""
        negated = str(items[0][0]) == "NEGATE"
        ranges = self._listed(items[negated:])
        if flags & _ANY_CASE:
            folded = [case for case in _CASES if any(low <= ord(one) <= high for low, high in ranges for one in case)]
            ranges = nodes.union([*ranges, *((ord(one), ord(one)) for case in folded for one in case)])
            if any(high > 127 for _, high in ranges if high not in (0x17F, 0x212A, nodes.MAX_CODE)):
                raise nodes.Unmodelled
        return self._spelled(nodes.complement(ranges) if negated else nodes.union(ranges))

    def _listed(self, items: Any) -> nodes.Ranges:
        """The characters that the items of a class list."""
        ranges: nodes.Ranges = []
        for operator, argument in items:
            match str(operator):
                case "LITERAL" if argument in _PRIVATE[: len(self._properties)]:
                    ranges += characters(self._properties[argument - _PRIVATE[0]])
                case "LITERAL":
                    ranges.append((argument, argument))
                case "RANGE":
                    ranges.append(tuple(argument))
                case "CATEGORY":
                    _, _, name = str(argument).partition("CATEGORY_")
                    if (sign := _CATEGORIES.get(name.removeprefix("NOT_"))) is None:
                        raise nodes.Unmodelled
                    ascii_ranges = _IN_JSON.get(sign) if self._json else None
                    listed = ascii_ranges or characters(sign)
                    ranges += nodes.complement(listed) if name.startswith("NOT_") else listed
                case _:
                    raise nodes.Unmodelled
        return ranges

    def _spelled(self, ranges: nodes.Ranges) -> nodes.Shape:
        return _spelled(self._json, tuple(ranges))


@functools.lru_cache(1024)
def _spelled(json: bool, ranges: tuple[tuple[int, int], ...]) -> nodes.Shape:
    return (json_letters if json else nodes.letters)([*ranges])
