"""LangChain's agents on the engine. Their answers: tests/integrations/test_examples.py."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from asyncengine import EngineHandle
from asyncengine.integrations.langchain import ChatAsyncEngine

WEATHER = "What is the weather in Oslo?"


def get_weather(city: str) -> str:
    """Get the current weather for a city."""
    return f"7 degrees and rainy in {city}"


def make(**fields: Any) -> ChatAsyncEngine:
    return ChatAsyncEngine(**{"model": "demo", "temperature": 0, "max_tokens": 80, **fields})


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
