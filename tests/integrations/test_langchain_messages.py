from __future__ import annotations

from typing import Any

import pytest
from langchain_core import messages
from langchain_core.messages import HumanMessage, RemoveMessage, ToolMessage
from support.data import cases_of

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.langchain.messages import to_openai

ROWS: dict[str, Any] = cases_of(__file__)


@pytest.mark.parametrize(("kind", "fields", "expected"), ROWS["messages"])
def test_one_message(kind: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Reasoning and calls that a content repeats count once; OpenAI's own form of reasoning is one of them."""
    assert to_openai([getattr(messages, kind)(**fields)]) == [expected]


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


@pytest.mark.parametrize(("kind", "fields", "says"), ROWS["refused_pictures"])
def test_pictures_that_are_elsewhere_or_the_models_own_are_refused(
    kind: str, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidParameter, match=says):
        to_openai([getattr(messages, kind)(**fields)])


def test_a_message_that_is_no_message_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="RemoveMessage"):
        to_openai([RemoveMessage(id="x")])


@pytest.mark.parametrize(("kind", "fields", "field"), ROWS["reasoning_that_is_no_text"])
def test_reasoning_that_is_no_text_is_named(kind: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        to_openai([getattr(messages, kind)(**fields)])
    assert caught.value.field == field
