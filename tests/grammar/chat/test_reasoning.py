"""Reasoning comes before the answer: grammars constrain what follows it, parsers take it off."""

from __future__ import annotations

from typing import Any

import pytest
from support.data import cases_of

from asyncengine.grammar.chat import ChatPlan

from .models import THINKING, TURNS, Model

ROWS: dict[str, Any] = cases_of(__file__)

OPEN, CLOSED, UNDECIDED = "<think>\n", "<think>\n\n</think>\n\n", "<|im_start|>assistant\n"
FORMAT = {"properties": {"n": {"type": "integer"}}, "required": ["n"], "type": "object"}


COHERE = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
ANSWERED = THINKING.replace("<think>", "").replace("</think>", "") + "{# <|START_THINKING|>x<|END_THINKING|>"
ANSWERED += "<|START_RESPONSE|>y<|END_RESPONSE|> #}"
MODELS = {
    "thinking": {"text": Model(THINKING), "special": Model(THINKING, (*TURNS, "<think>", "</think>"))},
    "answered": {"text": Model(ANSWERED), "special": Model(ANSWERED, (*TURNS, *COHERE))},
}


@pytest.fixture(params=["text", "special"])
def marks(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(marks: str) -> Model:
    return MODELS["thinking"][marks]


def read(plan: ChatPlan, text: str) -> tuple[str, str, list[str]]:
    """(reasoning, content, arguments of the calls)."""
    assert plan.make_parser is not None
    parser = plan.make_parser()
    parts = [*[parser.push(char) for char in text], parser.finish()]
    reasoning, content = "".join(part.reasoning for part in parts), "".join(part.text for part in parts)
    return reasoning, content, [call.arguments for call in parser.finished_calls()]


@pytest.mark.parametrize(("form", "tail", "settings", "text", "parts"), ROWS["read"])
def test_reasoning_and_its_marks_are_taken_off(
    marks: str, form: str, tail: str, settings: dict[str, Any], text: str, parts: list[Any]
) -> None:
    assert read(MODELS[form][marks].planner.plan(tail, **settings), text) == tuple(parts)


def test_a_closed_prompt_is_the_answer(model: Model) -> None:
    plan = model.planner.plan(CLOSED, response_format=FORMAT)
    assert plan.grammar is not None
    assert plan.grammar.kind == "json_schema"
    assert plan.make_parser is None
    assert plan.skip_special_tokens


def test_reasoning_alone_is_parsed_and_not_constrained(model: Model) -> None:
    for settings in ({}, {"response_format": {"type": "text"}}, {"tools": []}, {"tool_choice": "none"}):
        plan = model.planner.plan(UNDECIDED, **settings)  # type: ignore[arg-type]
        assert plan.grammar is None
        assert read(plan, "<think>a</think>\n\nb <tool_call>") == ("a", "b <tool_call>", [])
        assert read(plan, "  b") == ("", "  b", [])
        assert read(plan, "<thin") == ("", "<thin", [])


def test_special_markers_must_be_visible() -> None:
    for name, visible in (("text", True), ("special", False)):
        assert MODELS["thinking"][name].planner.plan(OPEN).skip_special_tokens is visible
        assert MODELS["thinking"][name].planner.plan(CLOSED).skip_special_tokens


def test_where_the_reasoning_is() -> None:
    plan = MODELS["thinking"]["text"].planner.plan(UNDECIDED)
    assert plan.make_parser is not None
    parser = plan.make_parser()
    seen: list[Any] = []
    for piece in ("<th", "ink>", "a", "</thi", "nk>", "\n", "b"):
        parser.push(piece)
        seen.append(parser.in_reasoning)
    assert seen == [False, True, True, True, False, False, False]


def test_the_mark_of_an_answer_is_found(marks: str) -> None:
    reasoning = MODELS["answered"][marks].planner.reasoning
    assert reasoning is not None
    assert reasoning.answer == "<|START_RESPONSE|>"
