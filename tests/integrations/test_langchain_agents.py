"""`create_agent` on the bundled model: with and without tools, with every strategy for the response's format."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

from asyncengine import EngineHandle
from asyncengine.integrations.langchain import ChatAsyncEngine

WEATHER = "What is the weather in Oslo?"


def get_weather(city: str) -> str:
    """Get the current weather for a city."""
    return f"7 degrees and rainy in {city}"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def make(**fields: Any) -> ChatAsyncEngine:
    return ChatAsyncEngine(**{"model": "demo", "temperature": 0, "max_tokens": 80, **fields})


@pytest.fixture
def chat(demo: EngineHandle) -> ChatAsyncEngine:
    return make()


def agent(model: ChatAsyncEngine, tools: Any = (), response_format: Any = None) -> Any:
    return create_agent(model, list(tools), response_format=response_format).with_config(recursion_limit=8)


async def test_an_agent_uses_two_tools_one_after_the_other_and_answers(chat: ChatAsyncEngine) -> None:
    question = {"messages": [("user", "First: What is the weather in Oslo? Then: What is 12 plus 30?")]}
    ran = agent(chat, [get_weather, add])
    for messages in (ran.invoke(question)["messages"], (await ran.ainvoke(question))["messages"]):
        calls = [call for m in messages if isinstance(m, AIMessage) for call in m.tool_calls]
        assert [(c["name"], c["args"]) for c in calls] == [
            ("get_weather", {"city": "Oslo"}),
            ("add", {"a": 12, "b": 30}),
        ]
        assert [m.content for m in messages if isinstance(m, ToolMessage)] == ["7 degrees and rainy in Oslo", "42"]
        assert "42" in messages[-1].text
        assert "7 degrees" in messages[-1].text


async def test_a_thread_of_langgraph_is_a_session(demo: EngineHandle) -> None:
    def sessions() -> list[str]:
        return list(demo.get().core.loop.scheduler.roster.sessions._branches)

    question, thread = {"messages": [("user", WEATHER)]}, {"configurable": {"thread_id": "thread-7"}}
    ran = create_agent(make(), [get_weather], checkpointer=InMemorySaver())
    await ran.ainvoke(question, config=thread)
    assert sessions()[-1] == "thread-7"
    assert demo.get().core.tool_waits.seconds["get_weather"] > 0
    named = create_agent(make(session="named"), [get_weather], checkpointer=InMemorySaver())
    async for _ in named.astream(question, config=thread, stream_mode="messages"):
        pass
    assert sessions()[-2:] == ["thread-7", "named"]
