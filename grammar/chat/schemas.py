"""JSON schemas of tools and answers, made ready for constrained output. Nothing a caller passed is changed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from asyncengine.errors import InvalidParameter
from asyncengine.grammar.schemas import TABLES, children, resolve, subschemas, with_local_references

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
        given = node.get("type")
        names = given if isinstance(given, list) else [given]
        found = [TYPES.get(name.lower(), name) if isinstance(name, str) else name for name in names]
        if found == names:
            continue
        if None in found:
            del node["type"]
        else:
            once = [kind for index, kind in enumerate(found) if kind not in found[:index]]
            node["type"] = once if isinstance(given, list) else once[0]
        meant = "anything" if None in found else f"{node['type']!r}"
        warnings.warn(f"{about}: {given!r} at {pointer}/type is no type of JSON Schema; {meant} is meant", stacklevel=2)
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
    opened, copy = _opened(schema), json.loads(json.dumps(schema))
    for (_, part), (_, made) in zip(subschemas(schema), subschemas(copy), strict=True):
        if id(part) not in opened and _can_close(part):
            made["additionalProperties"] = False
    return copy


def _opened(root: Any) -> set[int]:
    """The parts of a schema, by identity, that must not be closed: several statements about an object meet there."""
    seen: set[tuple[int, bool]] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        part, opened = waiting.pop()
        if not isinstance(part, dict) or (id(part), opened) in seen:
            continue
        every = part.get("allOf")
        count = len(every) if isinstance(every, list) else 0
        count += sum(key in part for key in (*ALTERNATIVES, "$ref"))
        opened = opened or count > 1 or (count == 1 and any(key in part for key in OWN_KEYS))
        seen.add((id(part), opened))
        # a definition is met where it is referred to
        inner = [(step.split("/")[1], child) for step, child in children(part)]
        inner = [(key, child) for key, child in inner if key not in ("$defs", "definitions")]
        waiting += [(child, opened or key in CONDITIONS) for key, child in inner]
        if isinstance(part.get("$ref"), str):
            waiting.append((resolve(root, part), opened))
    return {part for part, opened in seen if opened}


def _can_close(part: Schema) -> bool:
    properties = part.get("properties")
    if not isinstance(properties, dict) or "additionalProperties" in part or any(key in part for key in CONDITIONS):
        return False
    required = part.get("required", [])
    if isinstance(required, list) and any(not isinstance(name, str) or name not in properties for name in required):
        return False  # it asks for what it does not declare
    least = part.get("minProperties", 0)
    return not (isinstance(least, int) and least > len(properties))
