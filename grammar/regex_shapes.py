"""Shapes of patterns, by Python's own parser. What both dialects may read differently has none."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from asyncengine.grammar.samples import sre
from asyncengine.grammar.shapes import (
    MAX_CODE,
    Chain,
    Either,
    Ranges,
    Shape,
    Times,
    Unmodelled,
    chain,
    complement,
    letters,
    literal,
    meet,
    union,
)

_PLAIN_FLAGS = re.UNICODE.value | re.DOTALL.value
_NEWLINE = [(10, 10)]
_CATEGORIES: dict[str, Ranges] = {"WORD": [(48, 57), (65, 90), (95, 95), (97, 122)], "SPACE": [(9, 13), (32, 32)]}
"""ASCII only, and what is not in them likewise: an output with others of their kind is not followed. Read only."""
_ASCII = [(0, 127)]
RAW: Ranges = [(32, 33), (35, 91), (93, 126), (128, MAX_CODE)]
"""Characters that stand for themselves in a JSON string."""
_ESCAPES = {34: b'\\"', 92: b"\\\\", 8: b"\\b", 12: b"\\f", 10: b"\\n", 13: b"\\r", 9: b"\\t"}

Spelling = Callable[[Ranges], Shape]
"""The function that writes one character of a set."""


def regex_shape(pattern: str) -> Shape:
    """Texts that `pattern` matches from end to end. Raises `Unmodelled`."""
    return _Reader(letters).all_of(_parsed(pattern), searching=False)


def searched_shape(pattern: str) -> Shape:
    """The shape between the quotes of JSON strings in which `pattern` is found. Raises `Unmodelled`."""
    return _Reader(json_letters).all_of(_parsed(pattern), searching=True)


def json_letters(ranges: Ranges) -> Shape:
    """A character as it may be written in a JSON string."""
    plain = meet(ranges, RAW)
    held = union(ranges)
    spelled = [text for code, text in _ESCAPES.items() if any(first <= code <= last for first, last in held)]
    options = ([letters(plain)] if plain else []) + [literal(text) for text in spelled]
    if not options:
        raise Unmodelled
    return options[0] if len(options) == 1 else Either(options)


def _parsed(pattern: str) -> Any:
    try:
        parsed = sre.parse(pattern)
    except Exception:
        raise Unmodelled from None
    if parsed.state.flags & ~_PLAIN_FLAGS:
        raise Unmodelled
    return parsed


class _Reader:
    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling

    def all_of(self, parsed: Any, searching: bool) -> Shape:
        """The whole pattern; `searching`: with any text around it where it is not anchored."""
        self._dotall = bool(parsed.state.flags & re.DOTALL.value)
        items = list(parsed)
        branches = [items]
        if len(items) == 1 and str(items[0][0]) == "BRANCH":
            branches = [list(branch) for branch in items[0][1][1]]
        if not searching:
            return Either([self._sequence(branch) for branch in branches])
        return Either([self._found(branch) for branch in branches])

    def _found(self, items: list[Any]) -> Shape:
        anything = Times(self._spelling([(0, MAX_CODE)]), 0, None)
        before: list[Shape] = [anything]
        after: list[Shape] = [anything]
        if items and _anchor(items[0], "AT_BEGINNING", "AT_BEGINNING_STRING"):
            before, items = [], items[1:]
        if items and _anchor(items[-1], "AT_END", "AT_END_STRING"):
            after, items = [], items[:-1]
        return Chain([*before, self._sequence(items), *after])

    def _sequence(self, items: Any) -> Shape:
        return chain(self._one(str(operator), argument) for operator, argument in items)

    def _one(self, operator: str, argument: Any) -> Shape:
        match operator:
            case "LITERAL":
                return self._spelling([(argument, argument)])
            case "NOT_LITERAL":
                return self._spelling(complement([(argument, argument)]))
            case "ANY":
                return self._spelling(complement([] if self._dotall else _NEWLINE))
            case "IN":
                return self._spelling(_set(argument))
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = argument
                return Times(self._sequence(inner), int(least), None if str(most) == "MAXREPEAT" else int(most))
            case "SUBPATTERN":
                if argument[1] or argument[2]:  # flags for this group only
                    raise Unmodelled
                return self._sequence(argument[-1])
            case "BRANCH":
                return Either([self._sequence(branch) for branch in argument[1]])
        raise Unmodelled


@functools.cache
def digits() -> Ranges:
    """Decimal digits of all scripts. Unicode has them from 0 to 9 in a row, one of which is a multiple of ten."""
    found = ((code, unicodedata.decimal(chr(code), None)) for code in range(0, MAX_CODE + 1, 10))
    return union((code - value, code - value + 9) for code, value in found if value is not None)


def _anchor(item: Any, *names: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in names


def _set(items: Any) -> Ranges:
    found: Ranges = []
    ascii_only = False
    negated = str(items[0][0]) == "NEGATE"
    for operator, argument in items[negated:]:
        match str(operator):
            case "LITERAL":
                found.append((argument, argument))
            case "RANGE":
                found.append(tuple(argument))
            case "CATEGORY":
                _, _, name = str(argument).partition("CATEGORY_")
                if name in ("DIGIT", "NOT_DIGIT"):
                    found += digits() if name == "DIGIT" else complement(digits())
                    continue
                known = _CATEGORIES.get(name.removeprefix("NOT_"))
                if known is None:
                    raise Unmodelled
                found += meet(complement(known), _ASCII) if name.startswith("NOT_") else known
                ascii_only = True
            case _:
                raise Unmodelled
    if not negated:
        return union(found)
    return meet(complement(found), _ASCII) if ascii_only else complement(found)
