from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from support.data import cases_of

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.langchain.messages import to_openai

ROWS: dict[str, Any] = cases_of(__file__)

CALL = {"name": "add", "args": {"a": 1, "ü": "é"}, "id": "c1", "type": "tool_call"}
AS_OPENAI = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "ü": "é"}'}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (SystemMessage("be brief"), {"role": "system", "content": "be brief"}),
        (HumanMessage("hi"), {"role": "user", "content": "hi"}),
        (HumanMessage("hi", name="ann"), {"role": "user", "content": "hi", "name": "ann"}),
        (AIMessage("yes"), {"role": "assistant", "content": "yes"}),
        (ChatMessage("note", role="critic"), {"role": "critic", "content": "note"}),
        (ToolMessage("3", tool_call_id="c1"), {"role": "tool", "content": "3", "tool_call_id": "c1"}),
        (
            ToolMessage("no", tool_call_id="c1", status="error", name="add"),
            {"role": "tool", "content": "no", "tool_call_id": "c1", "name": "add"},
        ),
        (FunctionMessage("3", name="add"), {"role": "tool", "content": "3", "name": "add"}),
        (AIMessage("", tool_calls=[CALL]), {"role": "assistant", "content": "", "tool_calls": [AS_OPENAI]}),
        (
            HumanMessage([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, "b"]),
            {"role": "user", "content": "a\nb"},
        ),
        (
            AIMessage([{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "a"}]),
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ),
        (
            AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "a"}]),
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ),
        (  # OpenAI's
            AIMessage([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, "a"]),
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ),
        (AIMessage([{"type": "redacted_thinking", "data": "x"}, "a"]), {"role": "assistant", "content": "a"}),
        (  # as this adapter writes it; blocks repeat it
            AIMessage([{"type": "reasoning", "reasoning": "hm"}, "a"], additional_kwargs={"reasoning_content": "hm"}),
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ),
        (
            AIMessage([{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "ü": "é"}}]),
            {"role": "assistant", "content": "", "tool_calls": [AS_OPENAI]},
        ),
        (  # the content repeats the calls: they count once
            AIMessage(
                [
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "ü": "é"}},
                ],
                tool_calls=[CALL],
            ),
            {"role": "assistant", "content": "so", "tool_calls": [AS_OPENAI]},
        ),
        (
            AIMessage("so", invalid_tool_calls=[{"name": "add", "args": '{"a":', "id": "c1", "error": "cut"}]),
            {"role": "assistant", "content": 'so\n{"a":'},
        ),
    ],
)
def test_one_message(given: BaseMessage, expected: dict[str, Any]) -> None:
    assert to_openai([given]) == [expected]


def test_anthropic_tool_results_become_tool_messages_before_the_text() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "green"}]}
    assert to_openai([HumanMessage([result, {"type": "text", "text": "and?"}])]) == [
        {"role": "tool", "content": "green", "tool_call_id": "c1"},
        {"role": "user", "content": "and?"},
    ]
    assert to_openai([HumanMessage([result])]) == [{"role": "tool", "content": "green", "tool_call_id": "c1"}]


@pytest.mark.parametrize("block", ROWS["what_is_not_text_is_refused_by_place_and_kind"])
def test_what_is_not_text_is_refused_by_place_and_kind(block: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        to_openai([HumanMessage("fine"), HumanMessage([block])])
    assert caught.value.field == "messages[1].content"
    assert str(block.get("type", "without a type")) in str(caught.value)


@pytest.mark.parametrize("block", ROWS["pictures_have_one_form_and_keep_their_place"])
def test_pictures_have_one_form_and_keep_their_place(block: dict[str, Any]) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    parts = [{"type": "text", "text": "before"}, image, {"type": "text", "text": "after"}]
    content: list[str | dict[Any, Any]] = ["before", block, {"type": "text", "text": "after"}]
    assert to_openai([HumanMessage(content), ToolMessage(content, tool_call_id="c1")]) == [
        {"role": "user", "content": parts},
        {"role": "tool", "content": parts, "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (HumanMessage([{"type": "image", "file_id": "f"}]), r"messages\[0\].content\[0\]: must hold the picture"),
        (AIMessage([{"type": "image", "base64": "AA=="}]), r"messages\[0\].content: content of type 'image'"),
    ],
)
def test_pictures_that_are_elsewhere_or_the_models_own_are_refused(message: BaseMessage, says: str) -> None:
    with pytest.raises(InvalidParameter, match=says):
        to_openai([message])


def test_a_message_that_is_no_message_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="RemoveMessage"):
        to_openai([RemoveMessage(id="x")])


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (
            AIMessage("a", additional_kwargs={"reasoning_content": 5}),
            "messages[0].additional_kwargs['reasoning_content']",
        ),
        (AIMessage(["a", {"type": "thinking", "thinking": {"x": 1}}]), "messages[0].content[1].thinking"),
        (AIMessage([{"type": "reasoning", "reasoning": ["x"]}]), "messages[0].content[0].reasoning"),
    ],
)
def test_reasoning_that_is_no_text_is_named(given: AIMessage, field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        to_openai([given])
    assert caught.value.field == field
