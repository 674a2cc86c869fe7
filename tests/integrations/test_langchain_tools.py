"""Tools with `ChatAsyncEngine`, on the bundled model: which call is asked for, and how it comes back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from datetime import time
from typing import Any

import pytest
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool as as_langchain_tool
from pydantic import BaseModel, NaiveDatetime

from asyncengine import EngineHandle
from asyncengine.errors import GrammarUnsupported, InvalidParameter
from asyncengine.integrations.langchain import AsyncEngineLLM, ChatAsyncEngine
from asyncengine.integrations.langchain.structured import response_format
from asyncengine.integrations.langchain.tools import openai_tools

from .conftest import added
from .langchain_demo_tools import TOOLS, add, get_weather, multiply
from .peak import paced

WEATHER = "What is the weather in Oslo?"
BOTH = "What is 12 plus 30, and what is 6 times 7?"


@pytest.fixture
def chat(demo: EngineHandle) -> ChatAsyncEngine:
    return ChatAsyncEngine(model="demo", temperature=0, max_tokens=80)


def made(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


# -- calls


async def test_every_way_to_ask_gives_the_same_call(chat: ChatAsyncEngine) -> None:
    model = chat.bind_tools([get_weather, add])
    whole = model.invoke(WEATHER)
    assert made(whole) == [("get_weather", {"city": "Oslo"})]
    assert whole.content == ""
    assert whole.invalid_tool_calls == []
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    others = [
        await model.ainvoke(WEATHER),
        model.batch([WEATHER, "Hello"])[0],
        (await model.abatch(["Hello", WEATHER]))[1],
        added(list(model.stream(WEATHER))),
        added([chunk async for chunk in model.astream(WEATHER)]),
    ]
    assert [made(other) for other in others] == [made(whole)] * 5
    assert len({message.tool_calls[0]["id"] for message in [whole, *others]}) == 6


def test_streamed_pieces_name_the_call_once_and_are_json_together(chat: ChatAsyncEngine, demo: EngineHandle) -> None:
    # with guesses a step may give several tokens, and so a piece may be a whole call
    with paced(demo):
        chunks = list(chat.bind_tools([add, multiply]).stream(BOTH, speculation=False))
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]  # type: ignore[attr-defined]
    for index, name, arguments in ((0, "add", {"a": 12, "b": 30}), (1, "multiply", {"a": 6, "b": 7})):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert [piece["name"] for piece in mine] == [name] + [None] * (len(mine) - 1)
        assert mine[0]["id"]
        assert not any(piece["id"] for piece in mine[1:])
        assert json.loads("".join(piece["args"] or "" for piece in mine)) == arguments
        assert len(mine) > 3
    assert made(added(chunks)) == [("add", {"a": 12, "b": 30}), ("multiply", {"a": 6, "b": 7})]


def test_parallel_calls_and_their_results(chat: ChatAsyncEngine) -> None:
    model = chat.bind_tools([add, multiply])
    question = HumanMessage(BOTH)
    calls = model.invoke([question])
    assert made(calls) == [("add", {"a": 12, "b": 30}), ("multiply", {"a": 6, "b": 7})]
    results = [ToolMessage(str(42), tool_call_id=call["id"]) for call in calls.tool_calls]
    assert model.invoke([question, calls, *results]).content == "12 plus 30 is 42. 6 times 7 is 42."
    assert len(made(chat.bind_tools([add, multiply], parallel_tool_calls=False).invoke(BOTH))) == 1
    both = chat.bind_tools([add, multiply], parallel_tool_calls=True, tool_choice="any").invoke(BOTH)
    assert len(made(both)) == 2


def test_choices_decide_whatever_the_model_would_do(chat: ChatAsyncEngine) -> None:
    tools: list[Any] = [get_weather, add]
    assert made(chat.bind_tools(tools, tool_choice="none").invoke(WEATHER)) == []
    assert len(made(chat.bind_tools(tools, tool_choice="any").invoke("Hello"))) == 1
    forced = made(chat.bind_tools(tools, tool_choice="add").invoke(WEATHER))
    assert [name for name, _ in forced] == ["add"]
    assert {type(value) for value in forced[0][1].values()} == {int}
    assert made(chat.bind_tools([]).invoke("Hello")) == []


def test_strict(chat: ChatAsyncEngine) -> None:
    """A schema that the library cannot enforce is refused, or left out; schemas are open only where asked."""
    odd = {"title": "odd", "type": "object", "properties": {"n": {"type": "integer", "not": {"multipleOf": 3}}}}
    for strict in (None, True):
        with pytest.raises(GrammarUnsupported, match="in tool 'odd'"):
            chat.bind_tools([odd], tool_choice="odd", strict=strict).invoke("odd")
    assert made(chat.bind_tools([odd], tool_choice="odd", strict=False).invoke("odd"))[0][0] == "odd"


class Visit(BaseModel):
    """A visit."""

    at: NaiveDatetime


def book(until: time, visits: list[Visit]) -> str:
    """Book visits."""
    return str([until, *visits])


def test_times_without_a_zone_have_none_for_the_engine_either() -> None:
    [tool] = openai_tools([as_langchain_tool(book)])
    declared = tool["function"]["parameters"]["properties"]
    assert declared["until"]["anyOf"] == [{"format": "time"}, {"format": "time-local"}]
    assert "format" not in declared["until"]
    assert declared["visits"]["items"]["properties"]["at"]["format"] == "date-time-local"
    answer = response_format(Visit, None)["json_schema"]["schema"]
    assert answer["properties"]["at"]["format"] == "date-time-local"


def test_a_call_that_a_stop_string_cuts_is_invalid(chat: ChatAsyncEngine) -> None:
    answer = chat.bind_tools([add]).invoke("What is 12 plus 30?", stop=['"b"'])
    assert answer.tool_calls == []
    [cut] = answer.invalid_tool_calls
    assert cut["name"] == "add"
    assert cut["args"] is not None
    assert cut["args"].startswith('{"a": 12')
    assert cut["error"] is not None
    assert "JSON" in cut["error"]
    assert answer.response_metadata["finish_reason"] == "stop"
    streamed = added(list(chat.bind_tools([add]).stream("What is 12 plus 30?", stop=['"b"'])))
    assert made(streamed) == []
    [cut] = streamed.invalid_tool_calls
    assert str(cut["args"]).startswith('{"a": 12')
    assert streamed.response_metadata["finish_reason"] == "stop"


# -- events and content blocks


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
async def test_v3_events_carry_the_call(chat: ChatAsyncEngine) -> None:
    stream: Any = await chat.bind_tools([add]).astream_events("Add 12 and 30.", version="v3")
    events = [event async for event in stream]
    finished = [event["content"] for event in events if event["event"] == "content-block-finish"]
    assert [(block["type"], block["name"], block["args"]) for block in finished] == [
        ("tool_call", "add", {"a": 12, "b": 30})
    ]
    message = await stream.output
    assert made(message) == [("add", {"a": 12, "b": 30})]
    assert message.response_metadata["finish_reason"] == "tool_calls"
    sync: Any = chat.bind_tools([add]).stream_events("Add 12 and 30.", version="v3")
    # a slow reader gets fewer, longer deltas
    assert kinds(sync) == kinds(events)


def kinds(events: Iterable[Any]) -> list[str]:
    return [kind for kind, _ in itertools.groupby(event["event"] for event in events)]


@pytest.mark.parametrize("output_version", [None, "v1"])
def test_content_blocks(demo: EngineHandle, output_version: str | None) -> None:
    chat = ChatAsyncEngine(model="demo", temperature=0, max_tokens=80, output_version=output_version)
    model = chat.bind_tools([add])
    for message in (model.invoke("Add 12 and 30."), added(list(model.stream("Add 12 and 30.")))):
        [block] = message.content_blocks
        assert block["type"] == "tool_call"
        assert (block["name"], block["args"]) == ("add", {"a": 12, "b": 30})
        back = model.invoke([HumanMessage("Add 12 and 30."), message, ToolMessage("42", tool_call_id=block["id"])])
        assert back.text == "12 plus 30 is 42."


# -- the rest


def test_counting_tokens_with_tools(chat: ChatAsyncEngine) -> None:
    messages: list[BaseMessage] = [HumanMessage(WEATHER)]
    counted = chat.get_num_tokens_from_messages(messages, tools=[get_weather, add])
    usage = chat.bind_tools([get_weather, add]).invoke(messages).usage_metadata
    assert usage is not None
    assert counted == usage["input_tokens"]
    assert counted > chat.get_num_tokens_from_messages(messages) + 50
    assert usage["output_token_details"] == {"reasoning": 0}


def test_disable_streaming_for_tools_only(demo: EngineHandle) -> None:
    chat = ChatAsyncEngine(model="demo", temperature=0, max_tokens=80, disable_streaming="tool_calling")
    [chunk] = chat.bind_tools([add]).stream("Add 12 and 30.")
    assert made(chunk) == [("add", {"a": 12, "b": 30})]
    with paced(demo):
        assert len(list(chat.stream("Hello", speculation=False))) > 1


@pytest.mark.parametrize("keyword", ["tools", "tool_choice", "parallel_tool_calls", "response_format"])
def test_text_completion_refuses_what_is_for_chats(make_llm: Callable[..., AsyncEngineLLM], keyword: str) -> None:
    value: Any = {"tools": TOOLS, "parallel_tool_calls": True}.get(keyword, "auto")
    with pytest.raises(InvalidParameter, match=f"^{keyword}: "):
        make_llm().invoke("Hello", **{keyword: value})
