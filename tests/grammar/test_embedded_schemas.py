"""A schema inside a Lark grammar, as a tool's is, finds its way to the end as it does by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.small_grammars import shared_vocabulary
from support.tables import table

from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlguidanceBackend


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS = table(__file__, "embedded")


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_embedded_schema_compiles_as_it_does_by_itself(name: str) -> None:
    backend = LlguidanceBackend(shared_vocabulary())
    alone = backend.compile(Grammar.json_schema(SCHEMAS[name]))
    inside = backend.compile(Grammar.lark(f'start: "<" %json {json.dumps(SCHEMAS[name])} ">"'))
    assert inside.min_tokens <= alone.min_tokens + 4
