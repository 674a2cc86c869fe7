"""Tool calls against a schema validator, structural tags against a parser written by hand."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jsonschema
import pytest
from support.data import cases_of
from support.tables import table

from asyncengine.errors import GrammarError
from asyncengine.grammar import Grammar

from .oracle import accepts

ROWS: dict[str, Any] = cases_of(__file__)

TOOLS = table(__file__, "tools")


def test_tool_calls_against_the_schema_validator() -> None:
    grammar = Grammar.tool_calls(TOOLS)
    schema = json.loads(grammar.text)
    texts = [
        [{"name": "add", "arguments": {"a": 1, "next": {"a": 2}}}, {"name": "stop", "arguments": {}}],
        [{"name": "stop", "arguments": {}}],
        [{"name": "stop", "arguments": {"a": 1}}],
        [{"name": "add", "arguments": {"a": "1"}}],
        [{"name": "add", "arguments": {"a": 1, "next": {}}}],
        [{"name": "sub", "arguments": {}}],
        [],
        {"name": "stop", "arguments": {}},
    ]
    expected = [jsonschema.Draft202012Validator(schema).is_valid(value) for value in texts]
    assert expected == [True, True, False, False, False, False, False, False]
    assert [accepts(grammar, json.dumps(value)) for value in texts] == expected


def test_tool_choice_and_single_calls() -> None:
    one = Grammar.tool_calls(TOOLS, tool_choice="stop", parallel=False)
    assert accepts(one, '{"name": "stop", "arguments": {}}')
    assert not accepts(one, '{"name": "add", "arguments": {"a": 1}}')
    assert one == Grammar.tool_calls(
        TOOLS, tool_choice={"type": "function", "function": {"name": "stop"}}, parallel=False
    )
    for choice in ("auto", "none", "missing", 3):
        with pytest.raises(GrammarError) as caught:
            Grammar.tool_calls(TOOLS, tool_choice=choice)  # type: ignore[arg-type]
        assert caught.value.field == "tool_choice"
    for tools in ([], "x", [{}], [{"name": ""}], [TOOLS[1], TOOLS[1]]):
        with pytest.raises(GrammarError):
            Grammar.tool_calls(tools)  # type: ignore[arg-type]


# ---------------------------------------------------------------- structural tags

TAGS = [
    {"begin": "<f=int>", "schema": {"type": "integer"}, "end": "</f>"},
    {"begin": "<f=word>", "grammar": Grammar.regex("[a-z<]+"), "end": "</f>"},
    {"begin": "[x]", "grammar": Grammar.choice(["a", "ab"]), "end": ""},
    {"begin": "<g>", "grammar": Grammar.lark('start: "(" start ")" | "."'), "end": "."},
]
TRIGGERS = ["<f=", "[x]", "<g>"]
TAGGED = re.compile(
    r"<f=int>(-?(0|[1-9][0-9]*))</f>|<f=word>[a-z<]+?</f>|\[x\]ab?|<g>(\.|\(\.\)|\(\(\.\)\))\.", re.DOTALL
)
FREE = re.compile(r"(?:(?!<f=|\[x\]|<g>).)*", re.DOTALL)


def tagged(text: str, at_least_one: bool = False, stop: bool = False) -> bool:
    """True if `text` is accepted, checked by hand: free text up to a trigger, a whole tag there, and so on."""
    found = 0
    here = 0
    while True:
        free = FREE.match(text, here)
        assert free is not None
        if free.end() == len(text):
            return (found > 0 or not at_least_one) and not (stop and found > 0 and free.end() > here)
        if stop and found:
            return False
        tag = TAGGED.match(text, free.end())
        if tag is None:
            return False
        found, here = found + 1, tag.end()


PIECES = ROWS["pieces"]


@pytest.mark.parametrize("at_least_one", [False, True])
@pytest.mark.parametrize("stop", [False, True])
def test_structural_tags_against_a_parser(at_least_one: bool, stop: bool) -> None:
    grammar = Grammar.structural_tags(TAGS, triggers=TRIGGERS, at_least_one=at_least_one, stop_after_first=stop)
    texts = ["".join(parts) for parts in itertools.product(PIECES, repeat=2)]
    assert 0 < sum(tagged(text, at_least_one, stop) for text in texts) < len(texts)
    wrong = [text for text in texts if accepts(grammar, text) != tagged(text, at_least_one, stop)]
    assert wrong == []


def test_structural_tags_in_the_other_engines_shape() -> None:
    shape = {"type": "structural_tag", "structures": TAGS, "triggers": TRIGGERS}
    assert Grammar.of(shape) == Grammar.structural_tags(TAGS, triggers=TRIGGERS)
    alone = Grammar.structural_tags(TAGS[:1])
    assert accepts(alone, "a <f= <f=int>1</f> b")
    assert not accepts(alone, "a <f=int>b")


def test_bad_structural_tags_are_refused() -> None:
    tag = TAGS[0]
    for tags, triggers in (
        ([], None),
        ("x", None),
        ([3], None),
        ([{"begin": "", "end": ""}], None),
        ([tag], ["<g"]),
        ([tag], []),
        ([tag], [""]),
        ([{**tag, "begin": "a<f"}, {**tag, "begin": "<f"}], None),
        ({"format": {}}, None),
    ):
        with pytest.raises(GrammarError):
            Grammar.structural_tags(tags, triggers=triggers)  # type: ignore[arg-type]
