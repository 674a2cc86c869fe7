"""The judge of the grammar tests: it must see what `json` and `jsonschema` overlook."""

from __future__ import annotations

from typing import Any

import pytest
from support.tables import table

from .schema_check import ENFORCED_FORMATS, MAY_BE_EMPTY, Checker, assert_valid, is_format

GOOD: list[tuple[str, dict[str, Any]]] = table(__file__, "judged good")

BAD: list[tuple[str, dict[str, Any]]] = table(__file__, "judged bad")


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
