"""Values that a grammar of JSON lets a model write without end are read by Python and its libraries."""

from __future__ import annotations

import datetime
import json
import math
import re
from ipaddress import IPv4Address, IPv6Address
from random import Random
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from pydantic import AnyUrl, TypeAdapter
from pydantic_core import from_json

from asyncengine.errors import GrammarTooLarge
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import with_rules
from asyncengine.grammar.schema.numbers import MAX_DIGITS, WRITTEN_DIGITS
from asyncengine.grammar.schema.rules import MAX_NESTING
from asyncengine.text.chat_messages import MAX_DEPTH, MAX_INTEGER_BITS

from .bytes_tokenizer import END
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
        with_rules(Grammar.json_schema({"properties": {"n": {"type": "integer", "minimum": 10**2000}}}))[0]


def text_of_walk(found: Any, random: Random) -> str:
    """A string of JSON that the grammar allows, byte for byte at random; ended as soon as it is long."""
    found.reset()
    out = bytearray()
    while True:
        bits = np.unpackbits(np.frombuffer(found.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(place) for place in np.flatnonzero(bits)]
        quote = ord('"') in allowed and out and (len(out) > 40 or random.random() < 0.2)
        if allowed == [END]:
            return str(json.loads(out))
        symbol = ord('"') if quote else random.choice([place for place in allowed if place != END])
        assert found.consume_token(symbol)
        out.append(symbol)


READERS: dict[str, Any] = {
    "date": datetime.date, "time": datetime.time, "date-time": datetime.datetime, "duration": datetime.timedelta,
    "uuid": UUID, "ipv4": IPv4Address, "ipv6": IPv6Address, "uri": AnyUrl,
}  # fmt: skip
OTHERS = {"email": r"[^@\s]+@[^@\s]+", "hostname": r"[A-Za-z0-9.-]{1,253}"}
"""Formats of plain texts."""


@pytest.mark.parametrize("name", [*READERS, *OTHERS])
def test_every_format_is_read_by_pydantic(name: str) -> None:
    found = matcher(Grammar.json_schema({"type": "string", "format": name}))
    random = Random(name)
    for _ in range(300):
        text = text_of_walk(found, random)
        if name in OTHERS:
            assert re.fullmatch(OTHERS[name], text), text
            continue
        TypeAdapter(READERS[name]).validate_python(text)
        if "date" in name or name == "time":
            READERS[name].fromisoformat(text)


@pytest.mark.parametrize(
    ("kind", "read", "unread"),
    [
        (datetime.date, "2024-02-29", "2023-02-29"),
        (datetime.time, "23:59:59", "24:00:00"),
        (datetime.datetime, "2024-02-29 01:02:03", "2024-02-30 01:02:03"),
        (int, "+" + "9" * 308, "9" * 5000),
    ],
)
def test_texts_of_python_types_are_read(kind: Any, read: str, unread: str) -> None:
    make = kind if kind is int else kind.fromisoformat
    assert accepts(Grammar.of(kind), read)
    make(read)
    assert not accepts(Grammar.of(kind), unread)
    with pytest.raises(ValueError, match=r"."):
        make(unread)
