"""Schemas whose numbers we hold to ourselves: their rules mean what llguidance's would, and their numbers are exact."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from support.data import cases_of
from support.grammar_walks import text_of, walk
from support.long import LONG
from support.small_grammars import closed, shared_vocabulary
from support.tables import table

from asyncengine.errors import GrammarError, GrammarImpossible, GrammarTimeout, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlguidanceBackend, with_rules
from asyncengine.grammar.lower import OPTIONS, schema_object
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.schema.builder import Builder
from asyncengine.grammar.schema.members import MAX_EXCLUDED, Texts
from asyncengine.grammar.schema.terms import MAX_TERMS
from asyncengine.grammar.spec import canonical_json
from asyncengine.grammar.vocabulary import Vocabulary

from .corpus import compilable, invalid_texts, valid_texts
from .oracle import accepts, matcher, tokenizer
from .schema_check import Checker

ROWS: dict[str, Any] = cases_of(__file__)

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


def by_rules(schema: dict[str, Any]) -> Any:
    """A matcher of our rules for `schema`, whether its numbers need them or not."""
    from llguidance import LLMatcher, LLParserLimits

    lowered = schema_object(canonical_json(schema), False)
    rules, start = Builder(lowered, OPTIONS["flexible"]).build()
    text = LLMatcher.grammar_from_lark(rules.lark(start))
    return LLMatcher(tokenizer(), text, log_level=0, limits=LLParserLimits(verbose_errors=False))


def takes(found: Any, text: str) -> bool:
    found.reset()
    data = list(text.encode())
    taken = found.try_consume_tokens(data)
    assert not found.is_error(), found.get_error()
    return bool(taken == len(data) and found.is_accepting())


@pytest.mark.parametrize("part", range(0, 4, 1 if LONG else 2))
def test_our_rules_agree_with_the_corpus(part: int) -> None:
    """Half of it (all in the long form), with and without numbers: what surrounds a number is held to as llguidance's
    own compiler would."""
    wrong = []
    for case in compilable()[part::4]:
        found = by_rules(case.schema)
        assert not found.is_error(), (case.name, found.get_error())
        wrong += [(case.name, "refused", text) for text in valid_texts(case) if not takes(found, text)]
        wrong += [(case.name, "taken", text) for text in invalid_texts(case) if takes(found, text)]
    assert wrong == []


EXACT: list[tuple[dict[str, Any], list[str], list[str]]] = table(__file__, "exact numbers")


@pytest.mark.parametrize(("schema", "inside", "outside"), EXACT, ids=lambda value: str(value)[:50])
def test_numbers_are_exact(schema: dict[str, Any], inside: list[str], outside: list[str]) -> None:
    grammar = Grammar.json_schema(schema)
    assert [text for text in inside if not accepts(grammar, text)] == []
    assert [text for text in outside if accepts(grammar, text)] == []
    checker = Checker(schema)
    assert [text for text in inside if checker.text_fault(text)] == []


def test_multiples_left_to_the_library_are_exact() -> None:
    """Sevens and the like, whose automaton is llguidance's own; the bounds it gets are ours."""
    rng = random.Random(5)
    for step in (3, 7, 11, 12, 60, 77):
        low, high = sorted(rng.randrange(-40_000, 40_000) for _ in range(2))
        for bounds in (
            {"exclusiveMinimum": low},
            {"maximum": high},
            {"minimum": low * 2, "exclusiveMaximum": high * 2 + 1},
            {},
        ):
            schema = {"type": "integer", "multipleOf": step, **bounds}
            found = matcher(Grammar.json_schema(schema))
            assert not takes(found, "-0")
            least, most = bounds.get("exclusiveMinimum", bounds.get("minimum", -(10**15)) - 1), bounds.get("maximum")
            most = bounds.get("exclusiveMaximum", 10**15) - 1 if most is None else most
            near = [end + shift for end in (least, most, 0) if abs(end) < 10**6 for shift in range(-step - 1, step + 2)]
            wrong = [
                value
                for value in (*near, *(rng.randrange(-90_000, 90_000) for _ in range(50)))
                if takes(found, str(value)) != (least < value <= most and value % step == 0)
            ]
            assert wrong == [], schema


def test_an_empty_range_is_refused_with_its_bounds() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"type": "integer", "minimum": 6, "maximum": 5}, r"no whole number >= 6, <= 5 \(at /\)"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "no whole number > 1, < 2"),
        (closed({"a": {"type": "number", "minimum": 1, "exclusiveMaximum": 1}}), r">= 1, < 1.*/properties/a"),
        (
            {"allOf": [{"type": "integer", "minimum": 8}, {"maximum": 13, "multipleOf": 7}]},
            ">= 8, <= 13, a multiple of 7",
        ),
    ]
    for schema, says in cases:
        with pytest.raises(GrammarImpossible, match=says):
            with_rules(Grammar.json_schema(schema))[0]


def test_a_property_that_must_be_itself_is_impossible() -> None:
    endless = {**closed({"a": {"$ref": "#"}, "n": {"minimum": 1}})}
    with pytest.raises(GrammarImpossible):
        with_rules(Grammar.json_schema(endless))[0]


def test_a_repetition_of_nothing_is_refused() -> None:
    with pytest.raises(GrammarError, match="nothing to repeat"):
        with_rules(Grammar.json_schema({"patternProperties": {"+a": {}}}))


BOUNDED = {"type": "integer", "minimum": 1}


def test_what_cannot_be_written_is_refused_and_may_be_left_out() -> None:
    cases = [
        ({"type": "array", "items": BOUNDED, "uniqueItems": True}, ("uniqueItems", "/uniqueItems")),
        (closed({"a": BOUNDED, "b": {"not": {"multipleOf": 3}}}), ("not", "/properties/b/not")),
    ]
    for schema, feature in cases:
        with pytest.raises(GrammarUnsupported) as refused:
            with_rules(Grammar.json_schema(schema))[0]
        assert feature in refused.value.features
        lenient = Grammar.json_schema(schema, unsupported="ignore")
        assert not matcher(lenient).is_error()


def test_many_items_with_schemas_of_their_own() -> None:
    grammar = Grammar.json_schema({"type": "array", "prefixItems": [BOUNDED] * 120})
    assert accepts(grammar, "[1, 2]")
    assert not accepts(grammar, "[1, 0]")
    with pytest.raises(GrammarTooLarge, match="prefixItems"):
        with_rules(Grammar.json_schema({"type": "array", "prefixItems": [INT64] * 501}))[0]


@pytest.mark.parametrize(
    ("whitespace", "text"), [("compact", '{"a":1,"b":[2,3]}'), ("single_space", '{"a": 1, "b": [2, 3]}')]
)
def test_whitespace(whitespace: Any, text: str) -> None:
    schema = closed({"a": BOUNDED, "b": {"type": "array", "items": BOUNDED}})
    grammar = Grammar.json_schema(schema, whitespace=whitespace)
    assert accepts(grammar, text)
    assert not accepts(grammar, json.dumps(json.loads(text), indent=1))
    assert accepts(Grammar.json_schema(schema), json.dumps(json.loads(text), indent=4))
    for pattern, blank in (("", ""), (" ", " "), ("[ ]{2}", "  ")):
        own = Grammar.json_schema({**schema, "x-guidance": {"whitespace_pattern": pattern}})
        assert accepts(own, f'{{"a":{blank}1,{blank}"b":[2]}}')
        assert not accepts(own, f'{{"a":{blank} 1,"b":[2]}}')


def test_conjunctions_that_explode_are_refused_in_time() -> None:
    either = [{"anyOf": [{"minimum": index}, {"maximum": -index}]} for index in range(1, 20)]
    with pytest.raises(GrammarTooLarge):
        with_rules(Grammar.json_schema({"type": "integer", "allOf": either}))[0]
    dead = {"allOf": [{"anyOf": [{"maximum": index} for index in range(50)]}] * 2 + [False]}
    many = {f"p{index}": {"$ref": "#/$defs/dead", "minLength": 1} for index in range(1000)}
    with pytest.raises(GrammarTooLarge, match="200000 combinations"):
        Builder({"type": "object", "properties": many, "$defs": {"dead": dead}}, OPTIONS["compact"]).build()


STEERED: dict[str, dict[str, Any]] = table(__file__, "steered numbers")


@pytest.mark.parametrize("name", STEERED)
def test_a_number_is_completed_within_any_budget(name: str, vocabulary: Vocabulary) -> None:
    schema = STEERED[name]
    template = LlguidanceBackend(vocabulary).compile(Grammar.json_schema(schema))
    checker = Checker(schema)
    for extra in (0, 1, 3, 8):
        budget = template.min_tokens + extra
        for seed in range(2):
            tokens, _ = walk(vocabulary, Matcher(template, budget, "close"), budget, random.Random(seed))
            fault = checker.text_fault(text_of(vocabulary, tokens))
            assert fault is None, (budget, seed, fault)


def test_the_errors_of_malformed_numbers_are_typed() -> None:
    for schema in ({"multipleOf": 0}, {"multipleOf": -3}, {"minimum": 10**450}, {"minimum": [1]}, {"const": 10**450}):
        with pytest.raises(GrammarError):
            LlguidanceBackend(shared_vocabulary()).compile(Grammar.json_schema(schema))


@pytest.mark.parametrize("schema", ROWS["a_schema_may_speak_of_the_character_nul"])
def test_a_schema_may_speak_of_the_character_nul(schema: dict[str, Any]) -> None:
    for value in ("a\0b", "ab", "\0", "x", "/a", "/a\0", {"k\0": 1}, {"k": 1}):
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert accepts(Grammar.json_schema(schema), json.dumps(value)) == valid, value


class Counted(str):
    """A string that counts how often it is compared."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return str.__eq__(self, other)


def test_each_listed_value_is_looked_up_and_not_searched_for() -> None:
    values = [Counted(f"v{index}") for index in range(2000)]
    texts = Texts([{"enum": values}, {"enum": values[::-1]}], [{"enum": values[::2]}], "")
    Counted.comparisons = 0
    assert texts.listed == values[1::2]
    assert Counted.comparisons < 20 * len(values), "searching would take a thousand comparisons for each"


def test_more_excluded_values_than_the_library_takes_in_time_are_refused() -> None:
    schema = {"type": "string", "not": {"enum": [f"{index:x}" for index in range(MAX_EXCLUDED + 1)]}}
    with pytest.raises(GrammarTooLarge, match=f"must not exceed {MAX_EXCLUDED}"):
        Builder(schema, OPTIONS["flexible"]).build()


def test_a_conjunction_of_too_many_choices_is_refused_before_all_are_made() -> None:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    pairs = [{"anyOf": [{"required": [f"a{index}"]}, {"required": [f"b{index}"]}]} for index in range(20)]
    with pytest.raises(GrammarTooLarge, match=f"must not exceed {MAX_TERMS} alternatives"):
        Builder({"allOf": pairs}, OPTIONS["flexible"], count).build()
    assert MAX_TERMS < calls < 16 * MAX_TERMS


def test_work_that_nobody_waits_for_is_given_up() -> None:
    def give_up() -> None:
        raise GrammarTimeout("grammar", "given up")

    with pytest.raises(GrammarTimeout, match="given up"):
        Builder({"type": "integer"}, OPTIONS["flexible"], give_up).build()
