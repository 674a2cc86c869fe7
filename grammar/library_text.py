"""The text llguidance compiles, of a `Grammar`. Pure functions; the library is only asked to wrap it."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from llguidance import LLMatcher

from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar.lark import replace_json
from asyncengine.grammar.lower import OPTIONS, fragment, schema_object
from asyncengine.grammar.schema.arguments import ArgumentBuilder
from asyncengine.grammar.schema.builder import Builder
from asyncengine.grammar.schema.rules import Checkpoint, Rules, proceed
from asyncengine.grammar.schemas import pointed, unescape
from asyncengine.grammar.shapes.nodes import Name
from asyncengine.grammar.spec import Grammar

Written = tuple[Rules, Name]
"""Rules, and the name of the first one."""
MAX_RETRIES = 64
"""Keywords that are left out one after the other where that is allowed."""


def to_llguidance(grammar: Grammar) -> str:
    """The text that `LLMatcher` takes. Raises `GrammarTooLarge` for schemas that `check_limits` would have refused."""
    return with_rules(grammar)[0]


def with_rules(grammar: Grammar, checkpoint: Checkpoint = proceed) -> tuple[str, list[Written]]:
    """The same, and the rules of each schema in the grammar, in its order. Raises likewise and as `checkpoint`."""
    if grammar.kind == "json_schema":
        lenient = grammar.unsupported != "error"
        schema = schema_object(grammar.text, lenient, grammar.formats == "strict")
        options = {**OPTIONS[grammar.whitespace], "key_order": grammar.key_order}
        rules, start = _rules(schema, options, lenient, checkpoint)
        return str(LLMatcher.grammar_from_lark(rules.lark(start))), [(rules, start)]
    if grammar.kind == "lark":
        schemas: list[Written] = []
        text = replace_json(grammar.text, partial(_embedded, schemas, checkpoint))
        return str(LLMatcher.grammar_from_lark(text)), schemas
    return str(LLMatcher.grammar_from_lark(f"start: OUTPUT\nOUTPUT: {fragment(grammar)}\n")), []


def _rules(schema: dict[str, Any], options: dict[str, Any], lenient: bool, checkpoint: Checkpoint) -> Written:
    """Rules for a schema. If `lenient`, keywords that stand in the way are left out. Raises as `Builder.build`."""
    own = schema.pop("x-guidance", None)
    merged = {**options, **(own if isinstance(own, dict) else {}), "lenient": lenient}
    build = ArgumentBuilder if "members" in merged else Builder
    for left in range(MAX_RETRIES, -1, -1):
        try:
            return build(schema, merged, checkpoint).build()
        except GrammarUnsupported as error:
            if not left or not lenient or not sum(_drop(schema, pointer) for _, pointer in error.features):
                raise
    raise AssertionError("it was raised")


def _drop(schema: dict[str, Any], pointer: str) -> bool:
    """Delete what `pointer` leads to; False if that is nothing."""
    around, _, last = pointer.rpartition("/")
    here = pointed(schema, around)
    if around.endswith("/patternProperties"):  # what these names allowed must stay allowed
        pointed(schema, around.rpartition("/")[0]).pop("additionalProperties", None)
    return isinstance(here, dict) and here.pop(unescape(last), None) is not None


def _embedded(schemas: list[Written], checkpoint: Checkpoint, text: str) -> str:
    """The rule for `%json text` in a Lark grammar; its rules are added to `schemas`."""
    schema = json.loads(text)
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    lenient = isinstance(own, dict) and own.get("lenient") is True
    tool = own.get("tool") if isinstance(own, dict) else None
    try:
        rules, start = _rules(schema_object(text, lenient), {}, lenient, checkpoint)
    except GrammarUnsupported as error:
        if tool is None:
            raise
        detail = f"{error.detail}, in tool {tool!r}" if error.detail else f"in tool {tool!r}"
        raise GrammarUnsupported(error.field, error.features, detail) from error
    schemas.append((rules, start))
    return "%lark {\n" + rules.lark(start) + "}"
