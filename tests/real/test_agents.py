"""A model that was trained for no tools runs agents: SmolLM2-135M, whose template reads none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from asyncengine import Engine, SamplingParams
from asyncengine.integrations.http import app
from asyncengine.integrations.langchain import ChatAsyncEngine
from asyncengine.integrations.llama_index import AsyncEngineLLM

QUESTION = "How is the weather in Paris today?"


class Weather:
    """A tool that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_weather(self, city: str) -> str:
        """Get the current weather for a city."""
        self.asked.append(city)
        return "21 degrees and sunny"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(str(smollm2), max_model_len=2048) as engine:
        yield engine


async def test_of_langchain(engine: Engine) -> None:
    assert engine.info.tool_format == "hermes (generic)"
    weather, chat = Weather(), ChatAsyncEngine(engine=engine, temperature=0, max_tokens=120)
    agent = create_agent(chat, [weather.get_weather])
    result = await agent.ainvoke({"messages": [HumanMessage(QUESTION)]}, {"recursion_limit": 12})
    assert "Paris" in weather.asked
    assert "21" in result["messages"][-1].text
    assert not result["messages"][-1].tool_calls


async def test_of_llama_index(engine: Engine) -> None:
    weather, llm = Weather(), AsyncEngineLLM(engine=engine, temperature=0, max_tokens=120)
    assert llm.metadata.is_function_calling_model
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(weather.get_weather)], llm=llm)
    answer = await agent.run(QUESTION, max_iterations=6)
    assert "Paris" in weather.asked
    assert "21" in str(answer)


async def test_of_openai_over_http(engine: Engine) -> None:
    transport = httpx.ASGITransport(app=app(engine.aengine))
    http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
    client = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http)
    weather = Weather()
    function = {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    asked: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "temperature": 0, "max_tokens": 120}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(4):
        answer = await client.chat.completions.create(model=engine.info.name, messages=messages, **asked)
        said = answer.choices[0].message
        if not said.tool_calls:
            break
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            result = weather.get_weather(**json.loads(call.function.arguments))  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert "Paris" in weather.asked
    assert "21" in str(said.content)


def test_calls_that_are_asked_for(engine: Engine) -> None:
    """A forced call, several at once, and structured output by a call."""
    tools = [Weather().get_weather]
    chat = ChatAsyncEngine(engine=engine, temperature=0, max_tokens=120)
    forced = chat.bind_tools(tools, tool_choice="get_weather").invoke("Tell me a joke.")
    assert [call["name"] for call in forced.tool_calls] == ["get_weather"]
    several = chat.bind_tools(tools, tool_choice="any", parallel_tool_calls=True).invoke(
        "The weather in Rome and Oslo?"
    )
    assert len(several.tool_calls) > 1
    made = chat.with_structured_output(Person, method="function_calling").invoke("Marta is 41 years old.")
    assert made == Person(name="Marta", age=41)


def test_chats_leave_the_tail_out(engine: Engine) -> None:
    """Parameters that nobody set: a chat draws as llama.cpp does, since the checkpoint says nothing."""
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    careful = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=3, max_tokens=12)
    assert engine.chat(question, SamplingParams(seed=3, max_tokens=12)).text == engine.chat(question, careful).text
    whole = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3, max_tokens=12)
    prompt = "The capital of Japan"
    assert engine.generate(prompt, SamplingParams(seed=3, max_tokens=12)).text == engine.generate(prompt, whole).text
