"""anyOf, oneOf where the branches exclude each other, allOf, nullable, references."""

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


def alternatives() -> Iterator[Case]:
    yield make("any_of", "integer_or_string", {"anyOf": [INTEGER, STRING]}, [1, "a"], [None, 1.5, []])
    yield make(
        "any_of", "nullable", {"anyOf": [{"type": "string", "format": "date"}, NULL]}, ["2024-01-01", None], ["x"]
    )
    yield make(
        "any_of",
        "overlapping",
        {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 9}]},
        [1, 7, 12],
        ["x"],
    )
    yield make(
        "any_of",
        "split_range",
        {"anyOf": [{"type": "integer", "maximum": -5}, {"type": "integer", "minimum": 5}]},
        [-6, 5],
        [0, 4],
    )
    yield make(
        "any_of",
        "prefix_strings",
        {"anyOf": [{"const": "a"}, {"const": "ab"}, {"type": "string", "minLength": 5}]},
        ["a", "ab", "abcde"],
        ["abc"],
    )
    yield make("any_of", "shapes", {"anyOf": [CIRCLE, SQUARE, TEXT]}, SHAPES, CROSSED)
    yield make(
        "any_of", "list_or_item", {"anyOf": [{"type": "array", "items": STRING}, STRING]}, [["a"], "a", []], [[1]]
    )
    yield make(
        "any_of",
        "objects_sharing_a_prefix",
        {"anyOf": [record({"a": INTEGER, "b": STRING}), record({"a": INTEGER, "c": INTEGER})]},
        [{"a": 1, "b": "x"}, {"a": 1, "c": 2}],
        [{"a": 1}, {"a": 1, "b": 2}],
    )
    yield make(
        "any_of",
        "one_branch_impossible",
        {"anyOf": [{"type": "integer", "minimum": 9, "maximum": 3}, STRING]},
        ["a"],
        [5],
    )


def nested_alternatives() -> Iterator[Case]:
    yield make(
        "any_of",
        "with_sibling_type",
        {"type": "string", "anyOf": [{"minLength": 4}, {"pattern": "^x"}]},
        ["abcd", "x"],
        ["abc", 1],
    )
    yield make(
        "any_of",
        "with_sibling_properties",
        {
            "type": "object",
            "properties": {"id": INTEGER},
            "required": ["id"],
            "anyOf": [
                {"properties": {"a": STRING}, "required": ["a"]},
                {"properties": {"b": STRING}, "required": ["b"]},
            ],
        },
        [{"id": 1, "a": "x"}, {"id": 1, "b": "x"}],
        [{"id": 1}, {"a": "x"}],
    )
    yield make(
        "any_of",
        "nested",
        {"anyOf": [{"anyOf": [INTEGER, NULL]}, {"anyOf": [{"const": "x"}, {"type": "boolean"}]}]},
        [1, None, "x", True],
        ["y", 1.5],
    )
    many = [record({"op": {"const": f"op{index}"}, f"arg{index}": INTEGER}) for index in range(20)]
    yield make(
        "any_of",
        "twenty",
        {"anyOf": many},
        [{"op": "op0", "arg0": 1}, {"op": "op19", "arg19": 1}],
        [{"op": "op1", "arg2": 1}],
    )


def exclusive() -> Iterator[Case]:
    yield make("one_of", "types", {"oneOf": [INTEGER, STRING, NULL]}, [1, "a", None], [True, [], 1.5])
    yield make("one_of", "enums", {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c"]}]}, ["a", "c"], ["d"])
    yield make(
        "one_of",
        "constants",
        {"oneOf": [{"const": 1, "title": "one"}, {"const": 2, "title": "two"}]},
        [1, 2],
        [3],
    )
    lengths = [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}]
    yield make("one_of", "lengths", {"oneOf": lengths}, ["ab", "abc"], [1])
    ranges = [{"type": "integer", "maximum": 2}, {"type": "integer", "minimum": 3}]
    yield make("one_of", "ranges", {"oneOf": ranges}, [1, 7], ["x"])
    yield make("one_of", "list_or_map", {"oneOf": [{"type": "array"}, {"type": "object"}]}, [[1], {"a": 1}], [1])
    yield make("one_of", "shapes", {"oneOf": [CIRCLE, SQUARE, TEXT]}, SHAPES, CROSSED)
    tagged = {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/s"}], "$defs": {"c": CIRCLE, "s": SQUARE}}
    yield make("one_of", "tagged_by_reference", tagged, SHAPES[:2], CROSSED)
    named = {**tagged, "discriminator": {"propertyName": "kind"}}
    yield make("one_of", "tagged_with_discriminator", named, SHAPES[:2], CROSSED)
    listed = {"type": "array", "items": {"oneOf": [CIRCLE, SQUARE]}, "minItems": 1}
    yield make("one_of", "list_of_shapes", listed, [SHAPES[:2]], [[], CROSSED[:1]])
    yield make("one_of", "single", {"oneOf": [CIRCLE]}, SHAPES[:1], CROSSED)
    yield make("one_of", "value_or_null", {"oneOf": [record({"v": INTEGER}), NULL]}, [{"v": 1}, None], [{"v": None}])


def all_together() -> Iterator[Case]:
    base = {"type": "object", "properties": {"id": INTEGER}, "required": ["id"]}
    more = {"type": "object", "properties": {"name": STRING}, "required": ["name"]}
    yield make("all_of", "two_records", {"allOf": [base, more]}, [{"id": 1, "name": "x"}], [{"id": 1}, {"name": "x"}])
    referred = {"allOf": [{"$ref": "#/$defs/base"}, more], "$defs": {"base": base}}
    yield make("all_of", "extends_reference", referred, [{"id": 1, "name": "x"}], [{"id": 1}])
    yield make("all_of", "range", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, [3, 9], [2, 10])
    yield make(
        "all_of",
        "patterns",
        {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "z$"}]},
        ["az", "abz"],
        ["a", "z"],
    )
    yield make(
        "all_of",
        "multiples",
        {"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]},
        [0, 12, -24],
        [4, 6, 8],
    )
    yield make(
        "all_of",
        "pattern_and_length",
        {"allOf": [{"type": "string", "pattern": "^[a-z]*$"}, {"maxLength": 3}]},
        ["abc", ""],
        ["abcd", "A"],
    )
    yield make(
        "all_of", "choices_meet", {"allOf": [{"anyOf": [INTEGER, STRING]}, {"anyOf": [STRING, NULL]}]}, ["x"], [1, None]
    )
    yield make(
        "all_of",
        "enum_meets_type",
        {"allOf": [{"enum": [1, "a", None]}, {"type": ["string", "null"]}]},
        ["a", None],
        [1],
    )
    narrowed = {
        "allOf": [{"properties": {"n": {"type": "integer", "minimum": 0}}}, {"properties": {"n": {"maximum": 5}}}]
    }
    yield make(
        "all_of",
        "same_property_twice",
        {"type": "object", **narrowed, "required": ["n"]},
        [{"n": 0}, {"n": 5}],
        [{"n": 6}, {"n": -1}],
    )
    yield make("all_of", "single", {"allOf": [STRING]}, ["x"], [1])
    beside = {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer", "maximum": 9}}}
    yield make("all_of", "reference_with_sibling", beside, [5, 9], [4, 10])


def references() -> Iterator[Case]:
    name = {"type": "string", "minLength": 1, "maxLength": 20}
    yield make("ref", "plain", {"$ref": "#/$defs/n", "$defs": {"n": name}}, ["x"], ["", 1])
    yield make("ref", "definitions", {"$ref": "#/definitions/n", "definitions": {"n": name}}, ["x"], [""])
    yield make(
        "ref",
        "chain",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/n"}, "n": name}},
        ["x"],
        [""],
    )
    twice = {**record({"one": {"$ref": "#/$defs/n"}, "two": {"$ref": "#/$defs/n"}}), "$defs": {"n": name}}
    yield make("ref", "used_twice", twice, [{"one": "a", "two": "b"}], [{"one": "a", "two": ""}])
    yield make(
        "ref",
        "into_properties",
        {**record({"a": INTEGER, "b": {"$ref": "#/properties/a"}})},
        [{"a": 1, "b": 2}],
        [{"a": 1, "b": "x"}],
    )
    yield make("ref", "escaped_pointer", {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": INTEGER}}, [1], ["x"])
    yield make("ref", "anchor", {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "integer"}}}, [1], ["x"])
    yield make(
        "ref",
        "optional_nullable",
        {**record({"v": {"anyOf": [{"$ref": "#/$defs/n"}, NULL]}}, "v"), "$defs": {"n": name}},
        [{}, {"v": None}, {"v": "a"}],
        [{"v": ""}],
    )


def combined() -> Iterator[Case]:
    yield from alternatives()
    yield from nested_alternatives()
    yield from exclusive()
    yield from all_together()
    yield from references()
