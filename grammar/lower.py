"""From a `Grammar` to the text llguidance compiles. Pure functions; the library is only asked to wrap the text."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar.canonical import canonical_json, parse_json
from asyncengine.grammar.formats import enforce_format, keep_enforced
from asyncengine.grammar.keywords import explain
from asyncengine.grammar.lark import literal, regex, replace_json
from asyncengine.grammar.number_schemas import lowered, without_bounds
from asyncengine.grammar.one_of import overlapping
from asyncengine.grammar.rules import Rules
from asyncengine.grammar.schemas import subschemas, with_local_references
from asyncengine.grammar.spec import Grammar

FLEXIBLE = r"( |\n[ \t]{0,40})"
"""Whitespace between JSON tokens: once at most, so a model cannot run on in blanks. Nothing is always allowed too."""

OPTIONS: dict[str, dict[str, Any]] = {
    "flexible": {"whitespace_pattern": FLEXIBLE},
    "single_space": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False},
}
"""llguidance's JSON options by `Grammar.whitespace`. Read only."""

_NOTES = ("discriminator", "xml", "externalDocs", "example", "deprecated", "nullable")
"""Annotations, mostly OpenAPI's, that llguidance 1.9.1 takes for constraints beside a recursive reference."""
_MENDED = ("uniqueItems", '"if"', "[^", '"format"', '"x-', *_NOTES)
"""Signs that a schema has something the functions below change."""
OVERLAP = "branches {1} and {2} of {0} may both hold; anyOf, or a required const of its own in each, can be enforced"
_CLASS = re.compile(r"\\.|\[\^(?P<inside>\]?(?:\\.|[^\]\\])*)\]", re.DOTALL)


def to_llguidance(grammar: Grammar) -> str:
    """The text that `LLMatcher` takes. Raises `GrammarTooLarge` for schemas that `check_limits` would have refused."""
    return with_rules(grammar)[0]


def with_rules(grammar: Grammar) -> tuple[str, tuple[Rules, str] | None]:
    """The same, and the rules of a schema with the first one's name, where they are ours. Raises likewise."""
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        lenient = grammar.unsupported != "error"
        schema = _object(grammar.text, lenient, grammar.formats == "strict")
        text, rules = _own_numbers(grammar, schema, OPTIONS[grammar.whitespace], lenient)
        return str(LLMatcher.grammar_from_lark(text)), rules
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(replace_json(grammar.text, partial(_embedded, grammar)))), None
    return str(LLMatcher.grammar_from_lark(f"start: OUTPUT\nOUTPUT: {fragment(grammar)}\n")), None


def without_numbers(grammar: Grammar) -> str:
    """The text for a trial: what `to_llguidance` makes, a schema without its bounds of numbers (which the library gets
    to see in that form, and then as rules of ours, which do not nest)."""
    if grammar.kind != "json_schema":
        return to_llguidance(grammar)
    lenient = grammar.unsupported != "error"
    schema = without_bounds(_object(grammar.text, lenient))
    return _from_schema(grammar, schema, {**OPTIONS[grammar.whitespace], **_escapes(schema)}, lenient)


def _from_schema(grammar: Grammar, schema: dict[str, Any], options: dict[str, Any], lenient: bool) -> str:
    """Lower a schema for the library's own JSON compiler, which gets only harmless bounds of numbers to see."""
    from llguidance import LLMatcher

    overrides = {"lenient": lenient}
    try:
        return str(LLMatcher.grammar_from_json_schema(canonical_json(schema), defaults=options, overrides=overrides))
    except ValueError as error:
        raise explain(grammar, str(error)) from None


def _own_numbers(
    grammar: Grammar, schema: dict[str, Any], options: dict[str, Any], lenient: bool
) -> tuple[str, tuple[Rules, str] | None]:
    """Lark of our own with its rules, for what the library would accept but for its numbers."""
    from llguidance import LLMatcher

    own = schema.pop("x-guidance", None)
    merged = {**options, **_escapes(schema), **(own if isinstance(own, dict) else {}), "lenient": lenient}
    complaint = LLMatcher.validate_grammar(_from_schema(grammar, without_bounds(schema), merged, lenient))
    if "oneOf constraints" in complaint:
        if pairs := overlapping(schema):
            raise GrammarUnsupported("grammar", [("oneOf", place) for place, _, _ in pairs], OVERLAP.format(*pairs[0]))
        complaint = LLMatcher.validate_grammar(_from_schema(grammar, without_bounds(schema), merged, lenient))
    if complaint:
        raise explain(grammar, complaint)

    def by_library(safe: dict[str, Any]) -> str:
        return "start: %json " + canonical_json({"x-guidance": merged, **safe}) + "\n"

    return lowered(schema, merged, lenient, by_library)


def _embedded(grammar: Grammar, text: str) -> str:
    """The rule for `%json text` in a Lark grammar."""
    schema = json.loads(text)
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    lenient = isinstance(own, dict) and own.get("lenient") is True
    return "%lark {\n" + _own_numbers(grammar, _object(text, lenient), {}, lenient)[0] + "}"


def fragment(grammar: Grammar) -> str:
    """The grammar as an expression inside a Lark rule. Followed by text that could continue it, it takes its longest.

    >>> fragment(Grammar.choice(["a", "ab"]))
    '("a" | "ab")'
    """
    if grammar.kind == "json_schema":
        return inline_json(
            grammar.text, grammar.whitespace, grammar.unsupported != "error", grammar.formats == "strict"
        )
    if grammar.kind == "regex":
        return regex(grammar.text)
    if grammar.kind == "choice":
        return "(" + " | ".join(literal(option) for option in parse_json(grammar.text)) + ")"
    return "%lark {\n" + grammar.text.rstrip("\n") + "\n}"


def inline_json(
    schema: Any, whitespace: str = "flexible", lenient: bool = False, strict_formats: bool = False, **options: Any
) -> str:
    """`%json {...}` for use inside Lark, with the options written into it. `schema`: a dict, or its JSON text.

    `options` are further llguidance options (`whitespace_pattern`). References (`#/$defs/...`) are relative to this
    schema. A schema's own "x-guidance" wins over `whitespace`, never over `lenient`.
    """
    node = dict(_object(schema if isinstance(schema, str) else canonical_json(schema), lenient, strict_formats))
    own = node.pop("x-guidance", None)
    merged = {
        **OPTIONS[whitespace],
        **_escapes(node),
        **options,
        **(own if isinstance(own, dict) else {}),
        "lenient": lenient,
    }
    return "%json " + canonical_json({"x-guidance": merged, **node})


def _object(text: str, lenient: bool, strict_formats: bool = False) -> dict[str, Any]:
    """The schema as a dict, without keywords that say nothing; if lenient, without those no option makes it take.
    Raises `GrammarUnsupported` for a format that cannot be enforced, if `strict_formats` and not `lenient`."""
    schema = json.loads(text) if isinstance(text, str) else text
    if not isinstance(schema, dict):
        return {} if schema is True else {"not": {}}
    schema = with_local_references(schema, text)
    if lenient or any(sign in text for sign in _MENDED):
        keep_enforced(schema, strict_formats and not lenient)
        for _, node in subschemas(schema):
            _without_effect(node)
            _enforce_classes(node)
            enforce_format(node)
            if lenient:
                _relax(node)
    return schema


def _escapes(schema: dict[str, Any]) -> dict[str, Any]:
    """No `\\u` escapes where an object has both declared and free keys.

    llguidance 1.9.1 takes a declared key spelled with escapes for a free one, and its value goes unchecked. What is
    lost are control characters without a short escape, in such schemas only.
    """
    for _, node in subschemas(schema):
        declared = node.get("properties") or node.get("patternProperties")
        if declared and node.get("additionalProperties") is not False:
            return {"json_allowed_escapes": '"\\bfnrt'}
    return {}


def _without_effect(node: dict[str, Any]) -> None:
    """Drop annotations, `uniqueItems: false`, and `if` without effect: the library refuses some unread."""
    for key, value in list(node.items()):
        # "x-guidance" holds the library's options, and other lists and dicts may be what references lead to
        if key in _NOTES or (key.startswith("x-") and not isinstance(value, (dict, list))):
            del node[key]
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if "then" not in node and "else" not in node:
        node.pop("if", None)


def _enforce_classes(node: dict[str, Any]) -> None:
    """Exclude NUL from classes that exclude a quote or a backslash.

    llguidance 1.9.1 lets both through, escaped, where a class such as `[^"]` excludes no control character as well (a
    short cut in how it quotes patterns for JSON). NUL is the one nobody misses.
    """
    pattern = node.get("pattern")
    if isinstance(pattern, str):
        node["pattern"] = _with_nul(pattern)
    named = node.get("patternProperties")
    if isinstance(named, dict):
        node["patternProperties"] = {_with_nul(key): value for key, value in named.items()}


def _with_nul(pattern: str) -> str:
    def exclude(match: re.Match[str]) -> str:
        inside = match["inside"]
        if match["inside"] is None or not ('"' in inside or "\\\\" in inside):
            return match[0]
        return f"[^\\x00{inside}]"

    return _CLASS.sub(exclude, pattern)


def _all_required(node: dict[str, Any]) -> bool:
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict):
        return True
    return isinstance(required, list) and all(name in required for name in properties)


def _asserts(schema: dict[str, Any]) -> bool:
    """The library refuses this schema's patterns for what they say, not for how they are written."""
    from llguidance import LLMatcher

    complaint = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(canonical_json(schema)))
    return any(sign in complaint for sign in ("look-around", "lookarounds", "backreferences", "not disjoint"))


def _relax(node: dict[str, Any]) -> None:
    """Leave out what the library refuses even when lenient: patterns with assertions, other documents' schemas."""
    pattern = node.get("pattern")
    if isinstance(pattern, str) and _asserts({"type": "string", "pattern": pattern}):
        del node["pattern"]
    named = node.get("patternProperties")
    if isinstance(named, dict) and _asserts({"type": "object", "patternProperties": {key: {} for key in named}}):
        # What these keys allowed must stay allowed.
        del node["patternProperties"]
        node.pop("additionalProperties", None)
    if not _all_required(node):
        # Lenient, the library applies them to undeclared keys alone, which refuses valid objects.
        node.pop("minProperties", None)
        node.pop("maxProperties", None)
    target = node.get("$ref")
    if isinstance(target, str) and not target.startswith("#"):
        del node["$ref"]
