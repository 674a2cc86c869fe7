"""What a grammar of JSON lets a model write without end, Python and its libraries read."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic_core import from_json

from asyncengine.errors import GrammarTooLarge
from asyncengine.grammar import Grammar
from asyncengine.grammar.lower import to_llguidance
from asyncengine.grammar.numbers import MAX_DIGITS, WRITTEN_DIGITS
from asyncengine.grammar.rules import MAX_NESTING
from asyncengine.text.chat_messages import MAX_DEPTH, MAX_INTEGER_BITS

from .oracle import accepts, matcher

FREE = {"type": "integer"}, {"type": "number"}, {}, {"type": ["integer", "null"]}, {"anyOf": [{"type": "number"}]}
ONE_END = (
    {"type": "integer", "minimum": 3}, {"type": "integer", "exclusiveMinimum": 0, "maximum": None},
    {"type": "number", "minimum": 0.5}, {"type": "integer", "multipleOf": 10}, {"type": "integer", "multipleOf": 7},
    {"type": "number", "multipleOf": 0.25, "minimum": 0},
)  # fmt: skip
OBJECT = {"type": "object", "additionalProperties": False}
NODE = {**OBJECT, "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "required": ["c"]}
TREE = {"$defs": {"n": NODE}, "$ref": "#/$defs/n"}
ADD = {"name": "add", "parameters": {**OBJECT, "properties": {"n": FREE[0]}, "required": ["n"]}}


def longest(grammar: Grammar, begin: str, again: str) -> str:
    """`begin` and `again` as often as the grammar allows, up to 5,000 times."""
    found = matcher(grammar)
    assert not found.is_error(), found.get_error()
    assert found.try_consume_tokens(list(begin.encode())) == len(begin)
    once = list(again.encode())
    count = 0
    while count < 5000 and found.validate_tokens(once) == len(once):
        assert found.try_consume_tokens(once) == len(once)
        count += 1
    return begin + again * count


@pytest.mark.parametrize("schema", [*FREE, *({k: v for k, v in s.items() if v is not None} for s in ONE_END)], ids=str)
@pytest.mark.parametrize("inside", ["json_schema", "lark"])
def test_a_number_without_a_bound_is_read(schema: dict[str, Any], inside: str) -> None:
    grammar = Grammar.json_schema(schema)
    if inside == "lark":
        grammar = Grammar.lark(f"start: %json {json.dumps(schema)}")
    text = longest(grammar, "7", "7" if schema.get("multipleOf") != 10 else "0")
    value = json.loads(text)
    assert 17 <= len(text) <= WRITTEN_DIGITS
    assert math.isfinite(float(value))
    assert value.bit_length() <= MAX_INTEGER_BITS


def test_fractions_and_exponents_end_and_stay_finite() -> None:
    number = Grammar.json_schema({"type": "number"})
    assert len(longest(number, "0.1", "3")) <= 2 + WRITTEN_DIGITS
    for text in ("1e5", "-2.5E-7", "6.02e+23", "1.5e299", "999999999e299", "0", "-0.5", "1e-999"):
        assert accepts(number, text), text
        assert math.isfinite(json.loads(text))
    assert not accepts(number, "1e400")
    assert not accepts(number, "1e309")


@pytest.mark.parametrize(
    ("grammar", "begin", "again"),
    [
        (Grammar.json_object(), '{"a":', "["),
        (Grammar.json_object(), '{"a":', '{"b":'),
        (Grammar.json_schema({}), "", "["),
        (Grammar.json_schema({"type": "array"}), "", "["),
        (Grammar.json_schema(TREE), "", '{"c":['),
        (Grammar.lark("start: %json {}"), "", "["),
        (Grammar.tool_calls([{"name": "f", "parameters": {"type": "object"}}]), '[{"name":"f","arguments":{"a":', "["),
    ],
)
def test_nesting_ends_where_everybody_still_reads(grammar: Grammar, begin: str, again: str) -> None:
    text = longest(grammar, begin, again)
    closing = "".join({"[": "]", "{": "}"}[char] for char in reversed(text) if char in "[{")
    depth = len(closing)
    assert MAX_NESTING - 1 <= depth <= MAX_NESTING + 1 <= MAX_DEPTH
    from_json(text.removesuffix('"b":') + closing)


def test_numbers_of_calls_are_read() -> None:
    text = longest(Grammar.tool_calls([ADD], parallel=False), '{"name":"add","arguments":{"n":9', "9")
    assert json.loads(text + "}}")["arguments"]["n"] == 10**WRITTEN_DIGITS - 1


def test_a_bound_beyond_is_kept_or_refused_by_name() -> None:
    far = Grammar.json_schema({"type": "integer", "minimum": 10**350})
    assert accepts(far, str(10**350))
    assert not accepts(far, "9" * 350)
    assert len(longest(far, "1", "0")) == MAX_DIGITS
    with pytest.raises(GrammarTooLarge, match="/n/minimum must not exceed 400 digits"):
        to_llguidance(Grammar.json_schema({"properties": {"n": {"type": "integer", "minimum": 10**2000}}}))
