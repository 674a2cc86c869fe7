"""Properties: required, optional, closed, open, by pattern, many, oddly named."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from .case import Case, make

INTEGER = {"type": "integer"}
STRING = {"type": "string"}
BOOLEAN = {"type": "boolean"}
ABC = {"a": INTEGER, "b": STRING, "c": BOOLEAN}
FULL = {"a": 1, "b": "x", "c": True}


def required() -> Iterator[Case]:
    """Every choice of which of three properties are required, closed and open."""
    for size in range(4):
        for names in combinations("abc", size):
            least = {name: FULL[name] for name in names}
            without = [{name: FULL[name] for name in FULL if name != missing} for missing in names]
            base: dict[str, Any] = {"type": "object", "properties": ABC, "required": list(names)}
            label = "".join(names) or "none"
            closed = {**base, "additionalProperties": False}
            yield make("object", f"required_{label}_closed", closed, [FULL, least], [*without, {**FULL, "d": 1}])
            spare = {**base, "additionalProperties": INTEGER}
            bad = [*without, {**FULL, "d": "x"}]
            yield make(
                "object", f"required_{label}_spare_integers", spare, [FULL, least, {**FULL, "d": 4, "e": 5}], bad
            )
            if size in (0, 2):
                yield make("object", f"required_{label}_open", base, [least, {**FULL, "d": None}], [{**FULL, "a": "x"}])


def names() -> Iterator[Case]:
    odd = {
        "unicode": ["naïve", "日本語", "ключ", "🙂"],
        "escapes": ['quo"te', "back\\slash", "new\nline", "tab\t"],
        "spaces": ["", " ", "two words"],
        "prefixes": ["a", "aa", "aaa", "ab"],
        "keywords": ["type", "properties", "$ref", "enum", "required"],
        "signs": ["a.b", "a/b", "a-b", "$a", "@a", "{a}", "[0]"],
        "digits": ["0", "1", "10", "-1"],
    }
    for label, keys in odd.items():
        schema = {"type": "object", "properties": dict.fromkeys(keys, INTEGER), "required": keys}
        full = {key: index for index, key in enumerate(keys)}
        yield make("names", f"{label}_closed", {**schema, "additionalProperties": False}, [full], [{}])
        optional = {"type": "object", "properties": dict.fromkeys(keys, STRING), "additionalProperties": False}
        yield make(
            "names", f"{label}_optional", optional, [{}, {keys[-1]: "v"}, dict.fromkeys(keys, "v")], [{keys[0]: 1}]
        )
        if label != "escapes":
            spare = {**schema, "additionalProperties": BOOLEAN}
            yield make("names", f"{label}_spare", spare, [{**full, "other": True}], [{**full, "other": 1}])


def maps() -> Iterator[Case]:
    yield make("map", "anything", {"type": "object"}, [{}, {"k": [1]}, {"a": 1, "b": {"c": None}}])
    yield make("map", "closed_empty", {"type": "object", "additionalProperties": False}, [{}], [{"a": 1}])
    yield make("map", "closed_by_count", {"type": "object", "maxProperties": 0}, [{}], [{"a": 1}])
    for name, item, good, bad in (
        ("integers", INTEGER, 3, "x"),
        ("strings", STRING, "v", 1),
        ("lists", {"type": "array", "items": INTEGER}, [1], ["x"]),
        ("maps", {"type": "object", "additionalProperties": STRING}, {"k": "v"}, {"k": 1}),
        ("nullable", {"type": ["number", "null"]}, None, "x"),
        ("enum", {"enum": ["on", "off"]}, "on", "x"),
    ):
        schema = {"type": "object", "additionalProperties": item}
        yield make(
            "map", f"of_{name}", schema, [{}, {"k": good}, {"k": good, "é": good}], [{"k": bad}, {"k": good, "l": bad}]
        )
    counted = {"type": "object", "additionalProperties": INTEGER, "minProperties": 2, "maxProperties": 3}
    yield make("map", "two_or_three", counted, [{"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}], [{"a": 1}, {}])
    at_least = {"type": "object", "additionalProperties": INTEGER, "minProperties": 1}
    yield make("map", "at_least_one", at_least, [{"a": 1}], [{}])
    one_of_two = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False}
    yield make(
        "map", "any_of_two_names", {**one_of_two, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}], [{}]
    )
    exactly = {**one_of_two, "minProperties": 1, "maxProperties": 1}
    yield make("map", "exactly_one_name", exactly, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 2}])


def by_pattern() -> Iterator[Case]:
    headers = {"type": "object", "patternProperties": {"^x-": STRING}, "additionalProperties": False}
    yield make(
        "pattern_properties", "headers", headers, [{}, {"x-a": "1"}, {"x-a": "1", "x-b": "2"}], [{"a": "1"}, {"x-a": 1}]
    )
    two = {"type": "object", "patternProperties": {"^i_": INTEGER, "^s_": STRING}, "additionalProperties": False}
    yield make("pattern_properties", "two", two, [{"i_a": 1, "s_b": "x"}], [{"i_a": "x"}, {"s_b": 1}, {"b": 1}])
    spare = {"type": "object", "patternProperties": {"^[0-9]+$": STRING}, "additionalProperties": INTEGER}
    yield make("pattern_properties", "spare", spare, [{"12": "x", "a": 1}], [{"12": 1}, {"a": "x"}])
    opened = {"type": "object", "patternProperties": {"_at$": {"type": "string", "format": "date"}}}
    yield make("pattern_properties", "open", opened, [{"made_at": "2024-01-01", "z": 1}], [{"made_at": "now"}])
    mixed = {
        "type": "object",
        "properties": {"id": INTEGER},
        "required": ["id"],
        "patternProperties": {"^tag_": BOOLEAN},
    }
    valid = [{"id": 1}, {"id": 1, "tag_a": True}]
    yield make(
        "pattern_properties", "with_properties", {**mixed, "additionalProperties": False}, valid, [{"id": 1, "b": 1}]
    )
    dates = {"type": "object", "patternProperties": {r"^\d{4}-\d{2}$": {"type": "number", "minimum": 0}}}
    counted = {**dates, "additionalProperties": False, "minProperties": 1}
    yield make("pattern_properties", "by_month", counted, [{"2024-01": 1.5}], [{}, {"2024-1": 1}, {"2024-01": -1}])


def nested() -> Iterator[Case]:
    for width in (10, 20, 40):
        properties = {f"field_{index:02d}": (INTEGER, STRING, BOOLEAN)[index % 3] for index in range(width)}
        full = {name: (1, "x", True)[index % 3] for index, name in enumerate(properties)}
        odd = list(properties)[1::2]
        schema = {"type": "object", "properties": properties, "required": odd, "additionalProperties": False}
        yield make("object", f"wide_{width}", schema, [full, {name: full[name] for name in odd}])
    for required_ in (True, False):
        deep: dict[str, Any] = {"type": "object", "properties": {"leaf": INTEGER}, "additionalProperties": False}
        value: Any = {"leaf": 1}
        for depth in range(1, 13):
            deep = {"type": "object", "properties": {"inner": deep}, "additionalProperties": False}
            if required_:
                deep["required"] = ["inner"]
            value = {"inner": value}
            if depth in (1, 2, 4, 8, 12):
                name = f"deep_{depth}_{'required' if required_ else 'optional'}"
                yield make("object", name, deep, [value, *([] if required_ else [{}])], [{"inner": 1}])
    address = {"type": "object", "properties": {"street": STRING, "city": STRING}, "required": ["city"]}
    person = {"type": "object", "properties": {"name": STRING, "home": address, "work": address}, "required": ["name"]}
    valid = [{"name": "A", "home": {"street": "s", "city": "c"}}, {"name": "A", "work": {"city": "c"}}]
    yield make("object", "shared_parts", person, valid, [{"name": "A", "home": {}}])
    yield make(
        "object",
        "true_and_false",
        {"type": "object", "properties": {"a": True, "b": False}},
        [{"a": [1]}, {}],
        [{"b": 1}],
    )
    undeclared = {"type": "object", "required": ["a", "b"], "properties": {"b": INTEGER}}
    yield make("object", "required_not_declared", undeclared, [{"b": 1, "a": None}], [{"b": 1}, {"a": 1}])
    yield make(
        "object", "without_type", {"properties": {"a": INTEGER}, "required": ["a"]}, [{"a": 1}, "x", 3, None], [{}]
    )


def objects() -> Iterator[Case]:
    yield from required()
    yield from names()
    yield from maps()
    yield from by_pattern()
    yield from nested()
