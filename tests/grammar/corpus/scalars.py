"""Types, numbers and their limits, enums and constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .case import Case, make

SAMPLES: dict[str, list[Any]] = {
    "null": [None],
    "boolean": [True, False],
    "integer": [0, -1, 7, 123456789012345678901234567890],
    "number": [0, -0.5, 3.25, 1e21, 2.5e-8],
    "string": ["", "plain", 'a "quote", a \\ and a /', "tab\tline\nend", "日本語 🙂 é", "\u0001\u001f"],
    "array": [[], [1, "a", None], [[[]], {}]],
    "object": [{}, {"a": 1}, {"": {"b": [True]}, "é": None}],
}


def types() -> Iterator[Case]:
    for name, samples in SAMPLES.items():
        wrong = [other[0] for key, other in SAMPLES.items() if key not in (name, "integer" if name == "number" else "")]
        yield make("type", name, {"type": name}, samples, [value for value in wrong if value != samples[0]])
    pairs = [("string", "null"), ("integer", "null"), ("boolean", "string"), ("array", "object"), ("number", "array")]
    for one, two in pairs:
        schema = {"type": [one, two]}
        yield make("type", f"{one}_or_{two}", schema, [SAMPLES[one][0], SAMPLES[two][0], SAMPLES[one][-1]])
    everything = [samples[-1] for samples in SAMPLES.values()]
    yield make("type", "anything", {}, everything, bad_texts=["tru", "[1 2]", '{"a"}', '"\n"', "01", "1.", "'a'"])
    yield make("type", "all_named", {"type": list(SAMPLES)}, everything, bad_texts=["nul", "[,]", "{]"])
    annotated = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "description": "d"}
    notes = {"default": 1, "examples": [1], "$comment": "c", "readOnly": True, "deprecated": True, "type": "integer"}
    yield make("type", "annotations", {**annotated, **notes}, [1, 2], ["1"])
    yield make("type", "limits_of_other_types", {"type": "boolean", "minimum": 3, "minLength": 4}, [True, False])


INTEGER_LIMITS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"minimum": 0}, [0, 1, 999999], [-1, -1000]),
    ({"maximum": 0}, [0, -1, -12345], [1, 10]),
    ({"minimum": 1, "maximum": 5}, [1, 3, 5], [0, 6, 10, 15, -3]),
    ({"minimum": -5, "maximum": 5}, [-5, 0, 5], [-6, 6, 50]),
    ({"minimum": 0, "maximum": 255}, [0, 9, 10, 99, 100, 199, 255], [256, 300, 999, 1000, -1]),
    ({"minimum": -128, "maximum": 127}, [-128, -1, 0, 127], [-129, 128]),
    ({"minimum": 1000}, [1000, 1001, 12345678901], [999, 0, -1000]),
    ({"minimum": 7, "maximum": 7}, [7], [6, 8, 77]),
    ({"minimum": 99, "maximum": 101}, [99, 100, 101], [98, 102, 9, 10]),
    ({"minimum": 1900, "maximum": 2100}, [1900, 2026, 2100], [1899, 2101, 190, 20260]),
    ({"minimum": 0, "maximum": 65535}, [0, 8080, 65535], [65536, 70000, 100000]),
    ({"minimum": -2147483648, "maximum": 2147483647}, [-2147483648, 2147483647], [2147483648, -2147483649]),
    ({"minimum": -9007199254740991, "maximum": 9007199254740991}, [9007199254740991], [9007199254740992]),
    ({"exclusiveMinimum": 0}, [1, 2, 100], [0, -1]),
    ({"exclusiveMaximum": 0}, [-1, -100], [0, 1]),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 10}, [1, 9], [0, 10]),
    ({"exclusiveMinimum": -3, "maximum": 3}, [-2, 3], [-3, 4]),
    ({"minimum": 2.5}, [3, 4], [2, 0]),
    ({"exclusiveMaximum": 2.5, "minimum": 0}, [0, 2], [3]),
    ({"minimum": 3, "exclusiveMinimum": 5}, [6, 7], [3, 5]),
    ({"multipleOf": 2}, [0, 2, -4, 1000], [1, -3, 999]),
    ({"multipleOf": 3, "minimum": 0}, [0, 3, 99], [1, 100, -3]),
    ({"multipleOf": 5, "minimum": 5, "maximum": 100}, [5, 50, 100], [0, 7, 105]),
    ({"multipleOf": 7, "minimum": -21, "maximum": 21}, [-21, 0, 14], [-20, 20, 28]),
    ({"multipleOf": 100}, [0, 100, -2500], [10, 150]),
    ({"multipleOf": 15, "exclusiveMinimum": 0, "exclusiveMaximum": 61}, [15, 30, 60], [0, 20, 75]),
    ({"multipleOf": 2.5}, [0, 5, 10], [2, 3]),
    ({"multipleOf": 1}, [0, 1, -1], [0.5]),
]

NUMBER_LIMITS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"minimum": 0}, [0, 0.5, 1e3], [-0.1, -1]),
    ({"maximum": 1}, [1, 0.999, -5], [1.001, 2]),
    ({"minimum": 0, "maximum": 1}, [0, 0.5, 1, 0.0001], [-0.0001, 1.0001, 7]),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.1, 0.999], [0, 1, 1.5]),
    ({"minimum": -90, "maximum": 90}, [-90, 51.5074, 90], [-90.5, 90.0001, 100]),
    ({"minimum": -180, "maximum": 180}, [-179.99, 0.1278, 180], [181, -180.25]),
    ({"minimum": 0.5, "maximum": 2.75}, [0.5, 2.75, 1], [0.49, 2.76, 3]),
    ({"exclusiveMinimum": 0.5}, [0.51, 1], [0.5, 0.4]),
    ({"exclusiveMaximum": -0.5}, [-0.51, -3], [-0.5, 0]),
    ({"minimum": 1.1, "maximum": 1.1}, [1.1], [1.0, 1.2, 1.11]),
    ({"minimum": -1.5, "exclusiveMaximum": 1.5}, [-1.5, 1.49], [1.5, -1.51]),
    ({"minimum": 99.95, "maximum": 100.05}, [99.95, 100, 100.05], [99.94, 100.06]),
    ({"minimum": 0.001}, [0.001, 1], [0, 0.0009]),
    ({"minimum": 32, "maximum": 212}, [32, 98.6, 212], [31.9, 212.1]),
    ({"multipleOf": 0.5}, [0, 0.5, -1.5, 10], [0.25, 1.3]),
    ({"multipleOf": 0.01, "minimum": 0}, [0, 0.07, 19.99, 100], [0.005, -0.01]),
    ({"multipleOf": 0.1, "minimum": 0, "maximum": 1}, [0, 0.3, 0.7, 1], [0.35, 1.1]),
    ({"multipleOf": 0.25, "exclusiveMinimum": 0}, [0.25, 3.75], [0, 0.3]),
    ({"multipleOf": 10}, [0, 10, -50], [5, 10.5]),
    ({"multipleOf": 0.001}, [0.001, 1.234], [0.0001]),
]


def numbers() -> Iterator[Case]:
    for kind, rows in (("integer", INTEGER_LIMITS), ("number", NUMBER_LIMITS)):
        for limits, valid, invalid in rows:
            name = "_".join(f"{keyword}_{limit}" for keyword, limit in limits.items())
            yield make(kind, name, {"type": kind, **limits}, valid, invalid)
    for limits, valid, invalid in NUMBER_LIMITS[:6]:
        name = "_".join(f"{keyword}_{limit}" for keyword, limit in limits.items())
        schema = {"type": ["number", "null"], **limits}
        yield make("number", f"or_null_{name}", schema, [*valid[:2], None], invalid)


ENUMS: dict[str, list[Any]] = {
    "two": ["yes", "no"],
    "one": ["only"],
    "prefixes": ["a", "ab", "abc", "abcd"],
    "suffixes": ["d", "cd", "bcd", "abcd"],
    "unicode": ["привет", "日本語", "🙂", "é", "e\u0301"],
    "escapes": ['"', "\\", "\n", "\t", "/", "\u0007"],
    "spaces": ["", " ", "  ", "a b"],
    "numbers": [1, 2, 3.5, -4],
    "digits": ["1", "2", "10"],
    "mixed": ["a", 1, None, True, 2.5],
    "with_null": ["low", "high", None],
    "booleans": [True],
    "arrays": [[], [1], [1, 2], ["a", {"b": None}]],
    "objects": [{"kind": "a"}, {"kind": "b", "n": 1}, {}],
    "case": ["GET", "get", "Get"],
    "emoji_families": ["👨", "👨‍👩", "👨‍👩‍👧"],
    "long_200": [f"value_{index:03d}" for index in range(200)],
    "long_numbers": list(range(100, 400, 3)),
    "long_words": [chr(97 + index % 26) * (1 + index % 7) + str(index) for index in range(120)],
    "currencies": ["EUR", "USD", "GBP", "JPY", "CHF", "CAD", "AUD", "CNY", "SEK", "NOK"],
}

CONSTANTS: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "zero": 0,
    "integer": 42,
    "negative": -7,
    "decimal": 2.5,
    "empty": "",
    "string": "fixed text",
    "unicode": "naïve — 日本語 🙂",
    "quotes": 'say "hi" \\ bye',
    "newline": "two\nlines",
    "list": [1, [2, [3]], "x"],
    "object": {"b": 1, "a": {"z": None, "y": [True]}},
    "empty_list": [],
    "empty_object": {},
}


def choices() -> Iterator[Case]:
    for name, values in ENUMS.items():
        wrong = [value for value in ("other", 99, "a_") if value not in values]
        yield make("enum", name, {"enum": values}, [values[0], values[len(values) // 2], values[-1]], wrong)
    for name in ("two", "prefixes", "unicode", "escapes", "long_200"):
        yield make("enum", f"string_{name}", {"type": "string", "enum": ENUMS[name]}, ENUMS[name][:3], [1, None])
    only_strings = {"type": "string", "enum": ENUMS["mixed"]}
    yield make("enum", "type_narrows_mixed", only_strings, ["a"], [1, None, True, 2.5])
    yield make("enum", "limits_narrow", {"enum": [1, 5, 9, "x"], "type": "integer", "minimum": 4}, [5, 9], [1, "x"])
    for name, value in CONSTANTS.items():
        yield make("const", name, {"const": value}, [value])
    yield make(
        "const", "in_object", {"type": "object", "properties": {"v": {"const": 1}}, "required": ["v"]}, [{"v": 1}]
    )


def scalars() -> Iterator[Case]:
    yield from types()
    yield from numbers()
    yield from choices()
