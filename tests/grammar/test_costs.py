"""Costs of schemas' rules by one fixpoint: recursion, formats, long lists, and what only the library knows."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from support.data import cases_of
from support.grammar_walks import text_of, walk
from support.small_grammars import closed

from asyncengine.errors import GrammarTooLarge
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.vocabulary import Vocabulary

STRING = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    **cases_of(__file__),
    "a long list of texts": closed({"e": {"enum": [f"option {i} of many" for i in range(400)]}}),
    "many required objects": closed({f"k{i}": closed({f"m{j}": STRING for j in range(6)}) for i in range(66)}),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_output_is_lost_from_the_stated_minimum_on(
    name: str, templates: dict[str, LlgTemplate], vocabulary: Vocabulary
) -> None:
    """The costs are known wherever the output goes."""
    template, least = templates[name], templates[name].min_tokens
    for seed in range(4 if least > 500 else 20):
        rng = random.Random(f"{name} {seed}")
        budget = least + rng.choice([0, 0, 1, 3, 9, 40])
        matcher = Matcher(template, budget, "close")
        tokens, _ = walk(vocabulary, matcher, budget, rng, jump=bool(seed % 2))
        assert len(tokens) <= budget
        assert matcher.overrun() is None
        assert matcher.closing is not None
        assert not matcher.closing.lost
        jsonschema.validate(json.loads(text_of(vocabulary, tokens)), SCHEMAS[name])


def test_the_shortest_output_of_a_recursion_is_found(templates: dict[str, LlgTemplate]) -> None:
    """`{"d":null}` would be as long: nothing of the recursive part is in it."""
    for name in ("a filter", "a filter that negates"):
        assert templates[name].min_tokens <= len(['{"', "d", '":', "true", "}"])


def test_a_recursive_part_is_begun_again_wherever_the_budget_allows_it(
    templates: dict[str, LlgTemplate], vocabulary: Vocabulary
) -> None:
    """Once the second item of a recursive list was never allowed, whatever the budget."""
    child = '{"id":"00000000-0000-0000-0000-000000000000","kids":[]}'
    text = child[:-2] + f"{child},{child},{child}]}}"
    matcher = Matcher(templates["a tree of identified things"], 300, "close")
    output = [taken for token in vocabulary.tokenize(text) for taken in matcher.accept(token, jump=False)]
    assert text_of(vocabulary, output) == text
    assert matcher.steered_from is None


def test_a_declared_key_is_not_read_as_another_one(templates: dict[str, LlgTemplate], vocabulary: Vocabulary) -> None:
    """Its value is 30 letters long, and that is what it costs."""
    template = templates["other keys beside long ones"]
    for key, steered in (("key", True), ("keys", True), ("ke", False), ("keyss", False), ("k\u00e9y", False)):
        matcher = Matcher(template, len(key.encode()) + 12, "close")
        for token in f'{{"{key}":"a'.encode():
            matcher.accept(token, jump=False)
            if matcher.steered_from is not None:
                break
        assert (matcher.steered_from is not None) == steered, key


def test_an_output_beyond_all_budgets_is_refused(vocabulary: Vocabulary) -> None:
    """Two of each kind in the next: 2**30 in the last."""
    kinds = {f"k{i}": {"type": "array", "items": {"$ref": f"#/$defs/k{i + 1}"}, "minItems": 2} for i in range(30)}
    schema = {"$defs": {**kinds, "k30": {"type": "null"}}, "$ref": "#/$defs/k0"}
    with pytest.raises(GrammarTooLarge, match="shortest output"):
        LlguidanceBackend(vocabulary).compile(Grammar.json_schema(schema))


def test_a_bound_costs_what_it_says_and_no_more(vocabulary: Vocabulary) -> None:
    """Texts that are cut into tokens when a schema is compiled: a bound once had all others looked at again."""

    def spelled(**more: Any) -> int:
        backend = LlguidanceBackend(vocabulary)
        properties = {**{f"p{i}": STRING for i in range(40)}, **more}
        backend.compile(Grammar.json_schema({"type": "object", "properties": properties}))
        return len(backend.speller.spellings)

    plain = spelled(a=STRING)
    assert spelled(a={"type": "string", "minLength": 1}) <= plain + 1
    assert spelled(a={"type": "string", "minLength": 9}) <= plain + 60  # the best unit is looked for, once
    assert spelled(**{f"a{i}": {"type": "string", "minLength": 9 + i} for i in range(20)}) <= plain + 60 + 20


def test_blanks_are_said_where_that_takes_fewer_tokens() -> None:
    """With a tokenizer that knows `": ` and not `":`, the shortest text is not the cheapest one."""
    pieces = [b'{"', b'": ', b', "', b"null", b"<eos>"]
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), *pieces], [260], [], 261)
    schema = closed({"a": {"type": "null"}, "b": {"type": "null"}})
    template = LlguidanceBackend(vocabulary).compile(Grammar.json_schema(schema))
    assert template.min_tokens == len(['{"', "a", '": ', "null", ', "', "b", '": ', "null", "}"])
