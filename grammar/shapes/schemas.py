"""Shapes of grammars: patterns, choices, and JSON schemas by way of the rules that `schema.builder` makes of them.

A shape may allow a little more than the library does (other escapes): then outputs are still parsed, and a completion
that is made from it is checked by the library.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar.lark import regex
from asyncengine.grammar.regexes import searched
from asyncengine.grammar.schema.members import KEY, PLAIN_KEY
from asyncengine.grammar.schema.rules import Rules
from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.automata import Multiples, OtherKey, Words
from asyncengine.grammar.shapes.lark import expression_shape, lark_shape, special_token_shape
from asyncengine.grammar.shapes.patterns import MAX_KEPT_LENGTH, json_letters, regex_shape
from asyncengine.grammar.shapes.products import Product
from asyncengine.grammar.spec import Grammar, parse_json
from asyncengine.grammar.vocabulary import Vocabulary

MAX_LEAVES = 4096
"""Shapes of strings and patterns that are kept from one schema to the next."""
_OTHER_KEYS = [(f"{regex(key)} & ~", key == KEY) for key in (KEY, PLAIN_KEY)]
"""(Lark text in front of the excluded names, whether the keys may have escapes) for undeclared keys. Read only."""


def shape_of(
    grammar: Grammar, schemas: Sequence[tuple[Rules, nodes.Rule]], vocabulary: Vocabulary, kept: list[nodes.Shape]
) -> nodes.Shape:
    """The shape of a grammar. `schemas`: (rules, start) of each schema in it; shapes that other grammars share are
    appended to `kept`. Raises `Unmodelled`."""
    if grammar.kind == "regex":
        return regex_shape(grammar.text)
    if grammar.kind == "choice":
        return Words([text.encode("utf-8", "replace") for text in parse_json(grammar.text)])
    if grammar.kind == "json_schema":
        return rules_shape(*schemas[0], kept)
    return lark_shape(grammar.text, [rules_shape(*rules, kept, vocabulary) for rules in schemas], vocabulary)


def rules_shape(
    rules: Rules, start: nodes.Rule, kept: list[nodes.Shape], vocabulary: Vocabulary | None = None
) -> nodes.Shape:
    """The shape of rules that have been printed; it is made of them, so they are used up. `vocabulary`: that of a Lark
    grammar around the schema, whose lexer then reads each terminal as a lexeme."""
    composites: list[nodes.Composite] = []
    known: dict[nodes.Shape, nodes.Shape] = {}

    def keep(shape: nodes.Composite) -> nodes.Shape:
        composites.append(shape)
        return shape

    def leaf(shape: nodes.Shape) -> nodes.Shape:
        if isinstance(shape, nodes.Terminal):
            if shape not in known:
                text = shape.text
                parsed = special_token_shape(text, vocabulary) if vocabulary and text[0] == "<" else leaf_shape(text)
                if len(text) <= MAX_KEPT_LENGTH and nodes.children(parsed):
                    kept.append(parsed)
                known[shape] = _lexeme(parsed, shape.end) if vocabulary else parsed
            return known[shape]
        if isinstance(shape, nodes.Repeat):
            shape.body = leaf(shape.body)
        elif isinstance(shape, nodes.Unordered):
            shape.put(map(leaf, shape.pairs), shape.free and leaf(shape.free), [*map(leaf, shape.comma)])
        return keep(shape) if isinstance(shape, (nodes.Repeat, nodes.Unordered)) else shape

    for rule in rules.all:
        sequences = [[*map(leaf, symbols)] for symbols in rule.alternatives]
        options = [symbols[0] if len(symbols) == 1 else keep(nodes.Concat(symbols)) for symbols in sequences]
        rule.target = options[0] if len(options) == 1 else keep(nodes.Choice(options))
    return nodes.resolve(composites, start)


def _lexeme(shape: nodes.Shape, end: str) -> nodes.Shape:
    if isinstance(shape, nodes.SpecialToken):
        return shape
    if end:
        return nodes.Lexeme(nodes.concat([shape, expression_shape(end)]), lazy=True)
    return nodes.Lexeme(shape)


def leaf_shape(text: str) -> nodes.Shape:
    """The shape of a terminal's Lark text: a literal, an expression of patterns, or `%json` of strings or numbers."""
    return (_kept_leaf if len(text) <= MAX_KEPT_LENGTH else _leaf)(text)


def _leaf(text: str) -> nodes.Shape:
    if text.startswith("%json "):
        return _json(json.loads(text[6:]))
    for begin, escapes in _OTHER_KEYS:
        if text.startswith(begin) and type(words := expression_shape(text.removeprefix(begin))) is Words:
            return OtherKey([name[1:-1].decode() for name in words.words], escapes=escapes)
    return expression_shape(text)


_kept_leaf = functools.lru_cache(MAX_LEAVES)(_leaf)


def json_text(least: int = 0, most: int | None = None) -> nodes.Shape:
    """`least` to `most` characters as they may be written in a JSON string."""
    return nodes.Repeat(json_letters([(0, nodes.MAX_CODE)]), least, most)


def _json(schema: dict[str, Any]) -> nodes.Shape:
    if "anyOf" in schema:
        return nodes.Choice(list(map(_json, schema["anyOf"])))
    if "multipleOf" in schema:
        return Multiples(*(Fraction(repr(schema[key])) for key in ("multipleOf", "minimum", "maximum")))
    schemas = schema.get("allOf", [schema])
    if any(schema_part.get("type") != "string" for schema_part in schemas):
        raise nodes.Unmodelled
    parts = [shape for schema_part in schemas for shape in _demands(schema_part)] or [json_text()]
    inside = parts[0] if len(parts) == 1 else Product(parts)
    return nodes.Concat([nodes.literal(b'"'), inside, nodes.literal(b'"')])


def _demands(schema: dict[str, Any]) -> Iterator[nodes.Shape]:
    """The demands of one schema of strings on the text between the quotes."""
    if "enum" in schema:
        written = (json.dumps(value, ensure_ascii=False)[1:-1] for value in schema["enum"])
        yield Words([text.encode("utf-8", "replace") for text in written])
    if "pattern" in schema:
        try:
            text = searched(schema["pattern"])
        except GrammarUnsupported:
            raise nodes.Unmodelled from None
        yield expression_shape(text, json=True)
    if "minLength" in schema or "maxLength" in schema:
        yield json_text(schema.get("minLength", 0), schema.get("maxLength"))
