"""Every keyword against `jsonschema`, in both directions: what is taken is valid, and what is valid is taken, in one
order of its keys at least. And with any budget from the stated minimum on, an output is complete and valid."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.grammar_walks import text_of, walk
from support.long import TIMES
from support.tables import table

from asyncengine.errors import GrammarImpossible, GrammarUnsupported
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlguidanceBackend, with_rules
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.vocabulary import Vocabulary

from .oracle import accepts

SCHEMAS = 240 * TIMES
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 1.5, -1, "", "a", "b", "ab", "aa", "abc", [], [1], ["a"], [1, 1], [1, 2], [2, 1],
    ["a", 1], ["a", "b"], ["b", "a"], ["a", "a"], [1, 2, 3], [None], [[1]], {}, {"abc": 1}, {"a": [1]},
]  # fmt: skip
for value in (1, "a", None):
    VALUES += [{"a": value}, {"b": value}, {"c": value}]
    for other in (1, "b"):
        VALUES += [{"a": value, "b": other}, {"a": value, "c": other}, {"b": value, "c": other}]
        VALUES.append({"a": value, "b": other, "c": 1})


def wrong(schema: dict[str, Any]) -> list[tuple[Any, str]]:
    """Values that are taken or refused against `schema`."""
    grammar, validator = Grammar.json_schema(schema), Draft202012Validator(schema)
    found = []
    for value in VALUES:
        orders = map(dict, itertools.permutations(value.items())) if isinstance(value, dict) else [value]
        taken = any(accepts(grammar, json.dumps(order)) for order in orders)
        if taken != validator.is_valid(value):
            found.append((value, "taken" if taken else "refused"))
    return found


OBJECTS: dict[str, dict[str, Any]] = table(__file__, "objects")
OTHERS: dict[str, dict[str, Any]] = table(__file__, "others")


@pytest.mark.parametrize("name", [*OBJECTS, *OTHERS])
def test_it_means_what_json_schema_says(name: str) -> None:
    assert wrong({**OBJECTS, **OTHERS}[name]) == []


@pytest.mark.parametrize("name", [*OBJECTS, *OTHERS])
def test_it_is_completed_within_any_budget_from_that_of_a_short_value_on(name: str, vocabulary: Vocabulary) -> None:
    """One letter of a set stands for all of them, so that another value may be a token less than the stated minimum."""
    schema = {**OBJECTS, **OTHERS}[name]
    template = LlguidanceBackend(vocabulary).compile(Grammar.json_schema(schema))
    validator = Draft202012Validator(schema)
    texts = [json.dumps(value, separators=(",", ":")) for value in VALUES if validator.is_valid(value)]
    assert template.min_tokens <= min(len(vocabulary.tokenize(text)) for text in texts) + 1
    for extra in (0, 1, 2, 5, 30):
        budget = template.min_tokens + extra
        for seed in range(3):
            tokens, _ = walk(vocabulary, Matcher(template, budget, "close"), budget, random.Random(seed))
            text = text_of(vocabulary, tokens)
            assert validator.is_valid(json.loads(text)), (budget, seed, text)


def scalar_schema(rng: random.Random) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": rng.choice(["string", "integer", "number", "null", "array", "object", ["string", "null"], "boolean"])},
        {"enum": rng.sample([None, True, 0, 1, 1.5, "a", "b", [1], {"a": 1}], rng.randrange(1, 4))},
        {"const": rng.choice([1, "a", None, False, [1, 2], {"a": 1, "b": 1}])},
        {rng.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]): rng.randrange(-1, 3)},
        {rng.choice(["minLength", "maxLength", "minItems", "maxItems", "minProperties"]): rng.randrange(3)},
        {"pattern": rng.choice(["^a", "b$", "^(a|b)$", "^[ab]+$"])},
        {"required": rng.sample("abc", rng.randrange(1, 3))},
    ]
    return rng.choice(kinds)


def random_schema(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.05:
        return rng.choice([True, False, {}])
    if not depth or rng.random() < 0.4:
        return scalar_schema(rng)
    below = [random_schema(rng, depth - 1) for _ in range(3)]
    some = below[: rng.randrange(1, 4)]
    members = dict(zip(sorted(rng.sample("abc", 2)), below, strict=False))
    kinds: list[dict[str, Any]] = [
        {"type": "object", "properties": members, "required": rng.sample("abc", 1)},
        {"properties": members, "additionalProperties": rng.choice([False, {"type": "integer"}])},
        {"properties": members, rng.choice(["minProperties", "maxProperties"]): rng.randrange(3)},
        {"type": "array", "items": below[0], rng.choice(["minItems", "maxItems"]): rng.randrange(3)},
        {"prefixItems": below[:1], "items": below[1]},
        {rng.choice(["anyOf", "allOf", "oneOf"]): some},
        {"not": below[0]},
        {"if": below[0], "then": below[1], **({"else": below[2]} if rng.random() < 0.6 else {})},
        {"dependentSchemas": {"a": below[0]}, "dependentRequired": {"b": ["c"]}},
        {"propertyNames": rng.choice([{"enum": ["a", "b"]}, {"pattern": "^[ab]$"}, {"not": {"const": "a"}}])},
        {"patternProperties": {"^[ab]$": below[0], "^a": below[1]}},
        {"unevaluatedProperties": False, "properties": members, "allOf": below[:1]},
        {"contains": below[0], "minContains": rng.randrange(3), **({"maxContains": 1} if rng.random() < 0.5 else {})},
    ]
    return rng.choice(kinds)


def test_random_schemas_are_exact_or_refused_by_name() -> None:
    compiled, refused = 0, []
    for seed in range(SCHEMAS):
        rng = random.Random(seed)
        schema = random_schema(rng, 2)
        if not isinstance(schema, dict):
            continue
        if seed % 3 == 2:
            schema = {"oneOf": [schema, random_schema(rng, 1)]}
        schema = {**scalar_schema(rng), **schema} if seed % 2 else schema
        try:
            with_rules(Grammar.json_schema(schema))[0]
        except GrammarImpossible:
            assert not any(map(Draft202012Validator(schema).is_valid, VALUES)), schema
        except GrammarUnsupported as error:
            refused.append(error.features)
        else:
            compiled += 1
            assert wrong(schema) == [], schema
    assert compiled > SCHEMAS * 3 // 5
    assert all(refused)
