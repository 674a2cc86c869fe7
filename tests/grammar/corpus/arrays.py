"""Items, counts and tuples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .case import Case, make

INTEGER = {"type": "integer"}
STRING = {"type": "string"}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}

ITEMS: dict[str, tuple[dict[str, Any], list[Any], Any]] = {
    "integer": (INTEGER, [1, -2, 30], "x"),
    "number": ({"type": "number"}, [1.5, 0, -2], "x"),
    "string": (STRING, ["a", "", "é"], 1),
    "boolean": ({"type": "boolean"}, [True, False], 0),
    "null": ({"type": "null"}, [None, None], 0),
    "enum": ({"enum": ["n", "e", "s", "w"]}, ["n", "w"], "x"),
    "date": ({"type": "string", "format": "date"}, ["2024-01-01", "1970-12-31"], "2024-1-1"),
    "bounded": ({"type": "integer", "minimum": 1, "maximum": 6}, [1, 6, 3], 7),
    "point": (POINT, [{"x": 1, "y": 2.5}, {"x": 0, "y": 0}], {"x": 1}),
    "list": ({"type": "array", "items": INTEGER}, [[], [1, 2]], ["x"]),
    "anything": ({}, [1, "a", None, [{}]], None),
    "choice": ({"anyOf": [INTEGER, STRING]}, [1, "a"], None),
}

COUNTS: list[tuple[dict[str, int], list[int], list[int]]] = [
    ({"minItems": 1}, [1, 3], [0]),
    ({"maxItems": 2}, [0, 2], [3]),
    ({"minItems": 2, "maxItems": 2}, [2], [1, 3]),
    ({"minItems": 1, "maxItems": 4}, [1, 4], [0, 5]),
    ({"maxItems": 0}, [0], [1]),
    ({"minItems": 10}, [10, 12], [9]),
    ({"minItems": 3, "maxItems": 30}, [3, 30], [2, 31]),
]


def items() -> Iterator[Case]:
    for name, (schema, good, wrong) in ITEMS.items():
        listed = {"type": "array", "items": schema}
        bad = [[wrong], [*good, wrong]] if name != "anything" else []
        yield make("array", f"of_{name}", listed, [[], good[:1], good, good * 3], bad)
        filled = {**listed, "minItems": 1, "maxItems": 5}
        yield make("array", f"one_to_five_{name}", filled, [good[:1], good], [[], (good * 6)[:6]])
    for limits, valid, invalid in COUNTS:
        name = "_".join(f"{keyword}_{limit}" for keyword, limit in limits.items())
        bad_counts = [[7] * count for count in invalid]
        yield make(
            "array", name, {"type": "array", "items": INTEGER, **limits}, [[7] * count for count in valid], bad_counts
        )
        texts = [["t"] * count for count in valid]
        yield make("array", f"{name}_untyped_items", {"type": "array", **limits}, texts, bad_counts)


def tuples() -> Iterator[Case]:
    pair = {"type": "array", "prefixItems": [STRING, INTEGER]}
    exact = {**pair, "items": False, "minItems": 2}
    yield make("tuple", "open", pair, [["a", 1], ["a"], [], ["a", 1, None]], [[1], ["a", "b"]])
    yield make("tuple", "closed", {**pair, "items": False}, [["a", 1], ["a"], []], [["a", 1, 2]])
    yield make("tuple", "exact", exact, [["a", 1]], [["a"], [], ["a", 1, 2], [1, "a"]])
    rest = {**pair, "items": {"type": "boolean"}}
    yield make("tuple", "then_booleans", rest, [["a", 1, True, False], ["a"]], [["a", 1, 2]])
    yield make("tuple", "then_limited", {**rest, "minItems": 3, "maxItems": 4}, [["a", 1, True]], [["a", 1]])
    colour = {"type": "integer", "minimum": 0, "maximum": 255}
    rgb = {"type": "array", "prefixItems": [colour] * 3, "items": False, "minItems": 3, "maxItems": 3}
    yield make("tuple", "rgb", rgb, [[0, 128, 255]], [[0, 128], [0, 128, 256], [0, 1, 2, 3]])
    yield make(
        "tuple", "nested", {"type": "array", "prefixItems": [exact, exact], "minItems": 2}, [[["a", 1], ["b", 2]]]
    )
    yield make(
        "tuple", "of_points", {"type": "array", "prefixItems": [POINT], "items": False}, [[{"x": 1, "y": 2}], []]
    )


def nested() -> Iterator[Case]:
    schema: dict[str, Any] = INTEGER
    value: Any = 3
    for depth in range(1, 9):
        schema = {"type": "array", "items": schema, "minItems": 1}
        value = [value]
        yield make("array", f"depth_{depth}", schema, [value], [3, []])
    matrix = {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3}}
    square = {**matrix, "minItems": 3, "maxItems": 3}
    yield make("array", "matrix_rows_of_3", matrix, [[[1, 2, 3]], []], [[[1, 2]]])
    yield make("array", "matrix_3_by_3", square, [[[1, 0, 0], [0, 1, 0], [0, 0, 1]]], [[[1, 0, 0]]])
    ring = {"type": "array", "items": {"type": "array", "prefixItems": [{"type": "number"}] * 2, "minItems": 2}}
    geometry = {
        "type": "object",
        "properties": {"type": {"const": "Polygon"}, "coordinates": {"type": "array", "items": ring}},
        "required": ["type", "coordinates"],
    }
    yield make("array", "polygon", geometry, [{"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [0, 1], [0, 0]]]}])


def arrays() -> Iterator[Case]:
    yield from items()
    yield from tuples()
    yield from nested()
