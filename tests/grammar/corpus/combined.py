"""anyOf, allOf, nullable. What `oneOf` and references mean is asked in `test_one_of` and `test_references`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .case import Case, make

INTEGER = {"type": "integer"}
STRING = {"type": "string"}
NULL = {"type": "null"}


def record(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


CIRCLE = record({"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}})
SQUARE = record({"kind": {"const": "square"}, "side": {"type": "number", "exclusiveMinimum": 0}})
TEXT = record({"kind": {"const": "text"}, "text": STRING, "size": INTEGER}, "size")
SHAPES = [{"kind": "circle", "radius": 1.5}, {"kind": "square", "side": 2}, {"kind": "text", "text": "t"}]
CROSSED = [{"kind": "circle", "side": 1}, {"kind": "square"}, {"kind": "oval", "radius": 1}, {"radius": 1}]
Row = tuple[str, dict[str, Any], list[Any], list[Any]]
"""Name, schema, instances that satisfy it and some that do not."""


def needs(key: str) -> dict[str, Any]:
    return {"type": "object", "properties": {key: STRING}, "required": [key]}


MANY = [record({"op": {"const": f"op{index}"}, f"arg{index}": INTEGER}) for index in range(20)]
BASE = {"type": "object", "properties": {"id": INTEGER}, "required": ["id"]}
REFERRED = {"allOf": [{"$ref": "#/$defs/base"}, needs("name")], "$defs": {"base": BASE}}
NARROWED = {"allOf": [{"properties": {"n": {"type": "integer", "minimum": 0}}}, {"properties": {"n": {"maximum": 5}}}]}
BESIDE = {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer", "maximum": 9}}}
ANY_OF: list[Row] = [
    ("integer_or_string", {"anyOf": [INTEGER, STRING]}, [1, "a"], [None, 1.5, []]),
    ("nullable", {"anyOf": [{"type": "string", "format": "date"}, NULL]}, ["2024-01-01", None], ["x"]),
    ("overlapping", {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 9}]},
     [1, 7, 12], ["x"]),
    ("split_range", {"anyOf": [{"type": "integer", "maximum": -5}, {"type": "integer", "minimum": 5}]},
     [-6, 5], [0, 4]),
    ("prefix_strings", {"anyOf": [{"const": "a"}, {"const": "ab"}, {"type": "string", "minLength": 5}]},
     ["a", "ab", "abcde"], ["abc"]),
    ("shapes", {"anyOf": [CIRCLE, SQUARE, TEXT]}, SHAPES, CROSSED),
    ("list_or_item", {"anyOf": [{"type": "array", "items": STRING}, STRING]}, [["a"], "a", []], [[1]]),
    ("objects_sharing_a_prefix",
     {"anyOf": [record({"a": INTEGER, "b": STRING}), record({"a": INTEGER, "c": INTEGER})]},
     [{"a": 1, "b": "x"}, {"a": 1, "c": 2}], [{"a": 1}, {"a": 1, "b": 2}]),
    ("one_branch_impossible", {"anyOf": [{"type": "integer", "minimum": 9, "maximum": 3}, STRING]},
     ["a"], [5]),
    ("with_sibling_type", {"type": "string", "anyOf": [{"minLength": 4}, {"pattern": "^x"}]},
     ["abcd", "x"], ["abc", 1]),
    ("with_sibling_properties", {**BASE, "anyOf": [needs("a"), needs("b")]},
     [{"id": 1, "a": "x"}, {"id": 1, "b": "x"}], [{"id": 1}, {"a": "x"}]),
    ("nested", {"anyOf": [{"anyOf": [INTEGER, NULL]}, {"anyOf": [{"const": "x"}, {"type": "boolean"}]}]},
     [1, None, "x", True], ["y", 1.5]),
    ("twenty", {"anyOf": MANY},
     [{"op": "op0", "arg0": 1}, {"op": "op19", "arg19": 1}], [{"op": "op1", "arg2": 1}]),
]  # fmt: skip
ALL_OF: list[Row] = [
    ("two_records", {"allOf": [BASE, needs("name")]}, [{"id": 1, "name": "x"}], [{"id": 1}, {"name": "x"}]),
    ("extends_reference", REFERRED, [{"id": 1, "name": "x"}], [{"id": 1}]),
    ("range", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, [3, 9], [2, 10]),
    ("patterns", {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "z$"}]},
     ["az", "abz"], ["a", "z"]),
    ("multiples", {"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]},
     [0, 12, -24], [4, 6, 8]),
    ("pattern_and_length", {"allOf": [{"type": "string", "pattern": "^[a-z]*$"}, {"maxLength": 3}]},
     ["abc", ""], ["abcd", "A"]),
    ("choices_meet", {"allOf": [{"anyOf": [INTEGER, STRING]}, {"anyOf": [STRING, NULL]}]}, ["x"], [1, None]),
    ("enum_meets_type", {"allOf": [{"enum": [1, "a", None]}, {"type": ["string", "null"]}]},
     ["a", None], [1]),
    ("same_property_twice", {"type": "object", **NARROWED, "required": ["n"]},
     [{"n": 0}, {"n": 5}], [{"n": 6}, {"n": -1}]),
    ("single", {"allOf": [STRING]}, ["x"], [1]),
    ("reference_with_sibling", BESIDE, [5, 9], [4, 10]),
]  # fmt: skip


def combined() -> Iterator[Case]:
    for category, rows in (("any_of", ANY_OF), ("all_of", ALL_OF)):
        for name, schema, valid, invalid in rows:
            yield make(category, name, schema, valid, invalid)
