"""Schemas are closed where that leaves them possible, and nowhere else."""

from __future__ import annotations

import json
import warnings
from typing import Any

import jsonschema
import pytest
from support.data import cases_of
from support.tables import table

from asyncengine.errors import InvalidParameter
from asyncengine.grammar.chat.schemas import check_tools, close_objects, plain_json, response_grammar, tool_schema

ROWS: dict[str, Any] = cases_of(__file__)

A = {"properties": {"a": {"type": "integer"}}}
CLOSED_A = {**A, "additionalProperties": False}
B = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}


def closed(schema: Any) -> Any:
    return close_objects(plain_json("s", schema))


@pytest.mark.parametrize(("schema", "expected"), table(__file__, "closed"))
def test_what_is_closed(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before


@pytest.mark.parametrize(("schema", "instance"), table(__file__, "open"))
def test_what_would_become_impossible_stays_open(schema: Any, instance: Any) -> None:
    jsonschema.validate(instance, schema)
    jsonschema.validate(instance, closed(schema))


def test_a_definition_is_open_only_where_it_is_combined() -> None:
    schema = {
        "properties": {"one": {"$ref": "#/$defs/Plain"}, "two": {"allOf": [{"$ref": "#/$defs/Part"}, B]}},
        "$defs": {"Plain": A, "Part": A, "Loop": {"properties": {"next": {"$ref": "#/$defs/Loop"}}}},
    }
    out = closed(schema)
    assert out["$defs"]["Plain"] == CLOSED_A
    assert out["$defs"]["Part"] == A
    assert out["additionalProperties"] is False
    assert out["$defs"]["Loop"]["additionalProperties"] is False


DEEP: Any = {}
for _ in range(70):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("parameters", "field"),
    [*ROWS["malformed_parameters_are_named"], ({"properties": {"a": {1}}}, "p"), ({"properties": {"a": DEEP}}, "p")],
)
def test_malformed_parameters_are_named(parameters: Any, field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        tool_schema("p", parameters)
    assert caught.value.field == field


@pytest.mark.parametrize(("written", "meant"), ROWS["types_of_other_languages_are_read_with_a_warning"])
def test_types_of_other_languages_are_read_with_a_warning(written: Any, meant: dict[str, Any]) -> None:
    parameters = {"type": "OBJECT", "properties": {"a/b": {"items": {"type": written}}, "type": {"enum": ["str"]}}}
    before = json.dumps(parameters)
    with pytest.warns(UserWarning, match=r"tool 'save': .* at /properties/a~1b/items/type is no type of JSON Schema"):
        [tool] = check_tools([{"name": "save", "parameters": parameters}])
    properties = {"a/b": {"items": meant}, "type": {"enum": ["str"]}}
    assert tool.schema == {"type": "object", "properties": properties, "additionalProperties": False}
    assert json.dumps(parameters) == before
    with pytest.warns(UserWarning, match=r"response_format: .* at /type is no type"):
        grammar = response_grammar({"type": "Dict", "properties": {"a": {"type": "boolean"}}})
    assert grammar is not None
    assert json.loads(grammar.text)["type"] == "object"


@pytest.mark.parametrize("kind", ["string", ["integer", "null"], "file", 3, None, [3]])
def test_types_of_json_schema_and_unknown_ones_are_left_as_they_are(kind: Any) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": kind}}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tool_schema("parameters", parameters)["properties"] == {"a": {"type": kind}}
