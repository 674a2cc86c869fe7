"""Conformance to LlamaIndex's contract for LLMs that call functions, which ships no suite of its own.

On the bundled model, so that the calls are also the right ones.
"""

from __future__ import annotations

import json
from datetime import time
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ThinkingBlock, ToolCallBlock
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from asyncengine import Chunk, EngineHandle, Usage
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.llama_index import AsyncEngineLLM
from asyncengine.integrations.llama_index.llm import openai_tool, selections
from asyncengine.integrations.llama_index.messages import Answer
from asyncengine.outputs import ToolCallDelta

from .llama_demo import ADD, BOTH, MULTIPLY, SUM, TOOLS, add, called, demo_llm

pytestmark = pytest.mark.usefixtures("demo")


@pytest.fixture(scope="module")
def llm(demo: EngineHandle) -> AsyncEngineLLM:
    return demo_llm()


async def four_ways(
    llm: AsyncEngineLLM, tools: list[FunctionTool], message: str, **keywords: Any
) -> list[ChatResponse]:
    """Whole and last responses of the base class's four methods."""
    return [
        llm.chat_with_tools(tools, message, **keywords),
        await llm.achat_with_tools(tools, message, **keywords),
        list(llm.stream_chat_with_tools(tools, message, **keywords))[-1],
        [part async for part in await llm.astream_chat_with_tools(tools, message, **keywords)][-1],
    ]


async def test_four_ways_give_one_call(llm: AsyncEngineLLM) -> None:
    for response in await four_ways(llm, TOOLS, SUM):
        assert called(response) == [("add", {"a": 12, "b": 30})]
        [selection] = llm.get_tool_calls_from_response(response)
        assert (selection.tool_name, selection.tool_kwargs) == ("add", {"a": 12, "b": 30})
        [repeated] = response.message.additional_kwargs["tool_calls"]
        assert repeated["id"] == selection.tool_id != ""
        assert repeated["function"]["name"] == "add"
        assert json.loads(repeated["function"]["arguments"]) == {"a": 12, "b": 30}
        assert isinstance(response.raw, dict)
        assert response.raw["finish_reason"] == "tool_calls"
        assert response.raw["usage"]["completion_tokens"] > 0
        assert not response.message.content


def test_arguments_as_far_as_they_are_written() -> None:
    def read(text: str) -> dict[str, Any]:
        block = ToolCallBlock(tool_call_id="x", tool_name="f", tool_kwargs=text)
        [selection] = selections(ChatResponse(message=ChatMessage([block])), error_on_no_tool_call=True)
        assert (selection.tool_id, selection.tool_name) == ("x", "f")
        return selection.tool_kwargs

    cut = ("", "{", '{"ci', '{"city": "Os', '{"city": "Oslo", "n": -', '{"city": "Oslo"}')
    assert [read(text) for text in cut] == [{}, {}, {}, {"city": "Os"}, {"city": "Oslo"}, {"city": "Oslo"}]


async def test_parallel_calls_only_where_allowed(llm: AsyncEngineLLM) -> None:
    for response in await four_ways(llm, TOOLS, BOTH, allow_parallel_tool_calls=True):
        assert called(response) == [("add", {"a": 12, "b": 30}), ("multiply", {"a": 7, "b": 8})]
    for response in await four_ways(llm, TOOLS, BOTH):
        assert called(response) == [("add", {"a": 12, "b": 30})]


NAMED = {"type": "function", "function": {"name": "multiply"}}


@pytest.mark.parametrize(
    ("choice", "message", "names"),
    [
        ({"tool_required": True}, "Hello!", ["add"]), ({"tool_choice": "required"}, "Hello!", ["add"]),
        ({"tool_choice": "any"}, "Hello!", ["add"]), ({"tool_choice": "multiply"}, SUM, ["multiply"]),
        ({"tool_choice": NAMED}, SUM, ["multiply"]), ({"tool_choice": "none"}, SUM, []),
    ],
)  # fmt: skip
async def test_the_choice_of_tools_holds(
    llm: AsyncEngineLLM, choice: dict[str, Any], message: str, names: list[str]
) -> None:
    for response in await four_ways(llm, TOOLS if message == SUM else [ADD], message, **choice):
        assert [name for name, _ in called(response)] == names
        assert names or response.message.content


async def test_refusals_name_the_field(llm: AsyncEngineLLM) -> None:
    with pytest.raises(InvalidParameter, match=r"tool_choice.*add, multiply"):
        llm.chat_with_tools([ADD, MULTIPLY], SUM, tool_choice="divide")
    with pytest.raises(InvalidParameter, match="tool_choice"):
        await llm.achat_with_tools([], SUM, tool_required=True)
    with pytest.raises(InvalidParameter, match=r"tools\[1\].function.name"):
        llm.chat_with_tools([ADD, ADD], SUM)
    with pytest.raises(InvalidParameter, match="max_tokns"):
        llm.chat_with_tools([ADD], SUM, max_tokns=3)
    text_model = demo_llm(is_chat_model=False)
    with pytest.raises(InvalidParameter, match="tools"):
        text_model.chat_with_tools([ADD], SUM)


def test_an_answer_without_a_call_is_an_error_unless_allowed(llm: AsyncEngineLLM) -> None:
    response = llm.chat_with_tools([ADD], "Hello!")
    with pytest.raises(ValueError, match=r"at least one tool call.*'stop'.*Hello"):
        llm.get_tool_calls_from_response(response)
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []


def test_results_go_back_to_the_model(llm: AsyncEngineLLM) -> None:
    asked = ChatMessage(SUM, role=MessageRole.USER)
    response = llm.chat_with_tools(TOOLS, asked)
    [selection] = llm.get_tool_calls_from_response(response)
    result = ChatMessage("42", role=MessageRole.TOOL, additional_kwargs={"tool_call_id": selection.tool_id})
    history = [asked, response.message, result]
    answer = llm.chat_with_tools(TOOLS, chat_history=history)
    assert answer.message.content == "12 plus 30 is 42."
    blocks_gone = ChatMessage("", role=MessageRole.ASSISTANT, additional_kwargs=response.message.additional_kwargs)
    again = llm.chat_with_tools(TOOLS, chat_history=[asked, blocks_gone, result])
    assert again.message.content == answer.message.content


def test_thoughts_are_blocks_and_deltas() -> None:
    answer = Answer("m")
    usage = Usage(3, 4, reasoning_tokens=2)
    first = answer.grow(Chunk("", [1], reasoning="Let me ")).chat()
    second = answer.grow(Chunk("", [2], reasoning="see.")).chat()
    third = answer.grow(Chunk("It is 4.", [3])).chat()
    last = answer.grow(Chunk("", [4], "stop", usage=usage)).chat()
    assert [part.additional_kwargs.get("thinking_delta") for part in (first, second, third, last)] == [
        "Let me ", "see.", None, None,
    ]  # fmt: skip
    assert [part.delta for part in (first, second, third, last)] == ["", "", "It is 4.", ""]
    assert second.message.blocks[0] == ThinkingBlock(content="Let me see.")
    assert last.message.blocks[0] == ThinkingBlock(content="Let me see.", num_tokens=2)
    assert last.message.content == "It is 4."
    assert isinstance(last.raw, dict)
    assert last.raw["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_text_before_calls_stays_and_calls_keep_apart() -> None:
    answer = Answer("m")
    answer.grow(Chunk("I will look. ", [1]))
    answer.grow(Chunk("", [2], tool_calls=[ToolCallDelta(0, "x", "f", ""), ToolCallDelta(0, None, None, '{"a": 1}')]))
    answer.grow(Chunk("", [3], tool_calls=[ToolCallDelta(1, "y", "g", '{"b"')]))
    message = answer.chat().message
    assert message.content == "I will look. "
    assert message.blocks[1:] == [
        ToolCallBlock(tool_call_id="x", tool_name="f", tool_kwargs='{"a": 1}'),
        ToolCallBlock(tool_call_id="y", tool_name="g", tool_kwargs='{"b"'),
    ]
    ended = answer.grow(Chunk("", [4], "length")).chat().message
    assert ended.blocks[1:] == [ToolCallBlock(tool_call_id="x", tool_name="f", tool_kwargs={"a": 1})]


class Visit(BaseModel):
    """A visit."""

    until: time


def test_times_without_a_zone_have_none_for_the_engine_either() -> None:
    made = openai_tool(FunctionTool.from_defaults(add, fn_schema=Visit))
    declared = made["function"]["parameters"]["properties"]["until"]
    assert declared == {"title": "Until", "type": "string", "anyOf": [{"format": "time"}, {"format": "time-local"}]}


def test_a_call_that_cannot_be_read_is_told_of_and_not_run() -> None:
    answer = Answer("m")
    for index, arguments in enumerate(('{"n": 1}', '{"n": ' + "9" * 5000 + "}")):
        answer.grow(Chunk("", [1], None, 0, tool_calls=[ToolCallDelta(index, f"id{index}", "f", arguments)]))
    response = answer.grow(Chunk("", [], "stop", 0)).chat()
    assert [call.tool_kwargs for call in response.message.blocks if isinstance(call, ToolCallBlock)] == [{"n": 1}]
    assert isinstance(response.raw, dict)
    [broken] = response.raw["broken_calls"]
    assert (broken["id"], broken["function"]["name"], len(broken["function"]["arguments"])) == ("id1", "f", 5007)


def test_how_a_tool_is_offered(llm: AsyncEngineLLM) -> None:
    """A tool keeps its own name, by which LlamaIndex finds it again, however long its description is."""
    tool = FunctionTool.from_defaults(add, name="math.add", description="Add. " * 400)
    assert openai_tool(tool)["function"]["name"] == "math.add"
    assert list(openai_tool(ADD)["function"]) == ["name", "description", "parameters"]
    dotted = FunctionTool.from_defaults(add, name="math.add", description="Add two numbers.")
    assert llm.predict_and_call([dotted], SUM, tool_required=True).response == "42"
