"""No tool is run, and no object is returned, with a value that the engine wrote in the model's place."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool

from asyncengine import EngineHandle
from asyncengine.errors import RequestFailed
from asyncengine.grammar import Grammar
from asyncengine.integrations.langchain import ChatAsyncEngine

from .conftest import added
from .llama_demo import called, demo_llm
from .test_langchain_structured import MARTA, Person
from .test_langchain_structured import TEXT as REQUEST

pytestmark = pytest.mark.usefixtures("demo")
QUESTION = "What is the weather in Sankt Petersburg?"
WHOLE = {"city": "Sankt Petersburg"}
BUDGETS = (14, 16, 19, 24, 25, 26, 60)


def get_weather(city: str) -> str:
    """Get the current weather for a city."""
    return "cold"


async def answers(budget: int) -> list[AIMessage]:
    model = ChatAsyncEngine(model="demo", temperature=0, max_tokens=budget).bind_tools([get_weather])
    first, *others = [part async for part in model.astream(QUESTION)]
    chunks = [*map(added, (list(model.stream(QUESTION)), [first, *others]))]
    return [model.invoke(QUESTION), await model.ainvoke(QUESTION), *chunks]


async def test_langchain_gets_a_cut_call_as_an_invalid_one(demo: EngineHandle) -> None:
    cut = 0
    for budget in BUDGETS:
        for message in await answers(budget):
            assert [call["args"] for call in message.tool_calls] in ([], [WHOLE])
            assert not (message.tool_calls and message.invalid_tool_calls)
            for call in message.invalid_tool_calls:
                cut += 1
                assert call["name"] == "get_weather"
                assert str(call["args"]).startswith('{"city":')
                assert message.response_metadata["steered_from"] == 0
    assert cut >= 12
    assert message.tool_calls  # with enough tokens
    asked = ChatAsyncEngine(model="demo", temperature=0, max_tokens=24, model_kwargs={"on_budget": "offer"})
    [offered] = asked.bind_tools([get_weather], tool_choice="any").invoke(QUESTION).tool_calls
    assert offered["args"]["city"] in WHOLE["city"]


@pytest.mark.parametrize("streaming", [False, True])
async def test_no_agent_runs_a_cut_call(demo: EngineHandle, streaming: bool) -> None:
    ran: list[str] = []

    def get_weather(city: str) -> str:
        """Get the current weather for a city."""
        ran.append(city)
        return "cold"

    for budget in BUDGETS[:-1]:
        agent = create_agent(ChatAsyncEngine(model="demo", temperature=0, max_tokens=budget), [get_weather])
        asked: Any = {"messages": [("user", QUESTION)]}
        if streaming:
            list(agent.stream(asked, {"recursion_limit": 4}, stream_mode="messages"))
        else:
            agent.invoke(asked, {"recursion_limit": 4})
        llm = demo_llm(max_tokens=budget)
        await FunctionAgent(tools=[get_weather], llm=llm, streaming=streaming).run(user_msg=QUESTION, max_iterations=3)
    assert set(ran) == {WHOLE["city"]}


async def test_llama_index_gets_a_cut_call_as_a_broken_one(demo: EngineHandle) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    cut = 0
    for budget in BUDGETS:
        llm = demo_llm(max_tokens=budget)
        responses = [
            llm.chat_with_tools([tool], QUESTION),
            await llm.achat_with_tools([tool], QUESTION),
            list(llm.stream_chat_with_tools([tool], QUESTION))[-1],
        ]
        for response in responses:
            assert called(response) in ([], [("get_weather", WHOLE)])
            assert isinstance(response.raw, dict)
            if broken := response.raw.get("broken_calls"):
                assert (response.raw["finish_reason"], response.raw["steered_from"]) == ("length", 0)
                cut += len(broken)
    assert cut >= 9


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
async def test_langchain_parses_no_answer_that_the_engine_closed(demo: EngineHandle, method: Any) -> None:
    chat = ChatAsyncEngine(model="demo", temperature=0)
    whole = chat.with_structured_output(Person, method=method, include_raw=True, max_tokens=80).invoke(REQUEST)
    needed = whole["raw"].usage_metadata["output_tokens"]
    for budget in (needed - 6, needed - 4, needed - 1, needed):
        model = chat.with_structured_output(Person, method=method, max_tokens=budget)
        raw = chat.with_structured_output(Person, method=method, max_tokens=budget, include_raw=True)
        result = await raw.ainvoke(REQUEST)
        if result["parsing_error"] is None:
            for answer in (result["parsed"], model.invoke(REQUEST), list(model.stream(REQUEST))[-1]):
                assert answer.model_dump() == MARTA
            continue
        assert budget < needed
        assert result["parsed"] is None
        with pytest.raises(OutputParserException, match="on_budget='offer'"):
            model.invoke(REQUEST)
        with pytest.raises(OutputParserException, match="on_budget='offer'"):
            list(model.stream(REQUEST))
    assert whole["parsed"].model_dump() == MARTA
    asked = chat.with_structured_output(Person, method=method, max_tokens=needed - 6, on_budget="offer")
    assert asked.invoke(REQUEST).model_dump() != MARTA
    refused = chat.with_structured_output(Person, method=method, max_tokens=needed - 6)
    with pytest.raises(OutputParserException, match="on_budget='offer'"):
        await refused.ainvoke(REQUEST)


async def test_llama_index_parses_no_answer_that_the_engine_closed(demo: EngineHandle) -> None:
    prompt = PromptTemplate(REQUEST)
    whole: Any = demo_llm().chat([ChatMessage(REQUEST)], grammar=Grammar.json_schema(Person))
    needed = whole.raw["usage"]["completion_tokens"]
    for budget in (needed - 6, needed - 4):
        llm = demo_llm(max_tokens=budget, schema_in_prompt=False)
        with pytest.raises(RequestFailed, match="offer"):
            llm.structured_predict(Person, prompt)
        with pytest.raises(RequestFailed, match="offer"):
            await llm.astructured_predict(Person, prompt)
        with pytest.raises(RequestFailed, match="offer"):
            list(llm.stream_structured_predict(Person, prompt))
        with pytest.raises(RequestFailed, match="offer"):
            llm.as_structured_llm(Person).complete(REQUEST)
    assert llm.structured_predict(Person, prompt, llm_kwargs={"max_tokens": 80}).model_dump() == MARTA
    assert isinstance(llm.structured_predict(Person, prompt, llm_kwargs={"on_budget": "offer"}), Person)
