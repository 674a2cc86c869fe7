"""Schemas that llguidance, asked to be exact, does not compile: what constrained generation loses, by keyword.

"unsatisfiable" is no loss: nothing satisfies those schemas, and saying so is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .case import Case, make
from .combined import INTEGER, STRING

TWO = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
CARD = {"type": "object", "properties": {"card": INTEGER, "zip": STRING}}
PYDANTIC_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""The pattern that some releases of pydantic write for Decimal."""

KEYWORDS: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("not", {"type": "string", "not": {"const": "no"}}, ["yes"], ["no"]),
    ("not", {"not": {"type": "null"}}, [1, "a"], [None]),
    ("not", {"type": "integer", "not": {"enum": [13]}}, [12], [13]),
    ("if", {"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 10}}, [3, 20], [11]),
    ("then", {"type": "integer", "then": {"multipleOf": 10}}, [3], ["x"]),
    ("else", {"type": "integer", "else": {"multipleOf": 10}}, [3], ["x"]),
    ("uniqueItems", {"type": "array", "items": INTEGER, "uniqueItems": True}, [[1, 2], []], [[1, 1]]),
    ("uniqueItems", {"type": "array", "uniqueItems": False}, [[1, 1]], [3]),
    ("contains", {"type": "array", "contains": {"const": 1}}, [[0, 1]], [[0], []]),
    ("minContains", {"type": "array", "minContains": 2}, [[1]], [1]),
    ("maxContains", {"type": "array", "maxContains": 2}, [[1]], [1]),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, [{"ab": 1}], [{"A": 1}]),
    ("dependentRequired", {**CARD, "dependentRequired": {"card": ["zip"]}}, [{"zip": "1"}], [{"card": 1}]),
    ("dependentRequired", {**CARD, "dependentRequired": {}}, [{"card": 1}], [{"card": "x"}]),
    ("dependentSchemas", {**CARD, "dependentSchemas": {"card": {"required": ["zip"]}}}, [{}], [{"card": 1}]),
    ("unevaluatedProperties", {**TWO, "unevaluatedProperties": False}, [{"a": 1}], [{"c": 1}]),
    ("unevaluatedItems", {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    ("$dynamicRef", {"$dynamicRef": "#/$defs/n", "$defs": {"n": INTEGER}}, [1], ["x"]),
    ("minProperties", {**TWO, "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}]),
    ("minProperties", {**TWO, "maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, [1, 5.5], [5]),
    ("oneOf", {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["a", "c"], ["b"]),
    ("oneOf", {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]}, ["a"], ["c"]),
    ("oneOf", {**TWO, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}], [{"a": 1, "b": 1}, {}]),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^a": INTEGER, "z$": STRING}},
        [{"a": 1}],
        [{"a": "x"}],
    ),
    ("pattern", {"type": "string", "pattern": "^(?!no)[a-z]+$"}, ["yes"], ["no"]),
    ("pattern", {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}, ["a1"], ["a"]),
    ("pattern", {"type": "string", "pattern": PYDANTIC_DECIMAL}, ["9.99"], ["+-."]),
    ("pattern", {"type": "string", "pattern": "(?<=a)b"}, ["ab"], ["cb"]),
    ("pattern", {"type": "string", "pattern": "^(a|b)\\1$"}, ["aa"], ["ab"]),
    ("pattern", {"type": "string", "pattern": "\\bword\\b"}, ["a word"], ["swords"]),
    ("number", {"type": "integer", "minimum": 1e30}, [10**31], [1]),
    ("number", {"type": "number", "maximum": 1e300}, [1], ["x"]),
]

IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "range": {"type": "integer", "minimum": 5, "maximum": 3},
    "length": {"type": "string", "minLength": 5, "maxLength": 3},
    "items": {"type": "array", "minItems": 3, "maxItems": 1},
    "types": {"allOf": [INTEGER, STRING]},
    "empty_enum": {"enum": []},
    "const_of_another_type": {"type": "string", "const": 1},
    "required_but_forbidden": {**TWO, "required": ["a", "c"], "additionalProperties": False},
    "required_false": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "tuple_too_short": {"type": "array", "prefixItems": [INTEGER], "items": False, "minItems": 2},
    "no_integer_between": {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
}


def refused() -> Iterator[Case]:
    for number, (keyword, schema, valid, invalid) in enumerate(KEYWORDS):
        yield make("refused", f"{keyword}_{number:02d}", schema, valid, invalid, refuses=keyword)
    for name, schema in IMPOSSIBLE.items():
        wrong = [0, "", [], {}, {"a": 1, "c": 1}, [1, 2]]
        yield make("refused", f"impossible_{name}", schema, [], wrong, refuses="unsatisfiable")
