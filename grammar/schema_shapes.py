"""Shapes of grammars: patterns, choices, and JSON schemas by way of the rules that `schema_rules` makes of them.

A shape may allow a little more than the library does (other escapes), so that what an output says is followed; what is
taken from it for a way to the end is checked by the library. What is not read here is left to the library (`Opaque`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from asyncengine.grammar.automata import OtherKey, Words
from asyncengine.grammar.canonical import parse_json
from asyncengine.grammar.regex_shapes import regex_shape, searched_shape
from asyncengine.grammar.rules import Members, Repeat, Rules, Symbol
from asyncengine.grammar.samples import samples
from asyncengine.grammar.schema_members import KEY, PLAIN_KEY
from asyncengine.grammar.shapes import (
    Chain,
    Either,
    Opaque,
    Shape,
    Times,
    Unmodelled,
    Unordered,
    literal,
)
from asyncengine.grammar.spec import Grammar

FORMATS = {
    "email": "a@a", "hostname": "a", "ipv4": "0.0.0.0", "ipv6": "::", "uri": "a:",
    "uuid": "00000000-0000-0000-0000-000000000000",
}  # fmt: skip
"""Short texts of the formats that the library enforces."""
MAX_LEAVES = 4096
"""Shapes of strings and patterns that are kept from one schema to the next."""
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_REGEX = re.compile(r"/((?:[^/\\]|\\.)*)/(\?)?", re.DOTALL)
_TERMINAL = re.compile(
    r"(?P<but>~?)/(?:\(\?:(?P<words>\"(?:[^/\\]|\\.)*)\)|(?P<regex>(?:[^/\\]|\\.)*))/(?: & |\Z)", re.DOTALL
)
_WORD = re.compile(r"(?:[^|\\]|\\.)+", re.DOTALL)


def shape_of(grammar: Grammar, rules: tuple[Rules, str] | None) -> Shape | None:
    """The shape of a grammar; None for one that has none. `rules`: those of a schema, and the first one's name."""
    try:
        if grammar.kind == "regex":
            return regex_shape(grammar.text)
        if grammar.kind == "choice":
            return Words([text.encode("utf-8", "replace") for text in parse_json(grammar.text)])
        return None if rules is None else _Reader(*rules).start
    except Unmodelled:
        return None


class _Name(Shape):
    """Stands for the shape of a rule while others are read."""

    target: Shape


class _Reader:
    """Shapes of rules, each once."""

    def __init__(self, rules: Rules, start: str) -> None:
        self._rules = rules
        self._texts = {name: text for text, name in rules.names()}
        self._shapes: dict[str, Shape] = {}
        self._pending: list[tuple[_Name, str]] = []
        self._made: list[Chain | Either | Times | Unordered] = []
        first = self._named(start)
        for named, name in self._pending:  # grows while it is walked
            found = [self._sequence(symbols) for symbols in rules.alternatives[name]]
            named.target = found[0] if len(found) == 1 else self._keep(Either(found))
        for shape in self._made:
            if isinstance(shape, Times):
                shape.body = _itself(shape.body)
            else:
                shape.items = tuple(map(_itself, shape.items))
        self.start = _itself(first)

    def _keep(self, shape: Chain | Either | Times | Unordered) -> Shape:
        self._made.append(shape)
        return shape

    def _unordered(self, members: Members) -> Shape:
        pairs = [*map(self._named, members.pairs), *([self._named(members.free)] if members.free else [])]
        needed = [*range(members.needed), *([len(members.pairs)] if members.strange else [])]
        comma = self._sequence([*members.comma])
        shape = Unordered(pairs, comma, needed, len(members.pairs) if members.free else None)
        self._made += [item for item in shape.items if isinstance(item, Chain)]
        return self._keep(shape)

    def _sequence(self, symbols: list[Symbol]) -> Shape:
        found = [self._symbol(symbol) for symbol in symbols]
        return found[0] if len(found) == 1 else self._keep(Chain(found))

    def _symbol(self, symbol: Symbol) -> Shape:
        if isinstance(symbol, Members):
            return self._unordered(symbol)
        if isinstance(symbol, Repeat):
            return self._keep(Times(self._named(symbol.rule), symbol.least, symbol.most))
        return self._named(symbol)

    def _named(self, name: str) -> Shape:
        shape = self._shapes.get(name)
        if shape is None:
            if name in self._rules.alternatives:
                shape = named = _Name()
                self._pending.append((named, name))
            else:
                shape = leaf_shape(self._texts.get(name, name))
            self._shapes[name] = shape
        return shape


def _itself(shape: Shape) -> Shape:
    """The shape that a name stands for in the end: with names, half of all shapes would be one."""
    while isinstance(shape, _Name):
        shape = shape.target
    return shape


@functools.lru_cache(MAX_LEAVES)
def leaf_shape(text: str) -> Shape:
    """The shape of Lark text that stands for itself: a literal, a terminal, or a schema of strings or numbers."""
    if _TEXT.fullmatch(text):
        return literal(json.loads(text).encode())
    if text.startswith("%lark "):
        return Opaque(text)
    if text.startswith("%json "):
        return _json(text, json.loads(text[6:]))
    match = _REGEX.fullmatch(text)
    if match is None or text.startswith('/(?:"'):
        return _terminal(text)
    try:
        shape = regex_shape(match[1].replace("\\/", "/"))
    except Unmodelled:
        return Opaque(text)
    return Times(shape, 0, 1) if match[2] else shape


def _terminal(text: str) -> Shape:
    """An expression over patterns: those that a text matches, and what it must not be."""
    found = list(_TERMINAL.finditer(text))
    if sum(len(part[0]) for part in found) < len(text):  # nested, as look-aheads are
        return Opaque(text)
    matched, wrong = (
        [part["regex"].replace("\\/", "/") for part in found if part["regex"] is not None and bool(part["but"]) is but]
        for but in (False, True)
    )
    listed = [word for part in found if part["words"] for word in _WORD.findall(part["words"])]
    names = [re.sub(r"\\(.)", r"\1", word) for word in listed]
    if not matched and not wrong:
        return Words([name.encode("utf-8", "replace") for name in names])
    if matched in ([KEY], [PLAIN_KEY]) and not wrong:
        return OtherKey([name[1:-1] for name in names], escapes=matched == [KEY])
    for sample in (sample for pattern in matched for sample in samples(pattern)):
        if sample not in names and _all(re.fullmatch, matched, sample) and not _any(re.fullmatch, wrong, sample):
            return Opaque(text, sample.encode())
    return Opaque(text)


def _all(match: Callable[[str, str], Any], patterns: Sequence[str], text: str) -> bool:
    """Whether `text` matches all of `patterns`, as Python reads them."""
    try:
        return all(match(pattern, text) for pattern in patterns)
    except (re.error, RecursionError, OverflowError):
        return False


def _any(match: Callable[[str, str], Any], patterns: Sequence[str], text: str) -> bool:
    return any(not _all(lambda one, two: not match(one, two), [pattern], text) for pattern in patterns)


def _json(text: str, schema: dict[str, Any]) -> Shape:
    said = schema.get("allOf", [schema])
    if any(part.get("type") != "string" for part in said):
        return Opaque(text)
    if schema.keys() <= {"x-guidance", "type", "pattern"}:
        with contextlib.suppress(Unmodelled):
            return Chain([literal(b'"'), searched_shape(schema.get("pattern", "")), literal(b'"')])
    return Opaque(text, _string_sample(said))


def _string_sample(said: list[dict[str, Any]]) -> bytes | None:
    """A short string that is valid under all of `said`, as far as Python can tell."""
    patterns = [part["pattern"] for part in said if "pattern" in part]
    formats = dict.fromkeys(part["format"] for part in said if "format" in part)
    found = [FORMATS.get(name) for name in formats] or [text for pattern in patterns for text in samples(pattern)]
    for text in found if len(formats) <= 1 else ():
        if text is not None and _all(re.search, patterns, text) and all(_holds(part, text) for part in said):
            return json.dumps(text, ensure_ascii=False).encode()
    return None


def _holds(part: dict[str, Any], text: str) -> bool:
    """`text` keeps the length and is among the values of a schema."""
    size = len(text)
    return part.get("minLength", 0) <= size <= part.get("maxLength", size) and text in part.get("enum", (text,))
