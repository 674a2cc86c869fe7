"""A library's complaint becomes a typed error that names the keyword and its place."""

from __future__ import annotations

from typing import Any

import pytest
from support.data import cases_of
from support.tables import table

from asyncengine.errors import GrammarError, GrammarImpossible, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar import Grammar
from asyncengine.grammar.complaints import explain, summary
from asyncengine.grammar.llguidance_backend import with_rules

from .oracle import accepts, matcher

ROWS: dict[str, Any] = cases_of(__file__)


def explained(grammar: Grammar) -> GrammarError:
    try:
        message = str(matcher(grammar).get_error())
    except GrammarError as error:
        return error
    assert message, "the library refuses it"
    return explain(grammar, message)


UNSUPPORTED: list[tuple[Any, list[list[str]]]] = table(__file__, "unsupported")


@pytest.mark.parametrize(("schema", "features"), UNSUPPORTED, ids=[str(schema)[:60] for schema, _ in UNSUPPORTED])
def test_unsupported_keywords_are_named_with_their_place(schema: Any, features: list[list[str]]) -> None:
    error = explained(Grammar.json_schema(schema))
    assert isinstance(error, GrammarUnsupported)
    assert [[*feature] for feature in error.features] == features
    for keyword, pointer in features:
        assert f"{keyword!r} at {pointer}" in str(error)


@pytest.mark.parametrize(("schema", "advice"), ROWS["what_is_refused_says_what_to_write_instead"])
def test_what_is_refused_says_what_to_write_instead(schema: Any, advice: str) -> None:
    with pytest.raises(GrammarUnsupported) as refused:
        raise explained(Grammar.json_schema(schema))
    assert advice in str(refused.value)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "required": [["a"]]}, "required at / must be a list of names"),
        ({"properties": {"a": {"dependentRequired": {"b": [1]}}}}, "b at /properties/a must be a list of names"),
        ({"type": "string", "format": ["date"]}, "format at / must be a string"),
        ({"type": "string", "minLength": None}, "minLength at / must be a whole number"),
        ({"type": 7, "format": "x"}, "/type is none of JSON's, got 7"),
        (
            {"properties": {"a": -1}, "required": ["a"], "dependentRequired": {"a": ["b"]}},
            "the schema at /properties/a must be an object",
        ),
    ],
)
def test_what_is_no_schema_is_refused_by_its_place(schema: Any, message: str) -> None:
    assert message in str(explained(Grammar.json_schema(schema)))


def test_no_place_in_a_text_of_ours_is_named() -> None:
    """A schema's pattern is compiled as a part of Lark that its author has not seen."""
    message = 'at 7(14): invalid regex "a{9}{9}" (in regex): no such thing\n'
    assert "7(14)" not in str(explain(Grammar.json_schema({"type": "string"}), message))
    assert "7(14)" in str(explain(Grammar.lark("start: /a/"), message))


def test_schemas_inside_lark_are_searched_too() -> None:
    error = explained(Grammar.lark('start: %json {"type": "integer"} | %json {"items": {"not": {"multipleOf": 3}}}\n'))
    assert isinstance(error, GrammarUnsupported)
    assert error.features == (("not", "/items/not"),)
    look = explained(Grammar("regex", "(?<=a)b"))
    assert isinstance(look, GrammarUnsupported)


@pytest.mark.parametrize("schema", ROWS["contradictions_are_impossible"])
def test_contradictions_are_impossible(schema: Any) -> None:
    error = explained(Grammar.json_schema(schema))
    assert isinstance(error, GrammarImpossible)
    assert "And (" not in str(error)


def test_a_loop_without_end_is_impossible() -> None:
    """The loop compiles in Lark; the complaint comes with the first mask, and with a dump of the parser's state."""
    with pytest.raises(GrammarImpossible):
        with_rules(Grammar.json_schema({"$ref": "#"}))[0]
    grammar = Grammar.lark("start: a\na: start\n")
    found = matcher(grammar)
    found.compute_bitmask()
    error = explain(grammar, found.get_error())
    assert isinstance(error, GrammarImpossible)
    assert len(str(error)) < 300


def test_too_large() -> None:
    wide = [{"anyOf": [{"properties": {f"k{i}": {}}}, {"properties": {f"j{i}": {}}}]} for i in range(14)]
    lark = "start: A\nA: " + " & ".join(f"/(?s:.*)a(?s:.{{{i}}})/" for i in range(20, 28)) + "\n"
    for grammar in (
        Grammar.json_schema({"type": "object", "allOf": wide}),
        Grammar.lark(lark),
        Grammar("regex", "(" * 300 + "a" + ")" * 300),
    ):
        error = explained(grammar)
        assert isinstance(error, GrammarTooLarge)
        assert len(str(error)) < 400
    panic = (
        "panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10\n<backtrace>\n 0: ...\n</backtrace>"
    )
    error = explain(Grammar.json_object(), panic)
    assert isinstance(error, GrammarTooLarge)
    assert "backtrace" not in str(error)


@pytest.mark.parametrize(("schema", "said"), ROWS["malformed_schemas_are_plain_errors_that_say_where"])
def test_malformed_schemas_are_plain_errors_that_say_where(schema: Any, said: str) -> None:
    error = explained(Grammar.json_schema(schema))
    assert type(error) is GrammarError
    assert error.field == "grammar"
    assert said in str(error)


def test_messages_are_bounded() -> None:
    assert len(summary("x" * 10_000)) <= 240
    assert summary("") == "no reason given"
    assert summary("a\n<state>\nTokens: generated text") == "a"


def test_a_set_is_refused_with_what_its_author_can_do() -> None:
    """The author can use a list; or what is written where the schema is given, in OpenAI's shape or as a `Grammar`."""
    with pytest.raises(GrammarUnsupported) as refused:
        with_rules(Grammar.of(set[int]))[0]
    said = str(refused.value)
    for advice in (
        "'uniqueItems' at /uniqueItems",
        "a list in place of a set",
        '"strict": False in a tool',
        '"ignore"',
    ):
        assert advice in said
    as_list = Grammar.json_schema({"type": "array", "uniqueItems": True}, unsupported="ignore")
    assert accepts(as_list, "[1, 1]")
