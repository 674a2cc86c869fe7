"""References by address, URN and anchor mean what JSON Schema says, beside a bound of numbers and in tools, too."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from support.tables import table

from asyncengine.grammar import Grammar
from asyncengine.grammar.chat.schemas import tool_schema
from asyncengine.grammar.lower import inline_json
from asyncengine.grammar.schemas import moved, with_local_references

from .oracle import accepts, complaint

URN = "urn:uuid:deadbeef-1234-0000-0000-4321feebdaed"
SCHEMAS: dict[str, dict[str, Any]] = table(__file__, "references")
VALUES: list[Any] = [
    {}, {"a": "x"}, {"a": 1}, {"b": "x"}, {"b": 1}, {"a": "x", "next": {"a": "y", "next": {}}}, {"id": 1}, {"id": "x"},
    {"a": "x", "next": {"a": "y", "next": {"a": 1}}}, {"$id": 1}, {"$id": "x"}, {"$anchor": "$id"}, {"$ref": "x"},
    {"n": 1}, {"n": 0}, {"n": 1.5},
]  # fmt: skip


def schema_of(name: str, bound: bool) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(json.dumps(SCHEMAS[name]))
    if bound:
        schema["properties"]["n"] = {"type": "number", "minimum": 0.5}
    return {"type": "object", **schema}


def judged(schema: dict[str, Any]) -> list[bool]:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    return [validator.is_valid(value) for value in VALUES]


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
def test_references_lead_where_the_specification_says(name: str, bound: bool) -> None:
    schema = schema_of(name, bound)
    expected = judged(schema)
    assert len(set(expected)) == 2
    texts = [json.dumps(value) for value in VALUES]
    assert [accepts(Grammar.json_schema(schema), text) for text in texts] == expected
    embedded = Grammar.lark(f"start: %json {json.dumps(schema)}")
    assert [accepts(embedded, text) for text in texts] == expected


@pytest.mark.parametrize("name", SCHEMAS)
def test_they_do_so_in_a_tool_and_wherever_it_is_moved(name: str) -> None:
    schema = schema_of(name, bound=True)
    tool = tool_schema("parameters", schema, strict=False)
    inside = {"$ref": "#/$defs/final", "$defs": {"final": moved(tool, "#/$defs/final")}}
    for text in (inline_json(tool), inline_json(inside)):
        grammar = Grammar.lark(f"start: {text}")
        assert [accepts(grammar, json.dumps(value)) for value in VALUES] == judged(schema)
    call = Grammar.tool_calls([{"name": "f", "parameters": schema}], parallel=False)
    texts = [json.dumps({"name": "f", "arguments": value}) for value in VALUES]
    assert [accepts(call, text) for text in texts] == judged(schema)


@pytest.mark.parametrize("reference", ["other.json", "http://example.org/other#/a", "#nowhere", "#/$defs/none", URN])
def test_what_leads_out_of_the_document_is_refused_by_name(reference: str) -> None:
    """A place that the outer document has is no exception: the pointer below is relative to `inner`."""
    inner = {"$id": "inner", "properties": {"a": {"$ref": reference}}}
    schema = {"$id": "http://example.org/", "$ref": "inner", "$defs": {"inner": inner, "none": {}}}
    assert "at /$defs/inner/properties/a/$ref" in complaint(Grammar.json_schema(schema))
    assert with_local_references({"a": 1}, '{"a":1}') == {"a": 1}
