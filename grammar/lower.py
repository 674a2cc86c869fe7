"""From a `Grammar` to the text llguidance compiles. Pure functions; the library is only asked to wrap the text."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar.canonical import canonical_json, parse_json
from asyncengine.grammar.lark import literal, replace_json
from asyncengine.grammar.regexes import expression, looks_ahead, quoted
from asyncengine.grammar.schema.builder import schema_grammar
from asyncengine.grammar.schema.formats import keep_enforced
from asyncengine.grammar.schema.rules import Checkpoint, Rules, proceed
from asyncengine.grammar.schemas import pointed, subschemas, unescape, with_local_references
from asyncengine.grammar.shapes.nodes import Name
from asyncengine.grammar.spec import Grammar

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
Written = tuple[Rules, Name]
"""Rules, and the name of the first one."""
MAX_RETRIES = 64
"""Keywords that are left out one after the other where that is allowed."""
_CLASS = re.compile(r"\\.|\[\^(?P<inside>\]?(?:\\.|[^\]\\])*)\]", re.DOTALL)


def to_llguidance(grammar: Grammar) -> str:
    """The text that `LLMatcher` takes. Raises `GrammarTooLarge` for schemas that `check_limits` would have refused."""
    return with_rules(grammar)[0]


def with_rules(grammar: Grammar, checkpoint: Checkpoint = proceed) -> tuple[str, list[Written]]:
    """The same, and the rules of each schema in the grammar, in its order. Raises likewise and as `checkpoint`."""
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        lenient = grammar.unsupported != "error"
        schema = _object(grammar.text, lenient, grammar.formats == "strict")
        options = {**OPTIONS[grammar.whitespace], "key_order": grammar.key_order}
        rules, start = _rules(schema, options, lenient, checkpoint)
        return str(LLMatcher.grammar_from_lark(rules.lark(start))), [(rules, start)]
    if grammar.kind == "lark":
        schemas: list[Written] = []
        text = replace_json(grammar.text, partial(_embedded, schemas, checkpoint))
        return str(LLMatcher.grammar_from_lark(text)), schemas
    return str(LLMatcher.grammar_from_lark(f"start: OUTPUT\nOUTPUT: {fragment(grammar)}\n")), []


def _rules(schema: dict[str, Any], options: dict[str, Any], lenient: bool, checkpoint: Checkpoint) -> Written:
    """Rules for a schema. If `lenient`, keywords that stand in the way are left out. Raises as `schema_grammar`."""
    own = schema.pop("x-guidance", None)
    merged = {**options, **(own if isinstance(own, dict) else {}), "lenient": lenient}
    for left in range(MAX_RETRIES, -1, -1):
        try:
            return schema_grammar(schema, merged, checkpoint)
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
    with named_tool(own.get("tool") if isinstance(own, dict) else None):
        rules, start = _rules(_object(text, lenient), {}, lenient, checkpoint)
    schemas.append((rules, start))
    return "%lark {\n" + rules.lark(start) + "}"


@contextlib.contextmanager
def named_tool(name: str | None) -> Iterator[None]:
    """Have a refusal of what cannot be enforced name the tool whose schema asks for it."""
    try:
        yield
    except GrammarUnsupported as error:
        if name is None:
            raise
        detail = f"{error.detail}, in tool {name!r}" if error.detail else f"in tool {name!r}"
        raise GrammarUnsupported(error.field, error.features, detail) from error


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
    node = dict(_object(schema if isinstance(schema, str) else canonical_json(schema), lenient, strict_formats))
    own = node.pop("x-guidance", None)
    merged = {**OPTIONS[whitespace], **options, **(own if isinstance(own, dict) else {}), "lenient": lenient}
    return "%json " + canonical_json({"x-guidance": merged, **node})


def _object(text: str, lenient: bool, strict_formats: bool = False) -> dict[str, Any]:
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
            _enforce_classes(node)
            if lenient:
                _relax(node)
    return schema


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
