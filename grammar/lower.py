"""A `Grammar` as a fragment of Lark text, and JSON schemas made ready for it; tags and tool calls as grammars."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncengine.errors import GrammarError, GrammarUnsupported
from asyncengine.grammar.lark import literal, regex
from asyncengine.grammar.regexes import escaped, expression, looks_ahead, quoted
from asyncengine.grammar.schema.formats import as_patterns
from asyncengine.grammar.schemas import TABLES, moved, schema_text, subschemas, with_local_references
from asyncengine.grammar.spec import Grammar, canonical_json, parse_json

OPTIONS: dict[str, dict[str, Any]] = TABLES["whitespace"]
"""llguidance's JSON options by `Grammar.whitespace`. Read only."""
FLEXIBLE: str = OPTIONS["flexible"]["whitespace_pattern"]
"""Whitespace between JSON tokens, optional and at most once: otherwise a model could write blanks for ever."""
_CLASS = re.compile(r"\\.|\[\^(?P<inside>\]?(?:\\.|[^\]\\])*)\]", re.DOTALL)


def fragment(grammar: Grammar) -> str:
    """The grammar as an expression inside a Lark rule. It takes the longest text, also of what follows it.

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
    guidance = node.pop("x-guidance", None)
    merged = {**OPTIONS[whitespace], **options, **(guidance if isinstance(guidance, dict) else {}), "lenient": lenient}
    return "%json " + canonical_json({"x-guidance": merged, **node})


def schema_object(text: str, lenient: bool, strict_formats: bool = False) -> dict[str, Any]:
    """The schema as a dict of what is enforced of it, references local and formats as patterns.
    Raises `GrammarUnsupported` for a format that cannot be enforced, if `strict_formats` and not `lenient`."""
    schema = json.loads(text) if isinstance(text, str) else text
    if not isinstance(schema, dict):
        return {} if schema is True else {"not": {}}
    schema = with_local_references(schema, text)
    is_old = "draft-0" in str(schema.get("$schema"))
    if lenient or is_old or "[^" in text:
        for _, node in subschemas(schema):
            if is_old and "$ref" in node:  # up to draft 7 its siblings are ignored
                for key in [key for key in node if key not in ("$ref", "$defs", "definitions")]:
                    del node[key]
            if isinstance(pattern := node.get("pattern"), str):
                node["pattern"] = _with_nul(pattern)
            if isinstance(patterns := node.get("patternProperties"), dict):
                node["patternProperties"] = {_with_nul(key): value for key, value in patterns.items()}
            if lenient:
                _relax(node)
    if '"format"' in text:
        as_patterns(schema, strict_formats and not lenient)
    return schema


def _with_nul(pattern: str) -> str:
    """`pattern` with NUL excluded from classes that exclude a quote or a backslash.

    llguidance 1.9.1 lets both through, escaped, where a class such as `[^"]` does not exclude a control character as
    well (a short cut in how it quotes patterns for JSON). NUL is the one that texts do not contain.
    """

    def exclude(match: re.Match[str]) -> str:
        excluded = match["inside"]
        if match["inside"] is None or not ('"' in excluded or "\\\\" in excluded):
            return match[0]
        return f"[^\\x00{excluded}]"

    return _CLASS.sub(exclude, pattern)


def _relax(node: dict[str, Any]) -> None:
    """Delete a pattern that the library cannot read because of its assertions."""
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


# Structural tags (free text with constrained parts), and tool calls as a whole output.

Tag = tuple[str, Grammar, str]
"""(begin, content, end)"""


def tags_to_lark(tags: Any, triggers: Any, at_least_one: bool, stop_after_first: bool) -> str:
    """See `Grammar.structural_tags`.

    A lazy terminal runs through the free text up to the first trigger; the rest of a `begin` and the content follow.
    The text after the last tag is any text without a trigger.
    """
    if isinstance(tags, Mapping):
        if "structures" not in tags:
            raise GrammarError("grammar", 'structural tags need "structures" and "triggers", or a list of tags')
        triggers = tags.get("triggers") if triggers is None else triggers
        tags = tags["structures"]
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not tags:
        raise GrammarError("grammar", "structural tags must be a non-empty list", tags)
    parsed = list[Tag]()
    for tag in tags:
        if not isinstance(tag, Mapping):
            raise GrammarError("grammar", 'each tag must be a dict with "begin", "schema" or "grammar", and "end"', tag)
        begin, end = tag.get("begin"), tag.get("end", "")
        if not isinstance(begin, str) or not begin or not isinstance(end, str):
            raise GrammarError("grammar", 'a tag\'s "begin" must be a non-empty str and its "end" a str', begin)
        schema = tag.get("schema", {"type": "object"})
        content = Grammar.of(tag["grammar"]) if "grammar" in tag else Grammar.json_schema(schema)
        parsed.append((begin, content, end))
    chosen = _triggers([begin for begin, _, _ in parsed] if triggers is None else triggers)
    groups: dict[str, list[Tag]] = {trigger: [] for trigger in chosen}
    for tag in parsed:
        if (trigger_of_tag := next(filter(tag[0].startswith, chosen), None)) is None:
            raise GrammarError("grammar", "each tag must begin with one of the triggers", tag[0])
        groups[trigger_of_tag].append(tag)
    rules = []
    names = []
    for index, (trigger, members) in enumerate(groups.items()):
        if members:
            names.append(f"tag_{index}")
            bodies = " | ".join(_body(tag, len(trigger)) for tag in members)
            rules.append(f"tag_{index}: text_{index} ({bodies})")
            rules.append(f"text_{index}[lazy]: {regex('(?s:.*)' + escaped(trigger))}")
    any_trigger = "|".join(escaped(trigger) for trigger in chosen)
    rules.append("tail: TAIL")
    rules.append(f"TAIL: {regex('(?s:.*)')} & ~{regex(f'(?s:.*)(?:{any_trigger})(?s:.*)')}")
    start = f"({' | '.join(names)})"
    if not stop_after_first:
        start += f"{'+' if at_least_one else '*'} tail"
    elif not at_least_one:
        start += " | tail"
    return "\n".join([f"start: {start}", *rules]) + "\n"


def _triggers(triggers: Any) -> list[str]:
    """The triggers without those that begin with a shorter one, which would always come first."""
    if isinstance(triggers, str) or not isinstance(triggers, Sequence) or not triggers:
        raise GrammarError("grammar", "triggers must be a non-empty list of str", triggers)
    for trigger in triggers:
        if not isinstance(trigger, str) or not trigger:
            raise GrammarError("grammar", "each trigger must be a non-empty str", trigger)
    chosen: list[str] = []
    for trigger in sorted(dict.fromkeys(triggers), key=len):
        if any(trigger.startswith(shorter) for shorter in chosen):
            continue
        inside = [shorter for shorter in chosen if shorter in trigger]
        if inside:
            raise GrammarError("grammar", f"the trigger {inside[0][:40]!r} would always come before", trigger)
        chosen.append(trigger)
    return chosen


def _body(tag: Tag, skip: int) -> str:
    """The expression behind the trigger. A regular content and its end are one terminal: as two, the longest content
    might swallow the end."""
    begin, content, end = tag[0][skip:], tag[1], tag[2]
    if content.kind == "regex":
        return regex(f"{escaped(begin)}(?:{content.text}){escaped(end)}")
    parts = [literal(begin) if begin else "", fragment(content), literal(end) if end else ""]
    return " ".join(part for part in parts if part)


def tool_call_schema(tools: Any, tool_choice: Any, parallel: bool) -> dict[str, Any]:
    """The schema of one call, or of a non-empty list of calls. Each tool's parameters lie under `#/$defs/tool_N`."""
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence) or not tools:
        raise GrammarError("tools", "must be a non-empty list of tools", tools)
    functions = [_function(tool) for tool in tools]
    names = [name for name, _ in functions]
    if len(set(names)) < len(names):
        raise GrammarError("tools", "two tools have the same name", names)
    wanted = _chosen(tool_choice)
    if wanted is not None:
        functions = [function for function in functions if function[0] == wanted]
        if not functions:
            raise GrammarError("tool_choice", "names no tool of the list", wanted)
    calls, definitions = call_schemas(functions, "arguments")
    call: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if parallel:
        call = {"type": "array", "items": call, "minItems": 1}
    return {**call, "$defs": definitions}


def call_schemas(
    functions: Iterable[tuple[str, Mapping[str, Any]]], key: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Schemas of calls of functions (name, parameters) with the arguments as `key`, and the definitions in them."""
    calls, definitions = list[dict[str, Any]](), dict[str, Any]()
    for index, (name, parameters) in enumerate(functions):
        definitions[f"tool_{index}"] = moved(dict(parameters), f"#/$defs/tool_{index}")
        properties = {"name": {"const": name}, key: {"$ref": f"#/$defs/tool_{index}"}}
        calls.append({"type": "object", "properties": properties, "required": ["name", key]})
        calls[-1]["additionalProperties"] = False
    return calls, definitions


def _function(tool: Any) -> tuple[str, dict[str, Any]]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise GrammarError("tools", 'each tool must be {"type": "function", "function": {"name": ...}}', tool)
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    return name, parse_json(schema_text(parameters))


def _chosen(choice: Any) -> str | None:
    """The name of the only tool that may be called; None for any."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    if choice == "required":
        return None
    if choice in ("auto", "none") or not isinstance(choice, str):
        limit = 'must be "required", a tool\'s name or {"type": "function", "function": {"name": ...}}'
        raise GrammarError("tool_choice", f"{limit}; to leave the choice to the model, use chat", choice)
    return choice
