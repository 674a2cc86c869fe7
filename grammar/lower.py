"""A `Grammar` as a part of Lark text, and what a schema says once all has its meaning here."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar.lark import literal
from asyncengine.grammar.regexes import expression, looks_ahead, quoted
from asyncengine.grammar.schema.formats import keep_enforced
from asyncengine.grammar.schemas import subschemas, with_local_references
from asyncengine.grammar.spec import Grammar, canonical_json, parse_json

FLEXIBLE = r"( |\n[ \t]{0,40})"
"""Whitespace between JSON tokens: once at most, so a model cannot run on in blanks. Nothing is always allowed too."""

OPTIONS: dict[str, dict[str, Any]] = {
    "flexible": {"whitespace_pattern": FLEXIBLE},
    "single_space": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False},
}
"""llguidance's JSON options by `Grammar.whitespace`. Read only."""

_MENDED = ("[^", '"format"')
"""Signs that a schema has something the functions below change."""
_CLASS = re.compile(r"\\.|\[\^(?P<inside>\]?(?:\\.|[^\]\\])*)\]", re.DOTALL)


def fragment(grammar: Grammar) -> str:
    """The grammar as an expression inside a Lark rule. Followed by text that could continue it, it takes its longest.

    >>> fragment(Grammar.choice(["a", "ab"]))
    '("a" | "ab")'
    """
    if grammar.kind == "json_schema":
        lenient, strict = grammar.unsupported != "error", grammar.formats == "strict"
        return inline_json(grammar.text, grammar.whitespace, lenient, strict, key_order=grammar.key_order)
    if grammar.kind == "regex":
        return expression(grammar.text)
    if grammar.kind == "choice":
        return "(" + " | ".join(literal(option) for option in parse_json(grammar.text)) + ")"
    return "%lark {\n" + grammar.text.rstrip("\n") + "\n}"


def inline_json(
    schema: Any, whitespace: str = "flexible", lenient: bool = False, strict_formats: bool = False, **options: Any
) -> str:
    """`%json {...}` for use inside Lark, with the options written into it. `schema`: a dict, or its JSON text.

    `options` are further llguidance options (`whitespace_pattern`), `key_order`, or `tool`, the name of the tool whose
    arguments they are. References (`#/$defs/...`) are relative to this schema. A schema's own "x-guidance" wins over
    `whitespace`, never over `lenient`.
    """
    node = dict(schema_object(schema if isinstance(schema, str) else canonical_json(schema), lenient, strict_formats))
    own = node.pop("x-guidance", None)
    merged = {**OPTIONS[whitespace], **options, **(own if isinstance(own, dict) else {}), "lenient": lenient}
    return "%json " + canonical_json({"x-guidance": merged, **node})


def schema_object(text: str, lenient: bool, strict_formats: bool = False) -> dict[str, Any]:
    """The schema as a dict with what is enforced of it.
    Raises `GrammarUnsupported` for a format that cannot be enforced, if `strict_formats` and not `lenient`."""
    schema = json.loads(text) if isinstance(text, str) else text
    if not isinstance(schema, dict):
        return {} if schema is True else {"not": {}}
    schema = with_local_references(schema, text)
    old = "draft-0" in str(schema.get("$schema"))
    if lenient or old or any(sign in text for sign in _MENDED):
        keep_enforced(schema, strict_formats and not lenient)
        for _, node in subschemas(schema):
            if old and "$ref" in node:  # up to draft 7 what stands beside it says nothing
                for key in [key for key in node if key not in ("$ref", "$defs", "definitions")]:
                    del node[key]
            if isinstance(pattern := node.get("pattern"), str):
                node["pattern"] = _with_nul(pattern)
            if isinstance(named := node.get("patternProperties"), dict):
                node["patternProperties"] = {_with_nul(key): value for key, value in named.items()}
            if lenient:
                _relax(node)
    return schema


def _with_nul(pattern: str) -> str:
    """`pattern` with NUL excluded from classes that exclude a quote or a backslash.

    llguidance 1.9.1 lets both through, escaped, where a class such as `[^"]` excludes no control character as well (a
    short cut in how it quotes patterns for JSON). NUL is the one nobody misses.
    """

    def exclude(match: re.Match[str]) -> str:
        inside = match["inside"]
        if match["inside"] is None or not ('"' in inside or "\\\\" in inside):
            return match[0]
        return f"[^\\x00{inside}]"

    return _CLASS.sub(exclude, pattern)


def _relax(node: dict[str, Any]) -> None:
    """Leave out a pattern that the library cannot read, as it has assertions."""
    from llguidance import LLMatcher

    schema = {"type": "string", "pattern": node.get("pattern")}
    if isinstance(schema["pattern"], str):
        if looks_ahead(schema["pattern"]):
            with contextlib.suppress(GrammarUnsupported):
                quoted(schema["pattern"])
                return
        complaint = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(canonical_json(schema)))
        if any(sign in complaint for sign in ("look-around", "lookarounds", "backreferences")):
            del node["pattern"]
