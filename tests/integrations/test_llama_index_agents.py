"""LlamaIndex's agents on the bundled model: they call the right tools, give the right answers, and can be stopped."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import (
    AgentStream,
    AgentWorkflow,
    FunctionAgent,
    ToolCall,
    ToolCallResult,
)
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel

from asyncengine import EngineHandle
from asyncengine.integrations.llama_index import AsyncEngineLLM

from .conftest import Watch
from .llama_demo import ADD, BOTH, SUM, TOOLS, WEATHER, demo_llm

pytestmark = pytest.mark.usefixtures("demo")


@pytest.fixture
def watch(demo: EngineHandle) -> Watch:
    return Watch(demo.get().aengine)


@pytest.fixture(scope="module")
def llm(demo: EngineHandle) -> AsyncEngineLLM:
    return demo_llm()


def used(result: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.tool_name, call.tool_kwargs) for call in result.tool_calls]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
async def test_an_agent_uses_two_tools(llm: AsyncEngineLLM, watch: Watch, streaming: bool, parallel: bool) -> None:
    agent = FunctionAgent(tools=TOOLS, llm=llm, streaming=streaming, allow_parallel_tool_calls=parallel)
    question = BOTH if parallel else "First: What is 12 plus 30. Then: Multiply 7 by 8."
    result = await agent.run(user_msg=question)
    assert used(result) == [("add", {"a": 12, "b": 30}), ("multiply", {"a": 7, "b": 8})]
    assert str(result) == "12 plus 30 is 42. 7 times 8 is 56."
    await watch.assert_all_given_back()


async def test_events_tell_calls_as_they_are_written(llm: AsyncEngineLLM) -> None:
    handler = FunctionAgent(tools=TOOLS, llm=llm).run(user_msg="What is the weather in Lisbon?")
    events = [event async for event in handler.stream_events()]
    streamed = [event for event in events if isinstance(event, AgentStream)]
    cities = [event.tool_calls[0].tool_kwargs.get("city", "") for event in streamed if event.tool_calls]
    assert all("Lisbon".startswith(city) for city in cities)
    assert cities[-1] == "Lisbon"
    assert [event.tool_kwargs for event in events if type(event) is ToolCall] == [{"city": "Lisbon"}]
    assert [event.tool_output.content for event in events if isinstance(event, ToolCallResult)] == [
        "27 degrees and sunny"
    ]
    answer = "The weather in Lisbon is 27 degrees and sunny."
    assert "".join(event.delta for event in streamed) == str(await handler) == answer
    assert streamed[-1].raw["usage"]["completion_tokens"] > 0


async def test_a_conversation_goes_on(llm: AsyncEngineLLM) -> None:
    """Calls and results are in the memory that the second run reads."""
    agent = FunctionAgent(tools=TOOLS, llm=llm)
    memory = ChatMemoryBuffer.from_defaults(llm=llm)
    await agent.run(user_msg=SUM, memory=memory)
    result = await agent.run(user_msg="What is the weather in Oslo?", memory=memory)
    assert str(result) == "The weather in Oslo is 4 degrees and rainy."
    roles = [message.role.value for message in await memory.aget()]
    assert roles == ["user", "assistant", "tool", "assistant"] * 2
    stored = [message.model_dump_json() for message in memory.get_all()]
    assert [ChatMessage.model_validate_json(text) for text in stored] == memory.get_all()


async def test_a_first_call_can_be_forced(llm: AsyncEngineLLM) -> None:
    agent = FunctionAgent(tools=TOOLS, llm=llm, initial_tool_choice="get_weather", allow_parallel_tool_calls=False)
    result = await agent.run(user_msg="Hello!")
    assert used(result)[0][0] == "get_weather"


async def test_a_tool_that_fails_is_told_to_the_model(llm: AsyncEngineLLM) -> None:
    def get_weather(city: str) -> str:
        """Get the current weather for a city."""
        raise LookupError("Error: access denied")

    result = await FunctionAgent(tools=[get_weather], llm=llm).run(user_msg="What is the weather in Oslo?")
    assert str(result) == "Sorry, the tool failed: access denied."


class Town(BaseModel):
    population: int


def get_population(city: str) -> int:
    """Get the population of a city."""
    return 1304


async def test_structured_results(llm: AsyncEngineLLM) -> None:
    question = "What is the population of Oslo?"
    result = await FunctionAgent(tools=[get_population], llm=llm, output_cls=Town).run(user_msg=question)
    assert result.get_pydantic_model(Town) == Town(population=1304)

    async def last_answer(messages: list[ChatMessage]) -> dict[str, Any]:
        town = await llm.astructured_predict(Town, PromptTemplate("{text}"), text=messages[-1].content)
        return town.model_dump()

    agent = FunctionAgent(tools=[get_population], llm=llm, structured_output_fn=last_answer)
    assert (await agent.run(user_msg=question)).structured_response == {"population": 1304}


async def test_agents_hand_over(llm: AsyncEngineLLM) -> None:
    desk = FunctionAgent(name="desk", description="Takes requests.", tools=[WEATHER], llm=llm)
    calculator = FunctionAgent(name="calculator", description="Adds.", tools=[ADD], llm=llm, can_handoff_to=[])
    workflow = AgentWorkflow(agents=[desk, calculator], root_agent="desk")
    result = await workflow.run(
        user_msg="First: Call handoff with to_agent calculator and reason math. Then: What is 12 plus 30."
    )
    assert used(result) == [("handoff", {"to_agent": "calculator", "reason": "math"}), ("add", {"a": 12, "b": 30})]
    assert result.current_agent_name == "calculator"
    assert "12 plus 30 is 42." in str(result)
