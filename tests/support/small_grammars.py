"""Grammars of every kind over the small vocabulary, compiled once, and how to tell whether an output is valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jsonschema
from support.small_vocabulary import small_vocabulary

from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.vocabulary import Vocabulary


def closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    wanted = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": wanted, "additionalProperties": False}


PERSON = closed({"name": {"type": "string"}, "age": {"type": "integer"}})
FORCED = closed({"the name and the age": {"const": "nothing abc and the thing"}, "kind": {"enum": ["abc", "zz"]}})
NODE = {"$ref": "#/$defs/n"}
TREE = {"$defs": {"n": closed({"v": {"type": "integer"}, "c": {"type": "array", "items": NODE}})}, **NODE}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "forced": FORCED,
    "tree": TREE,
    "any": {},
    "optional": closed({"a": {"type": "string"}, "b": PERSON, "c": {"type": "boolean"}}, ["b"]),
    "pattern": closed({"id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}(-[a-z]+)?$"}}),
    "pairs": {"type": "array", "minItems": 2, "items": {"type": "array", "minItems": 2, "items": {"type": "boolean"}}},
    "map": {"type": "object", "additionalProperties": {"type": "number"}},
}
WORDS = r"[a-z]+( [a-z]+)*\.(日本|é)?"
CHOICES = ["yes", "no", "not enough", "not enough of the name and the age"]
NAMES = (*SCHEMAS, "words", "choice", "mark")


class SmallGrammar(NamedTuple):
    grammar: Grammar
    template: LlgTemplate
    validate: Callable[[str], None]
    """Raises for a text that is not a complete output."""


@cache
def shared_vocabulary() -> Vocabulary:
    return small_vocabulary()


@cache
def small_grammar(name: str) -> SmallGrammar:
    grammar, validate = made(name)
    return SmallGrammar(grammar, LlguidanceBackend(shared_vocabulary()).compile(grammar), validate)


def made(name: str) -> tuple[Grammar, Callable[[str], None]]:
    if name in SCHEMAS:
        validator = jsonschema.Draft202012Validator(SCHEMAS[name])
        return Grammar.json_schema(SCHEMAS[name]), lambda text: validator.validate(json.loads(text))
    if name == "words":
        return Grammar.regex(WORDS), lambda text: _must_match(WORDS, text)
    if name == "choice":
        return Grammar.choice(CHOICES), lambda text: _must_match("|".join(CHOICES), text)
    return Grammar.lark('start: TEXT <|mark|> "x"\nTEXT: /a*/'), lambda text: _must_match(r"a*<\|mark\|>x", text)


def _must_match(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), f"{text!r} does not match {pattern}"
