"""Schemas that go straight to the library: the same outputs as by our rules, and costs that are counted when needed."""

from __future__ import annotations

import json
import random
import re
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.grammar_walks import allowed, text_of

from asyncengine.errors import GrammarTooLarge
from asyncengine.grammar import Grammar
from asyncengine.grammar.json_limits import end_behind
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.schema.straight import MAX_SIZE, MAX_WIDTH
from asyncengine.grammar.vocabulary import Vocabulary

STRAIGHT: dict[str, Any] = {
    "open": {"properties": {"a": {"type": "string"}, "b": {"type": "number"}}, "required": ["a"]},
    "closed": {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 3},
            "k": {"enum": ["x", None, True]},
            "l": {"$ref": "#/$defs/l"},
        },
        "required": ["n", "l"],
        "additionalProperties": False,
        "$defs": {"l": {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 1, "maxItems": 3}},
    },
    "any": {},
    "patterns": {
        "type": "array",
        "items": {"anyOf": [{"pattern": "^a{2,4}(b|cd)*$", "minLength": 5}, {"format": "uuid"}]},
        "minItems": 2,
    },
    "tagged": {
        "oneOf": [
            {"properties": {"t": {"const": tag}, "v": {"enum": [1, 2.5][:1]}}, "required": ["t"], "type": "object"}
            for tag in ("é", "b")
        ]
    },
    "bounds of a fraction": {"type": ["number", "null"], "minimum": 0.5, "maximum": 20},
    "least fraction": {"type": "array", "items": {"type": "number", "minimum": 5}},
    "nested": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "parts": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "typed": {
        "type": "object",
        "anyOf": [{"$ref": "#/$defs/o"}],
        "$defs": {"o": {"type": "object", "required": ["k"]}},
    },
}
RULED: dict[str, Any] = {
    "branches that may both hold": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "a type beside a reference": {"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {"minLength": 3}}},
    "exclusive bounds of a fraction": {"type": "number", "exclusiveMinimum": 0.5},
    "fractions below zero": {"type": "number", "minimum": -1},
    "digits behind a largest fraction": {"type": "number", "minimum": 0, "maximum": 10.5},
    "a format that is shorter": {"format": "hostname", "maxLength": 10},
    "two choices": {"anyOf": [{"minimum": 5}], "oneOf": [{"type": "string"}, {"type": "integer"}]},
    "a key of control characters": {"properties": {"a\nb": {"type": "integer"}}},
    "a needed key that may not be": {"anyOf": [{"required": ["a"], "additionalProperties": False}, {"type": "null"}]},
    "too many members at one place for the library": {"properties": {f"p{index}": {} for index in range(MAX_WIDTH)}},
    "options": {"type": "string", "x-guidance": {"json_allowed_escapes": "n"}},
}


def ruled(backend: LlguidanceBackend, grammar: Grammar) -> LlgTemplate:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlgTemplate, "_go_straight", lambda *_: False)
        return backend.compile(grammar)


@pytest.mark.parametrize("name", STRAIGHT)
def test_masks_are_those_of_the_rules(name: str, backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    """Beside forced text, of which the library allows one token, and codes of control characters in undeclared keys."""
    grammar = Grammar.json_schema(STRAIGHT[name])
    templates = backend.compile(grammar), ruled(backend, grammar)
    assert [template.is_straight for template in templates] == [True, False]
    rng = random.Random(name)
    wanted = [
        token for text in ('"', "{", "[", "1", "e", "\\", "u", "0") if (token := vocabulary.by_bytes.get(text.encode()))
    ]
    for _ in range(8):
        states = [template.new_state() for template in templates]
        for _ in range(60):
            masks = np.zeros((2, vocabulary.mask_words), dtype=np.int32)
            for mask, state in zip(masks, states, strict=True):
                state.fill(mask)
            bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
            lacking = np.flatnonzero(bits[1] & ~bits[0]).tolist()
            assert all(re.search(rb"^u|\\u", vocabulary.token_bytes[token]) for token in lacking)
            assert bits[1].sum() == 1 or not (bits[0] & ~bits[1]).any()
            choices = np.flatnonzero(bits[1] & bits[0]).tolist()
            likely = [token for token in wanted if token in choices]
            token = rng.choice(likely if likely and rng.random() < 0.4 else choices)
            if token in vocabulary.eos_ids or not all(state.consume(token) for state in states):
                break


@pytest.mark.parametrize("name", RULED)
def test_what_the_library_reads_otherwise_is_written_as_rules(name: str, backend: LlguidanceBackend) -> None:
    assert not backend.compile(Grammar.json_schema(RULED[name])).is_straight


@pytest.mark.parametrize("name", STRAIGHT)
def test_the_bound_on_bytes_is_none_too_small(name: str, backend: LlguidanceBackend) -> None:
    template = backend.compile(Grammar.json_schema(STRAIGHT[name]))
    bound, closing = template.reach, template.new_closing()
    assert closing is not None
    assert closing._near <= bound or name in ("patterns", "least fraction")  # many are one shape


@pytest.mark.parametrize("name", STRAIGHT)
def test_costs_are_counted_on_the_way(name: str, backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    """An output that begins without them becomes what it would have been with them."""
    grammar = Grammar.json_schema(STRAIGHT[name])
    early = backend.compile(grammar)
    budget = early.far + 1
    assert early.min_tokens > 0
    for seed in range(3):
        late = backend.compile(grammar)
        one, other = Matcher(late, budget, "close"), Matcher(early, budget, "close")
        assert late.far
        rng, tokens = random.Random(seed), list[int]()
        while len(tokens) < budget and not one.is_terminated():
            choices = allowed(vocabulary, one)
            going_on = [token for token in choices.tolist() if token not in vocabulary.eos_ids] or choices.tolist()
            token = rng.choice(going_on)
            taken = one.accept(token)
            assert other.accept(token) == taken
            tokens += taken
        assert not late.far or len(tokens) < budget
        assert one.overrun() is None
        json.loads(text_of(vocabulary, tokens))


def test_bytes_that_are_no_tokens_are_counted_at_once(vocabulary: Vocabulary) -> None:
    """An output that needs one might have to end before that is known; a letter's first byte is needed by patterns."""
    table = [b"" if data == b"\xe2" else data for data in vocabulary.token_bytes]
    lacking = Vocabulary(table, vocabulary.eos_ids, vocabulary.special_ids, len(table), vocabulary.tokenize)
    backend = LlguidanceBackend(lacking)
    counted = [not backend.compile(Grammar.json_schema(STRAIGHT[name])).far for name in ("open", "patterns")]
    assert counted == [False, True]


def test_an_output_goes_on_whose_costs_cannot_be_counted(
    backend: LlguidanceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = backend.compile(Grammar.json_schema(STRAIGHT["open"]))
    matcher = Matcher(template, template.far + 1, "close")
    refuse = Mock(side_effect=GrammarTooLarge("grammar", "a schema must not exceed 20000 rules"))
    monkeypatch.setattr("asyncengine.grammar.llguidance_backend._rules_of", refuse)
    assert template.has_costs(0)
    assert not matcher.may_refuse()
    assert matcher.accept(backend.vocabulary.by_bytes[b"{"])[0] == backend.vocabulary.by_bytes[b"{"]


def test_the_largest_schemas_that_go_straight_can_be_counted(backend: LlguidanceBackend) -> None:
    inner = {"properties": {f"p{index}": {"type": ["string", "null"]} for index in range(30)}, "required": ["p0"]}
    properties = {f"p{index}": inner for index in range(MAX_SIZE // 64)}
    template = backend.compile(Grammar.json_schema({"properties": properties}))
    assert template.is_straight
    assert template.new_closing() is not None


@pytest.mark.parametrize(
    ("text", "token", "keeps"),
    [
        (b'{"a": 123456789', b"e", True),
        (b'{"a": 1234567890', b"e", False),
        (b"[1e2", b"9", True),
        (b"[1e3", b"9", True),
        (b"[1e30", b"9", False),
        (b"[" + b"1" * 307, b"1", True),
        (b"[" + b"1" * 308, b"1", False),
        (b'["1e30', b"9", True),
        (b'{"a": {"b": [{}]}, "\\', b"u0061", False),
        (b'{"a": {"b": [{}]}, "\\\\', b"u0061", True),
        (b'{"a": [1, "', b"\\u001f", True),
        (b'{"a": [1], "', b"\\u001f", False),
        (b'{"a": "', b'","\\u0061', False),
    ],
)
def test_limits_of_numbers_and_keys(text: bytes, token: bytes, keeps: bool) -> None:
    end: bytes | None = b""
    for byte in text:
        assert end is not None
        end = end_behind(end, bytes([byte]))
    assert end is not None
    assert end_behind(b"", text) == end
    assert (end_behind(end, token) is not None) == keeps


def test_no_bracket_is_opened_beyond_those_of_a_schema(backend: LlguidanceBackend, vocabulary: Vocabulary) -> None:
    state = backend.compile(Grammar.json_schema({})).new_state()
    opens, mask = vocabulary.by_bytes[b"["], np.zeros(vocabulary.mask_words, dtype=np.int32)
    for depth in range(63):
        state.fill(mask)
        assert bool(mask.view(np.uint32)[opens // 32] >> (opens % 32) & 1) == (depth < 62), depth
        state.consume(opens)
    state.rollback(5)
    state.fill(mask)
    assert mask.view(np.uint32)[opens // 32] >> (opens % 32) & 1
