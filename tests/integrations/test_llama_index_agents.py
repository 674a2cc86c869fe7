"""LlamaIndex's agents on the bundled model: they call the right tools, give the right answers, and can be stopped."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent

from asyncengine import EngineHandle
from asyncengine.integrations.llama_index import AsyncEngineLLM

from .conftest import Watch
from .llama_demo import BOTH, TOOLS, demo_llm

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
