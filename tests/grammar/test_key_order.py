"""Keys in any order: what is taken and what is written is what `jsonschema` says, and no declared key comes twice."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from support.grammar_walks import text_of, walk

from asyncengine.errors import GrammarError, InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.grammar.chat.schemas import response_grammar
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.schema.rules import MAX_KEYS
from asyncengine.grammar.vocabulary import Vocabulary

from .oracle import accepts, complaint, matcher

SCALARS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 0}, {"type": "boolean"}, {"enum": ["x", None]}, {"type": "string", "maxLength": 2},
]  # fmt: skip
NAMES = ("a", "b", "cc", 'd"e', "f")
VALUES = (0, -1, True, None, "x", "yy", "zzz", 1.5)


def schema_of(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(SCALARS)
    if rng.random() < 0.2:
        return {"type": "array", "items": schema_of(rng, depth - 1), "maxItems": 2}
    names = rng.sample(NAMES, rng.randrange(1, 5))
    made: dict[str, Any] = {"type": "object", "properties": {name: schema_of(rng, depth - 1) for name in names}}
    made["required"] = rng.sample(NAMES, rng.randrange(3)) if rng.random() < 0.3 else rng.sample(names, len(names) // 2)
    made["additionalProperties"] = rng.choice([True, False, rng.choice(SCALARS), {"$ref": "#"}])
    if rng.random() < 0.2:
        made["patternProperties"] = {"^f": {"type": "integer"}}
    elif rng.random() < 0.2:  # of closed ones: an undeclared key may come twice, which is a known limit
        made |= {"minProperties": rng.randrange(3), "additionalProperties": False}
    return made


def instance_of(rng: random.Random, schema: Any, depth: int) -> Any:
    """An instance of the schema, mostly valid; keys in random order."""
    if not isinstance(schema, dict) or depth == 0 or rng.random() < 0.05:
        return rng.choice(VALUES)
    if schema.get("type") == "array":
        return [instance_of(rng, schema["items"], depth - 1) for _ in range(rng.randrange(3))]
    if schema.get("type") == "object":
        found = [name for name in schema["properties"] if name in schema["required"] or rng.random() < 0.5]
        found += [name for name in (*schema["required"], "other", "g") if name not in found and rng.random() < 0.5]
        rng.shuffle(found)
        return {name: instance_of(rng, schema["properties"].get(name), depth - 1) for name in found}
    if "enum" in schema:
        return rng.choice(schema["enum"])
    return {"integer": rng.randrange(30), "boolean": True, "string": rng.choice(["", "ab"])}[schema["type"]]


def names_of(text: str) -> list[str]:
    """The keys of the outermost object, repeated ones as well."""
    pairs: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
    return [name for name, _ in pairs]


def objects(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    while True:
        made = schema_of(rng, 3)
        if made.get("type") == "object" and not complaint(Grammar.json_schema(made, key_order="any")):
            return made


@pytest.mark.parametrize("part", range(4))
def test_what_is_taken_is_what_is_valid(part: int) -> None:
    seen = {True: 0, False: 0}
    for seed in range(part, 60, 4):
        schema = objects(seed)
        rng, validator = random.Random(seed), jsonschema.Draft202012Validator(schema)
        grammar = Grammar.json_schema(schema, key_order="any")
        for _ in range(60):
            instance = instance_of(rng, schema, 4)
            valid = validator.is_valid(instance)
            taken = accepts(grammar, json.dumps(instance))
            seen[valid] += 1
            assert taken == valid or (valid and "minProperties" in json.dumps(schema)), (schema, instance)
    assert min(seen.values()) > 60


def test_the_order_is_free_where_it_is_asked_for_only() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"$ref": "#"}}, "required": ["a"]}
    free, kept = Grammar.json_schema(schema, key_order="any"), Grammar.json_schema(schema)
    assert kept != free
    assert kept.key != free.key
    turned = '{"z": 1, "b": {"y": 2, "a": 3}, "a": 1}'
    assert accepts(free, turned)
    assert not accepts(kept, turned)
    for twice in ('{"a": 1, "a": 1}', '{"a": 1, "b": {"a": 1}, "b": {"a": 1}}', '{"a": 1, "b": {"a": 1, "a": 1}}'):
        assert not accepts(free, twice)
    assert accepts(Grammar.json_schema({**schema, "x-guidance": {"key_order": "any"}}), turned)


@pytest.mark.parametrize("count", [MAX_KEYS, MAX_KEYS + 1])
def test_more_keys_than_there_are_bits_keep_the_order(count: int) -> None:
    names = [f"k{index}" for index in range(count)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": names}
    grammar = Grammar.json_schema(schema, key_order="any")
    whole: dict[str, Any] = dict.fromkeys(names)
    assert accepts(grammar, json.dumps(whole))
    assert accepts(grammar, json.dumps(dict(reversed(whole.items())))) == (count <= MAX_KEYS)
    assert not accepts(grammar, json.dumps(dict.fromkeys(names[1:])))


@pytest.mark.parametrize("seed", range(20))
def test_every_budget_from_the_least_on_ends_in_a_valid_output(vocabulary: Vocabulary, seed: int) -> None:
    schema = objects(seed)
    validator = jsonschema.Draft202012Validator(schema)
    template = LlguidanceBackend(vocabulary).compile(Grammar.json_schema(schema, key_order="any"))
    rng = random.Random(seed)
    for budget in (*range(template.min_tokens, template.min_tokens + 8), 2 * template.min_tokens, 120):
        output = Matcher(template, budget, "close")
        tokens, _ = walk(vocabulary, output, budget, rng, jump=bool(budget % 2))
        assert len(tokens) <= budget
        text = text_of(vocabulary, tokens)
        assert validator.is_valid(json.loads(text)), text
        for declared in validator.schema["properties"]:
            assert names_of(text).count(declared) <= 1, text


def test_the_least_budget_does_not_depend_on_the_order(vocabulary: Vocabulary) -> None:
    backend = LlguidanceBackend(vocabulary)
    for seed in range(20):
        schema = objects(seed)
        found = []
        for order in ("schema", "any"):
            template = backend.compile(Grammar.json_schema(schema, key_order=order))  # type: ignore[arg-type]
            found.append(template.min_tokens)
        assert found[0] == found[1], schema


def test_a_response_format_and_tools_may_ask_for_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["a", "b"]}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "key_order": "any"}}
    grammar = response_grammar(asked)
    assert grammar is not None
    assert Grammar.of(asked).key_order == "any"
    assert accepts(grammar, '{"b": null, "a": null}')
    tool = {"name": "f", "parameters": schema}
    calls = Grammar.tool_calls([tool], parallel=False, key_order="any")
    assert accepts(calls, '{"arguments": {"b": null, "a": null}, "name": "f"}')
    tags = Grammar.structural_tags([{"begin": "<", "grammar": grammar, "end": ">"}])
    assert accepts(tags, '<{"b": null, "a": null}>')


def test_another_order_is_refused_by_name() -> None:
    with pytest.raises(GrammarError, match="key_order"):
        Grammar.json_schema({}, key_order="sorted")  # type: ignore[arg-type]
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "key_order": "sorted"}}
    with pytest.raises(InvalidParameter, match="key_order"):
        response_grammar(asked)


def test_no_comma_follows_the_last_member_that_there_can_be() -> None:
    """A model could take it, and there would be no way on: the output was lost."""
    schema = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
    closed = {**schema, "additionalProperties": False}
    for kind, comma in ((closed, False), (schema, True)):
        found = matcher(Grammar.json_schema(kind, key_order="any"))
        begun = list(b'{"b":null,"a":null,')
        assert (found.try_consume_tokens(begun) == len(begun)) == comma
    few = matcher(Grammar.json_schema({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}))
    assert few.try_consume_tokens(list(b'["b","a",')) == len(b'["b","a"')
