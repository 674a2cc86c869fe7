"""Shapes of grammars: patterns, choices, and JSON schemas by way of the rules that `schema_rules` makes of them.

A shape may allow a little more than the library does (names that a declared key excludes), so that what an output says
is followed; what is taken from it for a way to the end is checked by the library.
"""

from __future__ import annotations

import json
import re
from typing import Any

from asyncengine.errors import GrammarError
from asyncengine.grammar.canonical import parse_json
from asyncengine.grammar.lower import json_options
from asyncengine.grammar.regex_shapes import RAW, regex_shape, searched_shape
from asyncengine.grammar.rules import Repeat, Rules, Symbol
from asyncengine.grammar.schema_rules import schema_grammar
from asyncengine.grammar.shapes import (
    Chain,
    Either,
    Named,
    Opaque,
    Shape,
    Times,
    Unmodelled,
    letters,
    literal,
)
from asyncengine.grammar.spec import Grammar

_COUNTS = re.compile(r'"min(?:Length|Items|Properties)":|\{[0-9]{1,9}[,}]|\{,[0-9]')
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_REGEX = re.compile(r"/((?:[^/\\]|\\.)*)/(\?)?(?= & ~\(|\Z)", re.DOTALL)
_HEX = [(48, 57), (65, 70), (97, 102)]
_STRING = ("x-guidance", "type", "minLength", "maxLength", "pattern", "enum")


def shape_of(grammar: Grammar) -> Shape | None:
    """The shape of a grammar that counts; None for one that does not, or that has none."""
    if _COUNTS.search(grammar.text) is None:
        return None
    try:
        if grammar.kind == "regex":
            return regex_shape(grammar.text)
        if grammar.kind == "json_schema":
            schema = parse_json(grammar.text)
            return _Reader(*schema_grammar(schema, json_options(grammar, schema))).start
    except (Unmodelled, GrammarError):
        pass
    return None


class _Reader:
    """Shapes of rules, each once."""

    def __init__(self, rules: Rules, start: str) -> None:
        self._rules = rules
        self._texts = {name: text for text, name in rules.names()}
        self._shapes: dict[str, Shape] = {}
        self.start = self._named(start)
        pending = [start]
        while pending:
            name = pending.pop()
            shape = self._shapes[name]
            if isinstance(shape, Named) and shape.target is None:
                known = len(self._shapes)
                alternatives = rules.alternatives[name]
                shape.target = Either([Chain([self._symbol(s) for s in symbols]) for symbols in alternatives])
                pending += list(self._shapes)[known:]

    def _symbol(self, symbol: Symbol) -> Shape:
        if isinstance(symbol, Repeat):
            return Times(self._named(symbol.rule), symbol.least, symbol.most)
        return self._named(symbol)

    def _named(self, name: str) -> Shape:
        shape = self._shapes.get(name)
        if shape is None:
            shape = Named() if name in self._rules.alternatives else self._text(self._texts.get(name, name))
            self._shapes[name] = shape
        return shape

    def _text(self, text: str) -> Shape:
        """Lark text that stands for itself."""
        if _TEXT.fullmatch(text):
            return literal(json.loads(text).encode())
        if text.startswith("%json "):
            return self._json(json.loads(text[6:]))
        match = _REGEX.match(text)
        if match is None:
            return Opaque()
        shape = _or_opaque(match[1].replace("\\/", "/"))
        return Times(shape, 0, 1) if match[2] else shape

    def _json(self, schema: dict[str, Any]) -> Shape:
        return _string(schema) if schema.get("type") == "string" else Opaque()


def _or_opaque(pattern: str) -> Shape:
    try:
        return regex_shape(pattern)
    except Unmodelled:
        return Opaque()


def _string(schema: dict[str, Any]) -> Shape:
    least, most, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
    if set(schema) - set(_STRING):
        return Opaque()
    quote = literal(b'"')
    if "enum" in schema:
        if pattern is not None or least or most is not None:
            return Opaque()
        return Either([literal(json.dumps(text, ensure_ascii=False).encode()) for text in schema["enum"]])
    if pattern is not None:
        if least or most is not None:
            return Opaque()
        try:
            return Chain([quote, searched_shape(pattern), quote])
        except Unmodelled:
            return Opaque()
    escape = Either([letters([(ord(c), ord(c)) for c in '"/\\bfnrt']), Chain([literal(b"u"), *[letters(_HEX)] * 4])])
    char = Either([letters(RAW), Chain([literal(b"\\"), escape])])
    return Chain([quote, Times(char, least, most), quote])
