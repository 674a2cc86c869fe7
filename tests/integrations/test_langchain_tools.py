"""Tools with `ChatAsyncEngine`, on the bundled model: which call is asked for, and how it comes back; and an agent."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import time
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool as as_langchain_tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, NaiveDatetime

from asyncengine import EngineHandle
from asyncengine.errors import InvalidParameter
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


def test_counting_tokens_with_tools(chat: ChatAsyncEngine) -> None:
    messages: list[BaseMessage] = [HumanMessage(WEATHER)]
    counted = chat.get_num_tokens_from_messages(messages, tools=[get_weather, add])
    usage = chat.bind_tools([get_weather, add]).invoke(messages).usage_metadata
    assert usage is not None
    assert counted == usage["input_tokens"]
    assert counted > chat.get_num_tokens_from_messages(messages) + 50
    assert usage["output_token_details"] == {"reasoning": 0}


@pytest.mark.parametrize("keyword", ["tools", "tool_choice", "parallel_tool_calls", "response_format"])
def test_text_completion_refuses_what_is_for_chats(make_llm: Callable[..., AsyncEngineLLM], keyword: str) -> None:
    value: Any = {"tools": TOOLS, "parallel_tool_calls": True}.get(keyword, "auto")
    with pytest.raises(InvalidParameter, match=f"^{keyword}: "):
        make_llm().invoke("Hello", **{keyword: value})


async def test_a_thread_of_langgraph_is_a_session(chat: ChatAsyncEngine, demo: EngineHandle) -> None:
    """Answers of agents are tested in test_examples."""

    def sessions() -> list[str]:
        return list(demo.get().core.loop.scheduler.roster.sessions._branches)

    question, thread = {"messages": [("user", WEATHER)]}, {"configurable": {"thread_id": "thread-7"}}
    ran = create_agent(chat, [get_weather], checkpointer=InMemorySaver())
    await ran.ainvoke(question, config=thread)
    assert sessions()[-1] == "thread-7"
    assert demo.get().core.tool_waits.seconds["get_weather"] > 0
    named = create_agent(chat.model_copy(update={"session": "named"}), [get_weather], checkpointer=InMemorySaver())
    async for _ in named.astream(question, config=thread, stream_mode="messages"):
        pass
    assert sessions()[-2:] == ["thread-7", "named"]
