"""Budget-aware closing: whatever the model samples, an output that runs out of budget is complete (contract 15)."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from support.data import cases_of
from support.grammar_walks import text_of, walk
from support.small_grammars import PERSON, closed
from support.small_vocabulary import EOS
from support.tables import table

from asyncengine.errors import GrammarImpossible, GrammarTooLarge
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.vocabulary import Vocabulary

ROWS: dict[str, Any] = cases_of(__file__)

OPTIONAL = closed({"xx": {"type": "string"}, "yy": PERSON})
NUMBERS = closed({"a": {"type": "number", "minimum": 950, "maximum": 1050}, "b": {"type": "integer", "multipleOf": 7}})
SCHEMAS: dict[str, dict[str, Any]] = table(__file__, "closing")


def matcher(template: LlgTemplate, budget: int) -> Matcher:
    return Matcher(template, budget, "close")


WISHES: list[tuple[dict[str, Any], str, str, bool]] = table(__file__, "wishes")


@pytest.mark.parametrize(("schema", "text", "wish", "own"), WISHES)
def test_an_output_is_not_the_models_own_where_the_engine_chose(
    schema: dict[str, Any], text: str, wish: str, own: bool, vocabulary: Vocabulary
) -> None:
    """With one token left the wish is refused. The engine's token is the model's own if nothing but blanks could have
    stood in its place: a list, a number or an optional key might have gone on."""
    output = matcher(LlguidanceBackend(vocabulary).compile(Grammar.json_schema(schema)), len(text) + 1)
    for byte in text.encode():
        assert output.accept(byte, False) == [byte]
    sampled = vocabulary.by_bytes[wish.encode()]
    [taken] = output.accept(sampled, False)
    assert taken != sampled
    assert output.is_terminated()
    assert output.steered_from == (None if own else len(text))


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_budget_ends_in_a_valid_instance(
    name: str, templates: dict[str, LlgTemplate], vocabulary: Vocabulary
) -> None:
    template, rng = templates[name], random.Random(name)
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    least = template.min_tokens
    steered = 0
    for budget in [*range(least, least + 12), *(rng.randrange(least, least + 200) for _ in range(12))]:
        output = matcher(template, budget)
        tokens, _ = walk(vocabulary, output, budget, rng, jump=bool(budget % 2), offers=bool(budget % 3))
        assert len(tokens) <= budget
        validator.validate(json.loads(text_of(vocabulary, tokens)))
        steered += output.steered_from is not None
    assert steered or name in ("enum", "numbers"), "some walk must have been cut short"


def test_a_known_end_is_still_known_when_its_beginning_was_left(templates: dict[str, LlgTemplate]) -> None:
    """Each point of the address might begin the end of the pattern, and does not."""
    text = b'"https://images-fe.example.com/a.x._b._SL1'
    output = matcher(templates["format and pattern"], len(text) + 20)
    for byte in text:
        assert output.accept(byte, False) == [byte]
    assert not output.is_terminated()


def test_the_least_budget_is_the_number_of_tokens_of_the_shortest_output(templates: dict[str, LlgTemplate]) -> None:
    assert templates["enum"].min_tokens == 1  # null
    assert templates["any"].min_tokens == 1
    assert templates["object"].min_tokens == 1  # {}
    assert templates["tree"].min_tokens == len(['{"', "v", '":', "0", ",", '"', "c", '":', "[]", "}"])
    assert templates["long string"].min_tokens < 40  # "the" and "name" take several letters at once


def test_an_output_that_may_end_is_ended_by_an_end_of_sequence(vocabulary: Vocabulary) -> None:
    """The sampled token would need more than is left; the output is complete as it is."""
    template = LlguidanceBackend(vocabulary).compile(Grammar.regex("a(bbbbbbbb)?"))
    output = matcher(template, 2)
    assert output.accept(ord("a")) == [ord("a")]
    assert output.accept(ord("b")) == [EOS]
    assert output.steered_from is not None
    assert output.is_terminated()


def test_without_steering_an_output_is_what_was_sampled(
    templates: dict[str, LlgTemplate], vocabulary: Vocabulary
) -> None:
    """A budget that never gets tight changes nothing: the same samples give the same output with and without."""
    for name in ("person", "tree", "optional"):
        template = templates[name]
        outputs = []
        for on_budget in ("close", "truncate"):
            output = Matcher(template, 3000, on_budget)
            outputs.append(walk(vocabulary, output, 120, random.Random(5), jump=False))
            assert output.steered_from is None
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.lark('start: "a" start'),
        Grammar.lark("start: /[ab]/ start"),
        Grammar.json_schema({"$ref": "#"}),
        Grammar.json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
    ],
    ids=["forced for ever", "free for ever", "itself", "needs itself", "empty range"],
)
def test_a_grammar_without_any_output_is_refused(vocabulary: Vocabulary, grammar: Grammar) -> None:
    with pytest.raises((GrammarImpossible, GrammarTooLarge)):
        LlguidanceBackend(vocabulary).compile(grammar)


@pytest.mark.parametrize(("lark", "needed"), ROWS["free_text_ends_where_the_grammar_needs_it_to"])
def test_free_text_ends_where_the_grammar_needs_it_to(vocabulary: Vocabulary, lark: str, needed: int) -> None:
    template = LlguidanceBackend(vocabulary).compile(Grammar.lark(lark))
    assert template.min_tokens <= needed
    rng = random.Random(1)
    for budget in range(template.min_tokens, 30):
        output = matcher(template, budget)
        tokens, ended = walk(vocabulary, output, budget, rng)
        assert ended
        assert len(tokens) <= budget
