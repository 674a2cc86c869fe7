"""Reading bodies: what is no JSON is refused, and so is what would hold the interpreter while it is made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncengine.integrations.http import body
from asyncengine.integrations.http.problems import Problem

VALUE = {"a": [1, -2.5e3, 'é "\\ \u2028 😀', None, True, {"b": {}, "c": []}], "": [[[]]]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_body_in_any_encoding_of_json(encoding: str) -> None:
    assert body._parse(json.dumps(VALUE, ensure_ascii=False).encode(encoding)) == VALUE
    assert body._parse(json.dumps(VALUE, indent=1).encode(encoding)) == VALUE


@pytest.mark.parametrize(
    "value", [[0] * (body.MOST_VALUES + 1), {str(n): "" for n in range(body.MOST_STRINGS // 2 + 1)}], ids=type
)
def test_too_many_values_are_refused_before_they_are_made(value: Any) -> None:
    with pytest.raises(Problem, match=f"over {body.MOST_STRINGS} and {body.MOST_VALUES}") as refused:
        body._parse(json.dumps(value).encode())
    assert refused.value.status == 413
    assert body._parse(json.dumps('"' * body.MOST_STRINGS * 2).encode()).count('"') == 2 * body.MOST_STRINGS
