"""A request's arguments are checked by name, and grammar and parser agree on what an output means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel
from support.data import cases_of

from asyncengine.errors import GrammarError, InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.grammar.chat import TOOL_FORMATS, ChatPlanner, Reasoning

from .families import TEMPLATES
from .models import ADD, ADDRESS, COMPACT, HERMES, SILENT, tokenizer

ROWS: dict[str, Any] = cases_of(__file__)

PLANNER = ChatPlanner(tokenizer(HERMES))
FUNCTION = ADD["function"]


class Person(BaseModel):
    name: str


def nested(depth: int) -> Any:
    return {"items": nested(depth - 1)} if depth else {}


def allowed(*names: Any, mode: str = "required") -> dict[str, Any]:
    """A tool choice of OpenAI's that leaves these."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        *ROWS["what_is_malformed_is_named"],
        ({"tools": [{"name": "f", "parameters": nested(70)}]}, "tools[0].parameters", "deeper"),
        ({"tools": [ADDRESS] * 1025}, "tools", "1024"),
        ({"response_format": {"properties": {1: {2}}}}, "response_format", "JSON"),
    ],
)
def test_what_is_malformed_is_named(settings: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        PLANNER.plan("", **settings)
    assert caught.value.field == field
    assert words in caught.value.limit


def test_an_unreadable_format_is_an_invalid_parameter() -> None:
    with pytest.raises(InvalidParameter):
        PLANNER.plan("", response_format="json")
    with pytest.raises(GrammarError, match="response_format: a str could be"):
        PLANNER.plan("", response_format="json")


def test_a_model_without_a_known_format_needs_one_for_tools() -> None:
    calls = "{% for c in m.tool_calls or [] %}({{ c.function.name }}){{ c.function.arguments | tojson }}{% endfor %}"
    unknown = SILENT.replace("{{ m.content }}", "{{ m.content }}" + calls)
    planner = ChatPlanner(tokenizer(unknown))
    assert planner.tool_format is None
    for choice in ("auto", "required", "add"):
        with pytest.raises(InvalidParameter, match="tool_format= to one of 'hermes'") as caught:
            planner.plan("", tools=[ADD], tool_choice=choice)
        assert caught.value.field == "tools"
    assert planner.plan("", tools=[ADD], tool_choice="none").grammar is None
    told = ChatPlanner(tokenizer(unknown + "{% if tools %}{% endif %}"), tool_format="hermes")
    assert told.plan("", tools=[ADD]).grammar == PLANNER.plan("", tools=[ADD]).grammar


def test_formats_and_markers_can_be_told() -> None:
    assert ChatPlanner(tokenizer(HERMES), tool_format="none").tool_format is None
    assert ChatPlanner(tokenizer(HERMES), tool_format="mistral").tool_format == TOOL_FORMATS["mistral"]
    # the family is told, its blanks are the template's
    assert ChatPlanner(tokenizer(COMPACT), tool_format="mistral").tool_format == TOOL_FORMATS["mistral-compact"]
    assert PLANNER.reasoning is None
    assert ChatPlanner(tokenizer(HERMES), reasoning="<think>").reasoning == Reasoning("<think>", "</think>")
    assert ChatPlanner(tokenizer(HERMES), reasoning="think").reasoning == Reasoning("<think>", "</think>")
    for settings in ({"tool_format": "gpt"}, {"tool_format": 5}, {"reasoning": "<hm>"}, {"reasoning": None}):
        with pytest.raises(InvalidParameter) as caught:
            ChatPlanner(tokenizer(HERMES), **settings)  # type: ignore[arg-type]
        assert [caught.value.field] == list(settings)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_are_not_allowed_are_as_if_they_were_not_there(mode: str) -> None:
    both = PLANNER.plan("", tools=[ADD, ADDRESS], tool_choice=allowed("add", mode=mode))
    assert both.grammar == PLANNER.plan("", tools=[ADD], tool_choice=mode).grammar
    assert both.grammar != PLANNER.plan("", tools=[ADD, ADDRESS], tool_choice=mode).grammar


def test_a_format_alone_is_its_grammar() -> None:
    schema = {"properties": {"z": {"type": "integer"}, "a": {}}, "required": ["z"]}
    closed = '{"properties":{"z":{"type":"integer"},"a":{}},"required":["z"],"additionalProperties":false}'

    def planned(given: Any) -> Grammar | None:
        return PLANNER.plan("", response_format=given).grammar

    def named(**more: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}

    strict = Grammar(kind="json_schema", text=closed)
    assert planned(schema) == planned(named()) == planned(named(strict=True)) == planned(named(strict=None)) == strict
    loose = planned(named(strict=False))
    assert loose is not None
    assert (json.loads(loose.text), loose.unsupported) == (schema, "ignore")
    assert planned({"type": "json_object"}) == Grammar.json_object()
    given = Grammar.regex("a+")
    assert planned(given) is given
    person = planned(Person)
    assert person is not None
    assert json.loads(person.text)["additionalProperties"] is False


@pytest.mark.parametrize(("form", "special", "visible"), ROWS["special_markers_must_reach_the_parser"])
def test_special_markers_must_reach_the_parser(form: str, special: list[str], visible: bool) -> None:
    planner = ChatPlanner(tokenizer({**TEMPLATES, "compact": COMPACT}[form], special))
    assert planner.plan("", tools=[ADD]).skip_special_tokens is visible
    assert planner.plan("", tools=[ADD], tool_choice="none").skip_special_tokens is True
    assert planner.plan("").skip_special_tokens is True


def test_every_sample_has_its_own_parser() -> None:
    make = PLANNER.plan("", tools=[ADD]).make_parser
    assert make is not None
    first, second = make(), make()
    first.push('<tool_call>\n{"name": "add", "arguments": {}}')
    assert len(first.finished_calls()) == 1
    assert not second.finished_calls()


def test_the_callers_data_is_left_alone() -> None:
    before = json.dumps([ADD, ADDRESS])
    PLANNER.plan("", tools=(ADD, ADDRESS), response_format=FUNCTION["parameters"])  # type: ignore[index]
    assert json.dumps([ADD, ADDRESS]) == before
