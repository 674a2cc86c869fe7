"""Checks the `tools`, `tool_choice` and `response_format` of requests and makes them ready for constrained output.
Objects of the caller are not changed."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from asyncengine.errors import GrammarError, InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.grammar.schemas import TABLES, children, resolve, subschemas, with_local_references

NAME = re.compile(r"[\w.:/-]{1,128}")
MAX_TOOLS = 1024
FIELD = "response_format"
MAX_DEPTH = 64
"""Nesting of a schema; a grammar refuses more as well."""
ALTERNATIVES = ("anyOf", "oneOf")
CONDITIONS = TABLES["about"]["conditions"]
OWN_KEYS = ("properties", "patternProperties", "required", *CONDITIONS)
"""Beside these a `$ref`, `allOf` or `anyOf` is one of several statements about the same object."""

TYPES = {word: kind for kind, words in TABLES["types"].items() for word in words} | {"any": None}
"""JSON Schema's types by how they are written in other languages, in small letters; None: any of them. Read only."""

Schema = dict[str, Any]


def plain_json(field: str, value: object) -> Any:
    """A copy of JSON data, keys in their order. Raises `InvalidParameter` for anything else, or nested too deep."""
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(field, f"must be plain JSON data: {error}") from error
    level = [copy]
    for _ in range(MAX_DEPTH + 1):
        nested = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [child for children in nested for child in children]
    if level:
        raise InvalidParameter(field, f"is nested deeper than {MAX_DEPTH}")
    return copy


def with_json_types(about: str, schema: Schema) -> Schema:
    """`schema` with types as other languages write them (`str`, `Boolean`, `dict`, `any`) replaced by JSON Schema's, in
    place. Warns of each with its JSON pointer; `about` names whose schema it is."""
    for pointer, node in subschemas(schema):
        value = node.get("type")
        names = value if isinstance(value, list) else [value]
        types = [TYPES.get(name.lower(), name) if isinstance(name, str) else name for name in names]
        if types == names:
            continue
        if None in types:
            del node["type"]
        else:
            distinct = [name for index, name in enumerate(types) if name not in types[:index]]
            node["type"] = distinct if isinstance(value, list) else distinct[0]
        meant = "anything" if None in types else f"{node['type']!r}"
        warnings.warn(f"{about}: {value!r} at {pointer}/type is no type of JSON Schema; {meant} is meant", stacklevel=2)
    return schema


def tool_schema(field: str, parameters: object, strict: bool = True, name: str = "") -> Schema:
    """The schema of a tool's arguments, always an object's; closed unless not `strict`. `name` is the tool's, for
    warnings.

    A tool without parameters, or with none declared, takes exactly `{}`.
    """
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise InvalidParameter(field, "must be a JSON schema of an object, as a dict", parameters)
    schema = with_json_types(f"tool {name!r}" if name else field, plain_json(field, parameters))
    schema.pop("x-guidance", None)  # options of a schema's own could allow unbounded blanks
    if schema.get("type", "object") != "object":
        raise InvalidParameter(f"{field}.type", "a tool's arguments must be an object schema", schema["type"])
    if not isinstance(schema.get("properties", {}), dict):
        raise InvalidParameter(f"{field}.properties", "must be a dict of schemas", schema["properties"])
    if not schema or (schema.get("properties") == {} and not schema.keys() & {"$ref", "allOf", *ALTERNATIVES}):
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "type" not in schema:
        schema = {"type": "object", **schema}
    schema = with_local_references(schema, json.dumps(schema))
    return close_objects(schema) if strict else schema


def close_objects(schema: Any) -> Any:
    """A copy of a `plain_json` in which every object that declares properties takes no others.

    Left as they are: objects that say themselves what else they take; objects without declared properties; and
    objects described in several places at once (`allOf`, a `$ref` or `anyOf` beside properties), together with what
    they refer to, because closing one part would forbid what the other asks for.
    """
    open_ids, copy = _opened(schema), json.loads(json.dumps(schema))
    for (_, node), (_, copied) in zip(subschemas(schema), subschemas(copy), strict=True):
        if id(node) not in open_ids and _can_close(node):
            copied["additionalProperties"] = False
    return copy


def _opened(root: Any) -> set[int]:
    """The parts of a schema, by identity, that must not be closed: several statements about an object meet there."""
    seen: set[tuple[int, bool]] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        node, opened = waiting.pop()
        if not isinstance(node, dict) or (id(node), opened) in seen:
            continue
        all_of = node.get("allOf")
        count = len(all_of) if isinstance(all_of, list) else 0
        count += sum(key in node for key in (*ALTERNATIVES, "$ref"))
        opened = opened or count > 1 or (count == 1 and any(key in node for key in OWN_KEYS))
        seen.add((id(node), opened))
        # a definition is met where it is referred to
        subnodes = [(step.split("/")[1], child) for step, child in children(node)]
        subnodes = [(key, child) for key, child in subnodes if key not in ("$defs", "definitions")]
        waiting += [(child, opened or key in CONDITIONS) for key, child in subnodes]
        if isinstance(node.get("$ref"), str):
            waiting.append((resolve(root, node), opened))
    return {node for node, opened in seen if opened}


def _can_close(part: Schema) -> bool:
    properties = part.get("properties")
    if not isinstance(properties, dict) or "additionalProperties" in part or any(key in part for key in CONDITIONS):
        return False
    required = part.get("required", [])
    if isinstance(required, list) and any(not isinstance(name, str) or name not in properties for name in required):
        return False  # it asks for what it does not declare
    least = part.get("minProperties", 0)
    return not (isinstance(least, int) and least > len(properties))


def response_grammar(response_format: object) -> Grammar | None:
    """The grammar that an answer must match; None for free text.

    OpenAI's {"type": "text" | "json_object" | "json_schema", ...}, a JSON schema as a dict, a `Grammar`, or a class or
    term that `Grammar.of` takes. Objects of a schema are closed unless its `strict` is False; then, too, what the
    grammar library cannot enforce is left out. Raises `InvalidParameter` naming the part.
    """
    if response_format is None or isinstance(response_format, Grammar):
        return response_format
    if isinstance(response_format, Mapping):
        return _described(response_format)
    try:
        return Grammar.of(response_format)
    except GrammarError as error:
        if type(error) is not GrammarError or error.field != "grammar":
            raise
        raise GrammarError(FIELD, error.limit, error.value) from None
    except (InvalidParameter, TypeError, ValueError) as error:
        raise InvalidParameter(FIELD, f"cannot be read as a grammar: {error}", response_format) from error


def _described(response_format: Mapping[str, Any]) -> Grammar | None:
    type_name = response_format.get("type")
    field, schema, strict, key_order = FIELD, response_format, None, None
    if type_name == "text" or (type_name == "json_object" and "schema" not in response_format):
        return None if type_name == "text" else Grammar.json_object()
    if type_name == "json_object":  # as llama.cpp and Together write it
        field, schema = f"{FIELD}.schema", response_format["schema"]
    elif type_name == "json_schema":
        json_schema = response_format.get("json_schema")
        if not isinstance(json_schema, Mapping):
            raise InvalidParameter(f"{FIELD}.json_schema", "must be a dict with name and schema", json_schema)
        field = f"{FIELD}.json_schema.schema"
        if "schema" not in json_schema:
            raise InvalidParameter(field, "is missing: the JSON schema of the answer")
        schema, strict, key_order = json_schema["schema"], json_schema.get("strict"), json_schema.get("key_order")
        if strict not in (None, True, False):
            raise InvalidParameter(f"{FIELD}.json_schema.strict", "must be a bool", strict)
    elif not response_format or (isinstance(type_name, str) and type_name.lower() not in TYPES):
        limit = "must say its type: 'text', 'json_object' or 'json_schema', or be a JSON schema"
        raise InvalidParameter(FIELD, limit, response_format)
    if not isinstance(schema, Mapping):
        raise InvalidParameter(field, "must be a JSON schema, as a dict", schema)
    plain = with_json_types(field, plain_json(field, schema))
    plain = with_local_references(plain, json.dumps(plain))
    plain = plain if strict is False else close_objects(plain)
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
    grammar = Grammar(kind="json_schema", text=text, unsupported="ignore" if strict is False else "error")
    try:
        return grammar if key_order is None else replace(grammar, key_order=key_order)
    except GrammarError as error:
        raise InvalidParameter(f"{FIELD}.json_schema.key_order", error.limit, error.value) from None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call."""

    name: str
    schema: Mapping[str, Any]
    """The JSON schema of its arguments, ready for a grammar."""
    strict: bool = True
    """Every part of the schema must be enforced; else what the grammar library cannot enforce is left out."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The tool choice of a request. `name` with mode "named" only."""

    mode: Literal["none", "auto", "required", "named"]
    name: str = ""
    allowed: frozenset[str] | None = None
    """Names of the tools that may be called; None: all of them."""

    def among(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.mode == "none":
            return ()
        named = frozenset((self.name,)) if self.mode == "named" else self.allowed
        return tuple(tool for tool in tools if named is None or tool.name in named)


def check_tools(tools: object) -> list[Tool]:
    """OpenAI's {"type": "function", "function": {...}} or the bare function. Raises `InvalidParameter`."""
    if tools is None:
        return []
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidParameter("tools", "must be a list of dicts", tools)
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter("tools", f"at most {MAX_TOOLS} tools", len(tools))
    checked = [_check_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    first: dict[str, int] = {}
    for i, tool in enumerate(checked):
        if first.setdefault(tool.name, i) != i:
            raise InvalidParameter(f"tools[{i}].function.name", f"is that of tools[{first[tool.name]}] too", tool.name)
    return checked


def _check_tool(field: str, tool: object) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidParameter(field, "must be a dict with the function's JSON schema", tool)
    if "function" in tool:
        if tool.get("type", "function") != "function":
            raise InvalidParameter(f"{field}.type", "must be 'function'", tool["type"])
        function, prefix = tool["function"], f"{field}.function"
        if not isinstance(function, Mapping):
            raise InvalidParameter(prefix, "must be a dict with name and parameters", function)
    else:
        function, prefix = tool, field
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        limit = "must be a str of 1 to 128 letters, digits or any of _ . : / -"
        raise InvalidParameter(f"{prefix}.name", limit, name)
    strict = next((value for source in (function, tool) if (value := source.get("strict")) is not None), None)
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter(f"{prefix}.strict", "must be a bool", strict)
    schema = tool_schema(f"{prefix}.parameters", function.get("parameters"), strict is not False, name)
    return Tool(str(name), schema, strict is not False)


def check_choice(tool_choice: object, tools: Sequence[Tool]) -> Choice:
    """The choice that `tool_choice` stands for. Raises `InvalidParameter` if it is unknown, or needs tools."""
    if tool_choice is not None and not isinstance(tool_choice, (str, Mapping)):
        raise InvalidParameter("tool_choice", _SHAPE, tool_choice)  # not even compared: an array answers with an array
    known = [tool.name for tool in tools]
    match tool_choice:
        case None | "auto":
            return Choice("auto" if tools else "none")
        case "none":
            return Choice("none")
        case "required" | "any":
            if not tools:
                raise InvalidParameter("tool_choice", "needs tools to choose from: pass tools", tool_choice)
            return Choice("required")
        case (
            str(name) | {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}
        ):
            if name not in known:
                limit = f"must be 'none', 'auto', 'required' or a tool's name, and the tools are: {_listed(known)}"
                raise InvalidParameter("tool_choice", limit, name)
            return Choice("named", name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)}}:
            entries = [entry.get("function", entry) if isinstance(entry, Mapping) else entry for entry in listed]
            names: list[Any] = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in entries]
            for index, entry in enumerate(names):
                if entry not in known:
                    field = f"tool_choice.allowed_tools.tools[{index}]"
                    raise InvalidParameter(field, f"must name one of the tools, which are: {_listed(known)}", entry)
            if not names:
                raise InvalidParameter("tool_choice.allowed_tools.tools", "must not be empty")
            return Choice(mode, allowed=frozenset(names))
    raise InvalidParameter("tool_choice", _SHAPE, tool_choice)


_SHAPE = (
    "must be 'none', 'auto', 'required', a name, {'type': 'function', 'function': {'name': ...}} or "
    "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}"
)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:20])
    return (shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")) or "none"
