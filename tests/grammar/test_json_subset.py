"""JSON schemas for outlines_core: what is accepted is valid, what is valid is accepted, the rest is refused by name."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

import asyncengine.demo
from asyncengine.errors import GrammarError, GrammarImpossible, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.json_subset import schema_pattern
from asyncengine.grammar.outlines_core_backend import OutlinesCoreBackend
from asyncengine.grammar.spec import Grammar
from asyncengine.text.token_table import TokenTable

Tokenizer = Any
WIDTH = 2112


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


PERSON = closed(
    {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "age": {"type": "integer"},
        'we"ird/~\\ 日本.*': {"type": ["null", "boolean"]},
        "tags": {
            "type": "array",
            "items": {"enum": ["a.b", "日本", "é\n", 1, 1.5, None, {"k": [1, {}]}]},
            "maxItems": 2,
        },
        "inner": {"$ref": "#/$defs/inner"},
    },
    "age",
    "tags",
)
PERSON["$defs"] = {"inner": closed({"x": {"anyOf": [{"type": "number"}, {"const": "x"}], "title": "X", "default": 1}})}

CASES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "string"}, ["", "a", 'q"\\/\b\n\u007f', "日🙂"], [1, None]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "日本語", "🙂🙂"], ["a", "", "🙂", "abcd", '""""']),
    ({"type": "integer"}, [0, -5, 10**30], [0.5, "1", True]),
    ({"type": "number"}, [0, -1, 1.5, 1e5, 1e-7, -2.5e300], ["1", None, True]),
    ({"type": ["boolean", "null"]}, [True, False, None], [0, "true"]),
    (
        {"enum": ["a", "ab", 1, True, None, [], {}, {"a": 1, "b": [1, 2]}]},
        ["ab", {"a": 1, "b": [1, 2]}, True],
        [2, "b"],
    ),
    ({"enum": [1, "a", 2.0, True], "type": "integer"}, [1, 2.0], ["a", True]),
    ({"const": 1, "enum": [True, 1.0]}, [1.0], [True]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        [[1], [1, 2, 3]],
        [[], [1, 2, 3, 4]],
    ),
    ({"type": "array", "items": {"type": "null"}}, [[], [None], [None] * 9], [[1], None]),
    ({"type": "array", "items": {"enum": []}}, [[]], [[1]]),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, [[]], [[None]]),
    (closed({}), [{}], [{"a": 1}]),
    (
        closed({"a": {"type": "null"}, "b": {"type": "null"}}),
        [{}, {"a": None}, {"b": None}, {"a": None, "b": None}],
        [[]],
    ),
    (closed({"a": {"enum": []}, "b": {"type": "null"}}, "b"), [{"b": None}], [{}, {"a": None, "b": None}]),
    (
        closed({key: {"type": "null"} for key in "abcde"}, "c"),
        [{"c": None}, dict.fromkeys("abcde"), dict.fromkeys("bce"), dict.fromkeys("ac")],
        [{}, dict.fromkeys("ab"), dict.fromkeys("cf")],
    ),
    (
        PERSON,
        [
            {"age": 1, "tags": []},
            {
                "name": "日🙂",
                "age": -1,
                'we"ird/~\\ 日本.*': None,
                "tags": ["é\n", {"k": [1, {}]}],
                "inner": {"x": 1.5e-7},
            },
        ],
        [{"age": 1}, {"age": 1.5, "tags": []}, {"name": "", "age": 1, "tags": []}],
    ),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizers.Tokenizer.from_file(str(Path(asyncengine.demo.MODEL_PATH) / "tokenizer.json"))


@pytest.fixture(scope="module")
def table(tokenizer: Tokenizer) -> TokenTable:
    return TokenTable(tokenizer)


@pytest.fixture(scope="module")
def backend(table: TokenTable) -> Iterator[OutlinesCoreBackend]:
    spelled = [table.token_bytes(i) for i in range(table.size)]
    backend = OutlinesCoreBackend(spelled, [0], table.special_ids, WIDTH)
    yield backend
    backend.close()


def texts(value: Any) -> list[str]:
    """The same value as it is usually written."""
    return [
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, indent=2),
        json.dumps(value, ensure_ascii=False, indent=4),
        json.dumps(value, ensure_ascii=False, indent="\t"),
    ]


def takes(template: Any, tokenizer: Tokenizer, text: str) -> bool:
    state = template.new_state()
    return all(map(state.consume, tokenizer.encode(text).ids)) and state.is_accepting()


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=range(len(CASES)))
def test_valid_values_are_accepted_and_others_are_not(
    backend: OutlinesCoreBackend, tokenizer: Tokenizer, schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    check = jsonschema.Draft202012Validator(schema)
    flexible = backend.compile(Grammar("json_schema", json.dumps(schema)), 60)
    single = backend.compile(Grammar("json_schema", json.dumps(schema), "single_space"), 60)
    compact = backend.compile(Grammar("json_schema", json.dumps(schema), "compact"), 60)
    for value in valid:
        assert check.is_valid(value)
        assert all(takes(flexible, tokenizer, text) for text in texts(value)), value
        assert takes(compact, tokenizer, texts(value)[0])
        assert takes(single, tokenizer, texts(value)[1])
        if texts(value)[0] != texts(value)[1]:
            assert not takes(compact, tokenizer, texts(value)[1])
            assert not takes(single, tokenizer, texts(value)[0])
    for value in invalid:
        assert not check.is_valid(value)
        assert not any(takes(flexible, tokenizer, text) for text in texts(value)), value


def test_plane_16_is_written_with_escapes(backend: OutlinesCoreBackend, tokenizer: Tokenizer) -> None:
    template = backend.compile(Grammar("json_schema", '{"type":"string"}'), 60)
    assert takes(template, tokenizer, json.dumps("\U0010fffd"))
    assert not takes(template, tokenizer, json.dumps("\U0010fffd", ensure_ascii=False))
    with pytest.raises(GrammarUnsupported, match=r"U\+100000"):
        schema_pattern({"const": "\U0010fffd"})


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("whitespace", ["flexible", "compact"])
def test_random_walks_are_valid(backend: OutlinesCoreBackend, table: TokenTable, case: int, whitespace: Any) -> None:
    """Random outputs, closed within a budget, parse and are valid."""
    schema = CASES[case][0]
    check = jsonschema.Draft202012Validator(schema)
    template = backend.compile(Grammar("json_schema", json.dumps(schema), whitespace), 60)
    rng = random.Random(case)
    mask = np.empty(WIDTH // 32, np.int32)
    for budget in [template.min_tokens] * 5 + [template.min_tokens + 40] * 20:
        state, closing, left = template.new_state(), template.new_closing(), budget
        data = b""
        while not state.is_terminated():
            state.fill(mask)
            options = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            token = rng.choice(options)
            if token == 0 and rng.random() < 0.5:
                break
            if token == 0 or not closing.advance(token, left - 1):
                if closing.cost == 0:
                    break
                token = closing.first()
                assert closing.advance(token, left - 1)
            assert state.consume(token)
            data += table.token_bytes(token)
            left -= 1
        text = data.decode()
        assert not re.search(r"\s{42}", re.sub(r'"(?:[^"\\]|\\.)*"', "", text))
        check.validate(json.loads(text))


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (r'"\u65e5\ud83d\ude42"', True),
        (r'"\uD83D\uDE42a"', True),
        (r'"\/\b\f\n\r\t\"\\"', True),
        (r'"\ud83d"', False),
        (r'"\ude42\ud83d"', False),
        (r'"\u65E"', False),
        (r'"\x"', False),
        ('"\n"', False),
        ('"\x00"', False),
        ('"\x7f\u2028"', True),
        ('"', False),
        ('"a" ', False),
    ],
)
def test_strings_are_those_of_json(text: str, accepted: bool) -> None:
    """`re` stands in for the automaton here: test_outlines_core shows that they agree."""
    assert (re.fullmatch(schema_pattern({"type": "string"}), text) is not None) == accepted


@pytest.mark.parametrize("text", [r'"\ud83d\ude42\u0041"', '"🙂A"'])
def test_a_pair_of_surrogates_is_one_character(text: str) -> None:
    for length in range(4):
        found = re.fullmatch(schema_pattern({"type": "string", "minLength": length, "maxLength": length}), text)
        assert (found is not None) == (length == 2)


@pytest.mark.parametrize("text", ["01", "-", "1.", ".5", "+1", "1e", "0x1", "1e+", "--1", "NaN", "Infinity", "-01"])
def test_numbers_are_those_of_json(text: str) -> None:
    with pytest.raises(json.JSONDecodeError if text not in ("NaN", "Infinity") else KeyError):
        json.loads(text, parse_constant=lambda name: {}[name])
    assert not re.fullmatch(schema_pattern({"type": "number"}), text)


NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "features"),
    [
        (True, [("true", "")]),
        ({"type": "object"}, [("additionalProperties", "")]),
        ({}, [("type", "")]),
        ({"title": "any"}, [("type", "")]),
        ({"type": "array"}, [("items", "")]),
        ({"type": "array", "items": {}}, [("type", "/items")]),
        (closed({"a": NULL}, "a", "b"), [("required", "/required")]),
        ({**closed({"a": NULL}), "additionalProperties": NULL}, [("additionalProperties", "")]),
        ({"type": "integer", "minimum": 1, "multipleOf": 2}, [("multipleOf", "/multipleOf")]),
        (closed({"a/~b": {"type": "string", "format": "date"}}), [("format", "/properties/a~1~0b/format")]),
        ({"allOf": [NULL]}, [("allOf", "/allOf")]),
        ({"oneOf": [NULL]}, [("oneOf", "/oneOf")]),
        ({"anyOf": [NULL, {"type": "string", "pattern": "a"}]}, [("pattern", "/anyOf/1/pattern")]),
        ({"anyOf": [NULL], "type": "null"}, [("type", "/type")]),
        ({"enum": ["a"], "minLength": 3}, [("minLength", "/minLength")]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": NULL}}}, [("not", "/$defs/a/not")]),
        ({"$ref": "#/$defs/a", "type": "null", "$defs": {"a": NULL}}, [("type", "/type")]),
        ({"$ref": "other.json"}, [("$ref", "/$ref")]),
        ({"$ref": "#"}, [("$ref", "/$ref")]),
        (closed({"a": {"$ref": "#"}}), [("$ref", "/properties/a/$ref")]),
        (
            {"type": "string", "uniqueItems": True, "x-mine": 1},
            [("uniqueItems", "/uniqueItems"), ("x-mine", "/x-mine")],
        ),
    ],
)
def test_everything_else_is_refused_by_name(schema: Any, features: list[tuple[str, str]]) -> None:
    with pytest.raises(GrammarUnsupported) as caught:
        schema_pattern(schema)
    assert list(caught.value.features) == features


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"enum": []},
        {"enum": ["a"], "type": "integer"},
        {"const": 1, "enum": [2, True]},
        closed({"a": {"enum": []}}, "a"),
        {"type": "array", "items": {"enum": []}, "minItems": 1},
        {"anyOf": [{"enum": []}, {"type": "array", "items": NULL, "minItems": 2, "maxItems": 1}]},
    ],
)
def test_schemas_without_a_value_are_impossible(schema: Any) -> None:
    with pytest.raises(GrammarImpossible):
        schema_pattern(schema)


@pytest.mark.parametrize(
    "schema",
    [
        1,
        {"type": "date"},
        {"type": "string", "minLength": -1},
        {"type": "string", "maxLength": 1.5},
        {"enum": "ab"},
        {"anyOf": []},
        {"$ref": "#/nowhere"},
        {"const": float("nan")},
        {"type": "object", "properties": [], "additionalProperties": False},
    ],
)
def test_malformed_schemas_are_refused(schema: Any) -> None:
    with pytest.raises(GrammarError):
        schema_pattern(schema)


def test_references_cannot_blow_the_pattern_up() -> None:
    definitions: dict[str, Any] = {"d0": NULL}
    for level in range(1, 60):
        ref = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = closed({"a": ref, "b": ref}, "a")
    with pytest.raises(GrammarTooLarge, match="1,048,576"):
        schema_pattern({"$ref": "#/$defs/d59", "$defs": definitions})


def test_deep_nesting_is_refused() -> None:
    schema: dict[str, Any] = NULL
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarTooLarge, match="64 levels"):
        schema_pattern(schema)
