"""Schemas that refer to themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .case import Case, make
from .combined import INTEGER, NULL, STRING, record


def records() -> Iterator[Case]:
    own = {"$ref": "#"}
    node = {"$ref": "#/$defs/node"}
    some = {"$defs": {"node": record({"value": INTEGER, "next": {"anyOf": [node, NULL]}})}, **node}
    chain: Any = None
    for value in range(12):
        chain = {"value": value, "next": chain}
    yield make(
        "recursive", "linked_list", some, [{"value": 1, "next": None}, chain], [{"value": 1}, {"value": 1, "next": {}}]
    )
    tree = record({"name": STRING, "children": {"type": "array", "items": own}})
    leaves = {
        "name": "root",
        "children": [{"name": "a", "children": []}, {"name": "b", "children": [{"name": "c", "children": []}]}],
    }
    yield make(
        "recursive",
        "tree",
        tree,
        [{"name": "x", "children": []}, leaves],
        [{"name": "x", "children": [{}]}, {"name": "x"}],
    )
    optional = record({"v": INTEGER, "left": own, "right": own}, "left", "right")
    yield make(
        "recursive",
        "binary_tree",
        optional,
        [{"v": 1}, {"v": 1, "left": {"v": 2}, "right": {"v": 3, "right": {"v": 4}}}],
        [{"v": 1, "left": {}}],
    )
    nest: Any = {"v": 0}
    for _ in range(60):
        nest = {"v": 0, "left": nest}
    yield make("recursive", "sixty_levels", optional, [nest])


def containers() -> Iterator[Case]:
    own = {"$ref": "#"}
    lists = {"type": "array", "items": own}
    yield make("recursive", "lists_only", lists, [[], [[]], [[], [[], [[[[]]]]]], [[[[[[[[[[]]]]]]]]]]], [1, [1]])
    maps = {"type": "object", "additionalProperties": own}
    yield make("recursive", "maps_only", maps, [{}, {"a": {}}, {"a": {"b": {"c": {}}}}], [{"a": 1}])
    sexpr = {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "array", "items": own, "minItems": 1}]}
    yield make("recursive", "s_expressions", sexpr, ["a", ["add", "x", ["mul", "y", "z"]]], [[], ["A"]])
    json_value = {
        "anyOf": [
            {"type": ["null", "boolean", "number", "string"]},
            {"type": "array", "items": own},
            {"type": "object", "additionalProperties": own},
        ]
    }
    yield make("recursive", "any_json", json_value, [None, [1, {"a": [True, {"b": "c"}]}]], bad_texts=["[1,]", "{1:2}"])


def mutual_references() -> Iterator[Case]:
    mutual = {
        "$defs": {
            "folder": record({"name": STRING, "entries": {"type": "array", "items": {"$ref": "#/$defs/entry"}}}),
            "file": record({"name": STRING, "size": {"type": "integer", "minimum": 0}}),
            "entry": {"anyOf": [{"$ref": "#/$defs/folder"}, {"$ref": "#/$defs/file"}]},
        },
        "$ref": "#/$defs/folder",
    }
    files = {"name": "/", "entries": [{"name": "a", "size": 3}, {"name": "d", "entries": [{"name": "b", "size": 0}]}]}
    yield make(
        "recursive",
        "folders_and_files",
        mutual,
        [files, {"name": "", "entries": []}],
        [{"name": "/", "entries": [{"name": "x"}]}],
    )
    filters = {
        "$defs": {
            "f": {
                "anyOf": [
                    record({"and": {"type": "array", "items": {"$ref": "#/$defs/f"}, "minItems": 1}}),
                    record({"not": {"$ref": "#/$defs/f"}}),
                    record({"field": STRING, "op": {"enum": ["=", "<", ">"]}, "value": {"type": ["string", "number"]}}),
                ]
            }
        },
        "$ref": "#/$defs/f",
    }
    leaf = {"field": "age", "op": ">", "value": 3}
    yield make(
        "recursive", "filters", filters, [leaf, {"and": [leaf, {"not": {"not": leaf}}]}], [{"and": []}, {"not": []}]
    )
    two = {
        "$defs": {
            "a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
            "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "additionalProperties": False},
        },
        "$ref": "#/$defs/a",
    }
    yield make("recursive", "alternating", two, [[], [{}], [{"a": [{"a": []}, {}]}]], [[[]], [{"a": {}}]])


def recursion() -> Iterator[Case]:
    yield from records()
    yield from containers()
    yield from mutual_references()
