"""Structural tags (free text with constrained parts) and tool calls as a whole output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncengine.errors import GrammarError
from asyncengine.grammar.lark import literal, regex
from asyncengine.grammar.regexes import escaped
from asyncengine.grammar.schemas import moved, schema_text
from asyncengine.grammar.spec import Grammar, parse_json

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
        if (own := next(filter(tag[0].startswith, chosen), None)) is None:
            raise GrammarError("grammar", "each tag must begin with one of the triggers", tag[0])
        groups[own].append(tag)
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
    """The triggers, without those a shorter one at their beginning makes superfluous."""
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
    """The rule after the trigger. A regular content and its end are one terminal: it may run up to the end's text."""
    from asyncengine.grammar.lower import fragment

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
    """The name of the one tool to call; None: any of them."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    if choice == "required":
        return None
    if choice in ("auto", "none") or not isinstance(choice, str):
        limit = 'must be "required", a tool\'s name or {"type": "function", "function": {"name": ...}}'
        raise GrammarError("tool_choice", f"{limit}; to leave the choice to the model, use chat", choice)
    return choice
