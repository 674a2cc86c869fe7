"""`oneOf` means what JSON Schema says, whether its branches exclude one another or not. Random branches are in
`test_schema_keywords`."""

from __future__ import annotations

import itertools
import json
import random
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field, RootModel
from support.small_grammars import closed
from support.tables import table

from asyncengine.errors import GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar import Grammar
from asyncengine.grammar.schema.members import hitting_sets

from .oracle import accepts, complaint, matcher

APART: dict[str, dict[str, Any]] = table(__file__, "branches apart")
TOGETHER: dict[str, dict[str, Any]] = table(__file__, "branches together")
VALUES: list[Any] = [
    None, True, 0, 1, 2, 1.5, "", "a", "b", "ab", [], [1], ["a"], ["a", 1], [1, "a"], {}, {"t": "a"}, {"t": "b"},
    {"t": "c"}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": 1, "c": 2}, {"t": {"t": "a"}}, {"t": {"t": "b"}}, {"c": 1},
]  # fmt: skip


def wrong(schema: dict[str, Any]) -> list[Any]:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator, grammar = kind(schema), Grammar.json_schema(schema)
    return [value for value in VALUES if accepts(grammar, json.dumps(value)) != validator.is_valid(value)]


@pytest.mark.parametrize("name", APART)
def test_branches_that_exclude_one_another(name: str) -> None:
    assert complaint(Grammar.json_schema(APART[name])) == ""
    assert wrong(APART[name]) == []


@pytest.mark.parametrize("name", TOGETHER)
def test_branches_that_may_hold_together_are_taken_without_one_another(name: str) -> None:
    assert wrong(TOGETHER[name]) == []


def test_what_cannot_be_subtracted_is_refused_with_the_place() -> None:
    multiples = {"oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}]}
    with pytest.raises(GrammarUnsupported, match="needs the opposite of multipleOf") as refused:
        matcher(Grammar.json_schema({"properties": {"a": multiples}}))
    assert refused.value.features == (("oneOf", "/properties/a/oneOf"),)
    many = {"oneOf": [{"type": "object", "properties": {"a": {"minimum": bound}}} for bound in range(20)]}
    with pytest.raises(GrammarUnsupported, match="branches 0 and 13 may both hold"):
        matcher(Grammar.json_schema(many))


class Leaf(BaseModel):
    type: Literal["leaf"] = "leaf"
    value: int


class And(BaseModel):
    type: Literal["and"] = "and"
    parts: list[Annotated[And | Leaf, Field(discriminator="type")]]


class Tree(RootModel[Annotated[And | Leaf, Field(discriminator="type")]]):
    """A recursive discriminated union."""


def test_a_recursive_discriminated_union_of_pydantic() -> None:
    grammar = Grammar.json_schema(Tree)
    tree = {"type": "and", "parts": [{"type": "leaf", "value": 3}, {"type": "and", "parts": []}]}
    assert accepts(grammar, json.dumps(tree))
    Tree.model_validate(tree)
    for text in ('{"type": "or", "parts": []}', '{"type": "leaf", "parts": []}', '{"type": "and", "value": 3}', "{}"):
        assert not accepts(grammar, text)


def test_many_closed_objects_that_share_members() -> None:
    """Members of a branch that ten others lack are said in the fewest ways: all of them would be 5^10 alternatives."""
    names = "abcdefghijk"
    branches = [closed({"type": {"const": name}, "label": {}, "size": {}, name: {}}, ["type"]) for name in names]
    loose = [closed({"label": {}, "size": {}, name: {}}, ["label"]) for name in names]
    for schema in ({"oneOf": branches}, {"oneOf": loose}):
        grammar = Grammar.json_schema(schema)
        for value in (
            {"type": "a", "label": 1, "a": 2}, {"type": "a", "label": 1, "b": 2}, {"label": 1}, {"label": 1, "c": 0},
            {"label": 1, "size": 2, "k": 0}, {"label": 1, "a": 0, "b": 0}, {"size": 1, "c": 0}, {"type": "z"},
        ):  # fmt: skip
            valid = jsonschema.Draft202012Validator(schema).is_valid(value)
            assert accepts(grammar, json.dumps(value)) == valid, value


def test_the_least_sets_that_have_one_of_each() -> None:
    rng = random.Random(5)
    for _ in range(200):
        keys = "abcdef"[: rng.randint(1, 6)]
        choices = [rng.sample(keys, rng.randint(1, len(keys))) for _ in range(rng.randint(0, 5))]
        sets = [frozenset(found) for size in range(len(keys) + 1) for found in itertools.combinations(keys, size)]
        having = [found for found in sets if all(not found.isdisjoint(one) for one in choices)]
        least = {found for found in having if not any(other < found for other in having)}
        found = hitting_sets(choices)
        assert set(found) == least
        assert len(found) == len(least)
    with pytest.raises(GrammarTooLarge, match="256 ways"):
        hitting_sets([[f"{index}{side}" for side in "ab"] for index in range(9)])


def test_sets_come_in_the_order_of_the_choices_whatever_the_seed_of_hashes():
    pairs = [{"a", "c"}, {"a", "d"}, {"a", "e"}, {"b", "c"}, {"b", "d"}, {"b", "e"}]
    assert hitting_sets([["a", "b", None], ["c", "d", "e", None]]) == [{None}, *pairs]
