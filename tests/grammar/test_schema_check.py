"""The judge of the grammar tests: it must see what `json` and `jsonschema` overlook."""

from __future__ import annotations

from typing import Any

import pytest

from .schema_check import ENFORCED_FORMATS, MAY_BE_EMPTY, Checker, assert_valid, is_format

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("1.0", {"type": "integer"}),
    ("0.3", {"multipleOf": 0.1}),
    ("0.1", {"minimum": 0.1, "maximum": 0.1}),
    ("0.1", {"const": 0.1}),
    ("1e-400", {"exclusiveMinimum": 0}),
    ("3e999999999", {"type": "integer", "multipleOf": 3}),
    (r'"\ud83d\ude42"', {"maxLength": 1}),
    ('"2024-02-29"', {"format": "date"}),
    ('"anything"', {"format": "no-such-format"}),
]

BAD: list[tuple[str, dict[str, Any]]] = [
    ("NaN", {}),
    ("-Infinity", {}),
    ('{"a": 1, "a": 1}', {}),
    ('[{"b": {"a": 1, "a": 1}}]', {}),
    (r'"\ud800"', {}),
    ("[1,]", {}),
    ("", {}),
    ("true", {"type": "integer"}),
    ("1.5", {"type": "integer"}),
    ("1e999999999", {"type": "integer", "multipleOf": 3}),
    ("0.35", {"multipleOf": 0.1}),
    ("9007199254740993", {"maximum": 9007199254740992}),
    (r'"abc\n"', {"pattern": "^abc$"}),
    ('"١"', {"pattern": r"^\d$"}),
    ('"2023-02-29"', {"format": "date"}),
    ('"2023-02-29T00:00:00Z"', {"format": "date-time"}),
    ('"fe80::1%eth0"', {"format": "ipv6"}),
    ("[1, 1.0]", {"uniqueItems": True}),
]


@pytest.mark.parametrize(("text", "schema"), GOOD)
def test_good(text: str, schema: dict[str, Any]) -> None:
    assert_valid(text, schema)


@pytest.mark.parametrize(("text", "schema"), BAD)
def test_bad(text: str, schema: dict[str, Any]) -> None:
    assert Checker(schema).text_fault(text)
    with pytest.raises(AssertionError):
        assert_valid(text, schema)


def test_no_format_takes_anything() -> None:
    for name in ENFORCED_FORMATS:
        assert is_format(name, "") == (name in MAY_BE_EMPTY), name
        assert not is_format(name, "no, not this\n"), name
