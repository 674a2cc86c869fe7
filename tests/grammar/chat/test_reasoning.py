"""Reasoning comes before the answer: grammars constrain what follows it, parsers take it off."""

from __future__ import annotations

from typing import Any

import pytest

from asyncengine.grammar.chat import ChatPlan, ChatPlanner

from .models import ADD, THINKING, TURNS, Model, Oracle, tokenizer

OPEN, CLOSED, UNDECIDED = "<think>\n", "<think>\n\n</think>\n\n", "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ANSWER = '{"n": 1}'
FORMAT = {"properties": {"n": {"type": "integer"}}, "required": ["n"], "type": "object"}


MODELS = {"text": Model(THINKING), "special": Model(THINKING, (*TURNS, "<think>", "</think>"))}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def read(plan: ChatPlan, text: str) -> tuple[str, str, list[str]]:
    """(reasoning, content, arguments of the calls)."""
    assert plan.make_parser is not None
    parser = plan.make_parser()
    parts = [*[parser.push(char) for char in text], parser.finish()]
    reasoning, content = "".join(part.reasoning for part in parts), "".join(part.text for part in parts)
    return reasoning, content, [call.arguments for call in parser.finished_calls()]


def test_an_open_prompt_is_inside_the_reasoning(model: Model) -> None:
    plan = model.planner.plan(OPEN, response_format=FORMAT)
    right = [f"so </think>{ANSWER}", f"</think>\n{ANSWER}", f"a\nb {{</think>\n\n{ANSWER}"]
    wrong = [ANSWER, "so", "so </think>", "so </think>\n\n\n\n" + ANSWER, "so </think>text", f"<think>so{ANSWER}"]
    model.judge(plan.grammar, right, wrong)
    assert read(plan, f"so\n</think>\n\n{ANSWER}") == ("so", ANSWER, [])


def test_a_closed_prompt_is_the_answer(model: Model) -> None:
    plan = model.planner.plan(CLOSED, response_format=FORMAT)
    assert plan.grammar is not None
    assert plan.grammar.kind == "json_schema"
    assert plan.make_parser is None
    assert plan.skip_special_tokens


def test_an_undecided_prompt_allows_both(model: Model) -> None:
    plan = model.planner.plan(UNDECIDED, response_format=FORMAT)
    right = [ANSWER, f"<think>so</think>{ANSWER}", f"<think>\nso\n</think>\n\n{ANSWER}"]
    model.judge(plan.grammar, right, ["", "<think>", "<think>so", "so</think>" + ANSWER, "text", f"\n{ANSWER}"])
    assert read(plan, right[0]) == ("", ANSWER, [])
    assert read(plan, right[2]) == ("so", ANSWER, [])


def test_calls_after_reasoning(model: Model) -> None:
    for tail, thought in ((OPEN, "so <tool_call> I call\n</think>"), (UNDECIDED, "<think>so <tool_call> I</think>")):
        plan = model.planner.plan(tail, tools=[ADD])
        right = [f"{thought}{CALL}", f"{thought}\n\ntext\n{CALL}", f"{thought}text", thought]
        model.judge(plan.grammar, right, [f"{thought}<tool_call>", f"{thought}{CALL}text"])
        assert read(plan, right[1])[1:] == ("text", ['{"a": 1, "b": 2}'])
        required = model.planner.plan(tail, tools=[ADD], tool_choice="required")
        model.judge(
            required.grammar,
            [f"{thought}\n\n{CALL}", f"{thought}{CALL}"],
            [f"{thought}text", f"{thought}\n\n\n\n{CALL}"],
        )
        none = model.planner.plan(tail, tools=[ADD], tool_choice="none")
        model.judge(none.grammar, [f"{thought}\n\ntext"], [f"{thought}\n\n{CALL}"])


def test_an_undecided_answer_cannot_hide_reasoning_in_its_text(model: Model) -> None:
    """Text that the parser would take for reasoning is reasoning for the grammar too."""
    plan = model.planner.plan(UNDECIDED, tools=[ADD])
    model.judge(plan.grammar, ["text", CALL, "<thin", ""], ["<think>so", " <think>so", f"<think>{CALL}text"])


def test_reasoning_alone_is_parsed_and_not_constrained(model: Model) -> None:
    for settings in ({}, {"response_format": {"type": "text"}}, {"tools": []}, {"tool_choice": "none"}):
        plan = model.planner.plan(UNDECIDED, **settings)  # type: ignore[arg-type]
        assert plan.grammar is None
        assert read(plan, "<think>a</think>\n\nb <tool_call>") == ("a", "b <tool_call>", [])
        assert read(plan, "  b") == ("", "  b", [])
        assert read(plan, "<thin") == ("", "<thin", [])


def test_special_markers_must_be_visible() -> None:
    for name, visible in (("text", True), ("special", False)):
        assert MODELS[name].planner.plan(OPEN).skip_special_tokens is visible
        assert MODELS[name].planner.plan(CLOSED).skip_special_tokens


def test_where_the_reasoning_is() -> None:
    plan = MODELS["text"].planner.plan(UNDECIDED)
    assert plan.make_parser is not None
    parser = plan.make_parser()
    seen: list[Any] = []
    for piece in ("<th", "ink>", "a", "</thi", "nk>", "\n", "b"):
        parser.push(piece)
        seen.append(parser.in_reasoning)
    assert seen == [False, True, True, True, False, False, False]


ANSWERED = THINKING + "{# <|START_THINKING|>x<|END_THINKING|><|START_RESPONSE|>y<|END_RESPONSE|> #}"
COHERE = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")


@pytest.mark.parametrize("special", [(*TURNS, *COHERE), TURNS])
def test_the_marks_of_an_answer_are_no_content(special: tuple[str, ...]) -> None:
    text = tokenizer(ANSWERED.replace("<think>", "").replace("</think>", ""), special)
    planner, oracle = ChatPlanner(text), Oracle(text)
    assert planner.reasoning is not None
    assert planner.reasoning.answer == "<|START_RESPONSE|>"
    thought, open_, end = "<|START_THINKING|>so<|END_THINKING|>", COHERE[2], COHERE[3]
    plan = planner.plan("", tools=[ADD])
    assert plan.grammar is not None
    for answer in ("text", f"{open_}text{end}", f"{open_}text"):
        assert oracle.refused_at(plan.grammar, thought + answer) is None, answer
        assert read(plan, thought + answer) == ("so", "text", [])
    assert read(plan, thought + CALL) == ("so", "", ['{"a": 1, "b": 2}'])
    assert read(planner.plan(""), f"{thought}{open_}a < b{end}") == ("so", "a < b", [])
    closed = planner.plan("<|START_THINKING|><|END_THINKING|>", response_format=FORMAT)
    assert read(closed, f"{open_}{ANSWER}{end}") == ("", ANSWER, [])
    shaped = planner.plan("", response_format=FORMAT)
    assert shaped.grammar is not None
    for answer in (ANSWER, f"{open_}{ANSWER}{end}", f"{open_}{ANSWER}"):
        assert oracle.refused_at(shaped.grammar, thought + answer) is None, answer
    assert oracle.refused_at(shaped.grammar, f"{thought}{open_}{end}") is not None
