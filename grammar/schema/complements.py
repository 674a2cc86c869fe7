"""Negations of schemas, for `not`, `else`, `oneOf` and counted items.

A schema is a conjunction of keywords, so by De Morgan its negation is a choice: one alternative for each keyword that
may fail. Only one level is written out; below it stands `not` again, so that a recursive schema comes to an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

from asyncengine.grammar.schemas import TABLES

ALL_TYPES = ("null", "boolean", "integer", "fraction", "string", "array", "object")
"""JSON's types; "fraction" is a number that is not whole."""
MAX_GAPS = 64
"""Most numbers of one excluded list: the ranges between them are the alternatives."""
Schema = dict[str, Any]
Opposite = tuple[Schema, bool]
"""(schema, whether it is plain: without applicators, its "enum" or "not" of strings taken as it is)"""


class NoOpposite(Exception):
    """The negation of a keyword cannot be written as a schema. Never leaves the package."""


def opposites(schema: Schema) -> Iterator[Opposite]:
    """Schemas whose union is the values that are not valid under `schema`. `$ref` is left to the caller. Raises
    `NoOpposite` with the keyword."""
    for key, value in schema.items():
        match key:
            case "type" | "enum" | "const" | "pattern":
                yield from _of_values(key, value)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" if not isinstance(value, bool):
                is_open = key[0] == "e" or schema.get(f"exclusive{key.capitalize()}") is True  # draft 4 writes true
                opposite = "maximum" if key.lower().endswith("minimum") else "minimum"
                yield {"type": "number", opposite if is_open else f"exclusive{opposite.capitalize()}": value}, False
            case _ if key in TABLES["opposites"]:
                name, opposite, step = TABLES["opposites"][key]
                if value + step >= 0:
                    yield {"type": name, opposite: int(value) + step}, False
            case "required" | "properties" | "additionalProperties":
                yield from _of_objects(key, value, schema)
            case "dependentRequired" | "dependentSchemas":
                for name, needed in value.items():
                    dependent = {"required": needed} if isinstance(needed, list) else needed
                    yield {"type": "object", "required": [name], "allOf": [{"not": dependent}]}, False
            case "items" | "prefixItems" | "additionalItems" | "contains":
                yield from ((schema_of_opposite, False) for schema_of_opposite in _of_arrays(key, value, schema))
            case "allOf" | "anyOf" | "oneOf" | "not" | "if":
                yield from ((schema_of_opposite, False) for schema_of_opposite in _of_applicators(key, value, schema))
            case _ if key in TABLES["about"]["lost"] and value not in (True, False, {}):
                raise NoOpposite(key)
            case "patternProperties" | "propertyNames" | "uniqueItems" | "unevaluatedProperties" | "unevaluatedItems":
                if value is (key == "uniqueItems"):
                    raise NoOpposite(key)


def _of_values(key: str, value: Any) -> Iterator[Opposite]:
    if key == "pattern":
        yield {"type": "string", "not": {"pattern": value}}, True
    elif key == "type":
        names = value if isinstance(value, list) else [value]
        excluded = [*names, "integer", "fraction"] if "number" in names else names
        yield {"type": [name for name in ALL_TYPES if name not in excluded]}, True
    else:
        values = value if key == "enum" else [value]
        numbered = any(map(is_number, values))
        python_types = {"array": list, "object": dict, "null": type(None), "integer": numbered, "fraction": numbered}
        types = [
            name
            for name in ALL_TYPES
            if not (python_type := python_types.get(name))
            or (isinstance(python_type, type) and not any(isinstance(item, python_type) for item in values))
        ]
        # one alternative for all types that need only a list: several `not`s multiply their alternatives
        yield {"type": types, "not": {"enum": [value for value in values if isinstance(value, (str, bool))]}}, True
        for name, python_type in (("array", list), ("object", dict)):
            if negated := [{"not": structure(value)} for value in values if isinstance(value, python_type)]:
                yield {"type": name, "allOf": negated}, False
        if not numbered:
            return
        numbers = sorted({value for value in values if is_number(value)})
        if len(numbers) > MAX_GAPS:
            raise NoOpposite(f"a list of more than {MAX_GAPS} numbers")
        for low, high in pairwise([None, *numbers, None]):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            yield {"type": "number", **{end: bound for end, bound in bounds.items() if bound is not None}}, False


def _of_objects(key: str, value: Any, schema: Schema) -> Iterator[Opposite]:
    if key == "required":
        for name in value:
            yield {"type": "object", "properties": {name: False}}, False
    elif key == "properties":
        for name, child in value.items():
            yield {"type": "object", "required": [name], "properties": {name: {"not": child}}}, False
    elif value is False and not schema.get("patternProperties"):
        yield {"type": "object", "unlisted": list(schema.get("properties", ()))}, True
    elif value not in (True, {}):
        raise NoOpposite(key)


def _of_arrays(key: str, value: Any, schema: Schema) -> Iterator[Schema]:
    if key == "contains":
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        if least >= 1:
            yield {"type": "array", key: value, "minContains": 0, "maxContains": int(least) - 1}
        if most is not None:
            yield {"type": "array", key: value, "minContains": int(most) + 1}
        return
    if isinstance(value, list):
        for index, child in enumerate(value):
            yield {"type": "array", "minItems": index + 1, "prefixItems": [True] * index + [{"not": child}]}
        return
    first = schema.get("prefixItems", schema.get("items") if key == "additionalItems" else None)
    width = len(first) if isinstance(first, list) else 0
    if key == "additionalItems" and not isinstance(first, list):
        return
    if value is False:
        yield {"type": "array", "minItems": width + 1}
    elif not width:
        yield {"type": "array", "contains": {"not": value}}
    elif value not in (True, {}):
        raise NoOpposite(key)


def _of_applicators(key: str, value: Any, schema: Schema) -> Iterator[Schema]:
    if key == "not":
        yield {"allOf": [value]}
    elif key == "if":
        if "then" in schema:
            yield {"allOf": [value, {"not": schema["then"]}]}
        if "else" in schema:
            yield {"allOf": [{"not": value}, {"not": schema["else"]}]}
    elif key == "allOf":
        yield from ({"not": branch} for branch in value)
    else:
        yield {"allOf": [{"not": branch} for branch in value]}
        if key == "oneOf":
            yield from ({"allOf": list(pair)} for pair in combinations(value, 2))


def is_number(value: Any) -> bool:
    """Whether a value is a number to JSON Schema. In Python `True` is an int."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def structure(value: list[Any] | Schema) -> Schema:
    """A schema that only `value` satisfies, written out for one level; its children are `const`."""
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    properties = {name: {"const": item} for name, item in value.items()}
    return {"type": "object", "properties": properties, "required": list(value), "maxProperties": len(value)}
