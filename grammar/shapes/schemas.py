"""Shapes of grammars: patterns, choices, and JSON schemas by way of the rules that `schema.builder` makes of them.

A shape may allow a little more than the library does (other escapes), so that what an output says is followed; what is
taken from it for a way to the end is checked by the library.
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
from asyncengine.grammar.shapes.lark import expression_shape, lark_shape, mark_shape
from asyncengine.grammar.shapes.patterns import MAX_KEPT_LENGTH, json_letters, regex_shape
from asyncengine.grammar.shapes.products import Product
from asyncengine.grammar.spec import Grammar, parse_json
from asyncengine.grammar.vocabulary import Vocabulary

MAX_LEAVES = 4096
"""Shapes of strings and patterns that are kept from one schema to the next."""
_OTHERS = [(f"{regex(key)} & ~", key == KEY) for key in (KEY, PLAIN_KEY)]
"""The beginnings of the keys that are none of some, and whether those may have escapes. Read only."""


def shape_of(
    grammar: Grammar, schemas: Sequence[tuple[Rules, nodes.Name]], vocabulary: Vocabulary, kept: list[nodes.Shape]
) -> nodes.Shape:
    """The shape of a grammar. `schemas`: the rules of each in it, with the first one's name; `kept`: gets the parts
    that are the same ones in other grammars. Raises `Unmodelled`."""
    if grammar.kind == "regex":
        return regex_shape(grammar.text)
    if grammar.kind == "choice":
        return Words([text.encode("utf-8", "replace") for text in parse_json(grammar.text)])
    if grammar.kind == "json_schema":
        return rules_shape(*schemas[0], kept)
    return lark_shape(grammar.text, [rules_shape(*rules, kept, vocabulary) for rules in schemas], vocabulary)


def rules_shape(
    rules: Rules, start: nodes.Name, kept: list[nodes.Shape], vocabulary: Vocabulary | None = None
) -> nodes.Shape:
    """The shape of rules that have been printed: it takes their place. `vocabulary`: of a grammar that has more, which
    may be taken for a part of the schema's texts."""
    made: list[nodes.Made] = []
    known: dict[nodes.Shape, nodes.Shape] = {}

    def keep(shape: nodes.Made) -> nodes.Shape:
        made.append(shape)
        return shape

    def leaf(shape: nodes.Shape) -> nodes.Shape:
        if isinstance(shape, nodes.Terminal):
            if shape not in known:
                text = shape.text
                own = mark_shape(text, vocabulary) if vocabulary and text[0] == "<" else leaf_shape(text)
                if len(text) <= MAX_KEPT_LENGTH and nodes.parts(own):
                    kept.append(own)
                known[shape] = _lexeme(own, shape.end) if vocabulary else own
            return known[shape]
        if isinstance(shape, nodes.Times):
            shape.body = leaf(shape.body)
        elif isinstance(shape, nodes.Unordered):
            shape.put(map(leaf, shape.pairs), shape.free and leaf(shape.free), [*map(leaf, shape.comma)])
        return keep(shape) if isinstance(shape, (nodes.Times, nodes.Unordered)) else shape

    for name in rules.names:
        found = [[*map(leaf, symbols)] for symbols in name.options]
        options = [one[0] if len(one) == 1 else keep(nodes.Chain(one)) for one in found]
        name.target = options[0] if len(options) == 1 else keep(nodes.Either(options))
    return nodes.resolve(made, start)


def _lexeme(shape: nodes.Shape, end: str) -> nodes.Shape:
    if isinstance(shape, nodes.Mark):
        return shape
    if end:
        return nodes.Lexeme(nodes.chain([shape, expression_shape(end)]), lazy=True)
    return nodes.Lexeme(shape)


def leaf_shape(text: str) -> nodes.Shape:
    """The shape of Lark text that stands for itself: a literal, a terminal, or a schema of strings or numbers."""
    return (_kept_leaf if len(text) <= MAX_KEPT_LENGTH else _leaf)(text)


def _leaf(text: str) -> nodes.Shape:
    if text.startswith("%json "):
        return _json(json.loads(text[6:]))
    for begin, escapes in _OTHERS:
        if text.startswith(begin) and type(words := expression_shape(text.removeprefix(begin))) is Words:
            return OtherKey([name[1:-1].decode() for name in words.words], escapes=escapes)
    return expression_shape(text)


_kept_leaf = functools.lru_cache(MAX_LEAVES)(_leaf)


def json_text(least: int = 0, most: int | None = None) -> nodes.Shape:
    """So many characters as they may be written in a JSON string."""
    return nodes.Times(json_letters([(0, nodes.MAX_CODE)]), least, most)


def _json(schema: dict[str, Any]) -> nodes.Shape:
    if "anyOf" in schema:
        return nodes.Either(list(map(_json, schema["anyOf"])))
    if "multipleOf" in schema:
        return Multiples(*(Fraction(repr(schema[key])) for key in ("multipleOf", "minimum", "maximum")))
    said = schema.get("allOf", [schema])
    if any(part.get("type") != "string" for part in said):
        raise nodes.Unmodelled
    parts = [shape for part in said for shape in _demands(part)] or [json_text()]
    inside = parts[0] if len(parts) == 1 else Product(parts)
    return nodes.Chain([nodes.literal(b'"'), inside, nodes.literal(b'"')])


def _demands(part: dict[str, Any]) -> Iterator[nodes.Shape]:
    """The demands of one schema of strings on the text between the quotes."""
    if "enum" in part:
        yield Words([json.dumps(one, ensure_ascii=False)[1:-1].encode("utf-8", "replace") for one in part["enum"]])
    if "pattern" in part:
        try:
            text = searched(part["pattern"])
        except GrammarUnsupported:
            raise nodes.Unmodelled from None
        yield expression_shape(text, json=True)
    if "minLength" in part or "maxLength" in part:
        yield json_text(part.get("minLength", 0), part.get("maxLength"))
