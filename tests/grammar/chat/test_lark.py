"""Grammars of whole answers, against llguidance itself, token by token: right texts pass, wrong ones are refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from support.data import cases_of

from asyncengine.grammar import Grammar

from .families import TEMPLATES
from .models import ADD, ADDRESS, COMPACT, THINKING, Model
from .test_channels import TEMPLATE
from .test_reasoning import ANSWERED

ROWS: dict[str, Any] = cases_of(__file__)

TOOLS = [ADD, ADDRESS]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2}}\n</tool_call>'
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


class ToolModel(Model):
    """A model with two tools."""

    def grammar(self, tail: str = "", **settings: Any) -> Grammar:
        grammar = self.planner.plan(tail, **{"tools": TOOLS, **settings}).grammar
        assert grammar is not None
        return grammar


FORMS = {**TEMPLATES, "compact": COMPACT, "thinking": THINKING, "answered": ANSWERED, "channels": TEMPLATE}


@cache
def model_of(family: str) -> ToolModel:
    form, special = ROWS["families"][family]
    return ToolModel(FORMS[form], special)


@pytest.mark.parametrize(
    ("name", "settings", "right", "wrong"),
    [row[1:] for row in ROWS["answers"]],
    ids=[
        f"{promise}: {name}, {settings.get('tool_choice', 'auto')}" for promise, name, settings, *_ in ROWS["answers"]
    ],
)
def test_answers(name: str, settings: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    """Each family's calls are written out in the file, independent of the code's own table."""
    model_of(name).judge(model_of(name).grammar(**settings), right, wrong)


def test_a_choice_may_be_a_name_or_openais() -> None:
    model = model_of("hermes")
    named = {"type": "function", "function": {"name": "add"}}
    assert model.grammar(tool_choice="add") == model.grammar(tool_choice=named)


def test_what_has_no_choice_is_forced() -> None:
    model = model_of("hermes")
    start = '<tool_call>\n{"name": "add'
    assert model.oracle.forced(model.grammar(tool_choice="required"), "") == start
    assert model.oracle.forced(model.grammar(), "text <tool_call>") == start.removeprefix("<tool_call>")
    assert model.oracle.forced(model.grammar(tool_choice="add"), "") == start + '", "arguments": {'
    assert model.oracle.forced(model.grammar(tool_choice="add"), CALL[:-12]) == "</tool_call>"


def test_without_tools_the_format_is_closed() -> None:
    plan = model_of("hermes").planner.plan("", tools=TOOLS, tool_choice="none", response_format=PERSON)
    text = '{"type":"object","properties":{"name":{"type":"string"}},"required":["name"],"additionalProperties":false}'
    assert plan.grammar == Grammar(kind="json_schema", text=text)


@pytest.mark.parametrize(
    ("final", "right", "wrong"),
    [
        (Grammar.regex("a+/b"), ["aa/b"], ["b", "a/b/"]),
        (Grammar.choice(["not", "not enough", 'a"\\']), ["not", "not enough", 'a"\\'], ["no", "not "]),
        (Grammar.lark('start: "x" call\ncall: "y"+'), ["xy", "xyy"], ["x", "y"]),
        (Grammar.json_schema(PERSON, whitespace="compact"), ['{"name":"a"}'], ['{"name": "a"}']),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}, unsupported="ignore"), ["[1, 1]"], ["{}"]),
    ],
)
def test_any_kind_of_grammar_can_be_the_format(final: Grammar, right: list[str], wrong: list[str]) -> None:
    model = model_of("hermes")
    model.judge(model.grammar(response_format=final), [CALL, *right], wrong)
