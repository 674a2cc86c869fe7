"""LangChain's decision model on an engine: its answers, its usage, what it refuses, and the middlewares on it."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from asyncengine import EngineHandle
from asyncengine.errors import InvalidParameter

decisions = pytest.importorskip("langchain_core.decisions")
middleware = pytest.importorskip("langchain.agents.middleware.auto_mode")

from langchain_core.decisions import Box, Choice, Noul, Score  # noqa: E402

from asyncengine.integrations.langchain import AsyncEngineDecisions  # noqa: E402

STATE = "Which port does server polaris use?"
QUESTIONS: dict[str, Any] = {
    "weather": Noul(instructions="Is this about the weather?", criteria={"true": "weather", "false": "else"}),
    "topic": Choice(instructions="Which topic?", criteria={"servers": "ports, versions", "books": None}),
    "hurry": Score(instructions="How urgent is it?", criteria=["not at all", "somewhat", "very"]),
}
IMAGE = {"type": "image", "base64": "aGVsbG8=", "mime_type": "image/png"}


@pytest.fixture
def classifier(demo: EngineHandle) -> AsyncEngineDecisions:
    return AsyncEngineDecisions(model="demo")


async def test_answers_are_the_engines_alone_and_in_a_batch(
    classifier: AsyncEngineDecisions, demo: EngineHandle
) -> None:
    request: Any = {"state": STATE, "questions": QUESTIONS}
    expected = await (await demo.aget()).decide(STATE, QUESTIONS)
    alone = classifier.invoke(request)
    assert alone.model == "demo"
    assert alone.request_id
    others: list[Any] = [{"state": f"What is {place} plus 30?", "questions": QUESTIONS} for place in range(5)]
    for response in (alone, await classifier.ainvoke(request), (await classifier.abatch([*others, request]))[-1]):
        assert response.nouls["weather"].noul == expected["weather"].value
        assert response.choices["topic"].choice == expected["topic"].choice
        assert response.choices["topic"].probabilities == expected["topic"].probabilities
        assert response.scores["hurry"].score == expected["hurry"].value
        assert response.scores["hurry"].legend == {0: "not at all", 1: "somewhat", 2: "very"}
        assert list(response.scores["hurry"].probabilities.values()) == [*expected["hurry"].probabilities.values()]
        assert response.usage is not None
        assert response.usage["input_tokens"] == expected.usage.prompt_tokens
        assert 0 < response.usage["input_token_details"]["cache_read"] < expected.usage.prompt_tokens


@pytest.mark.parametrize(
    ("state", "same"),
    [
        (HumanMessage(STATE), STATE),
        (HumanMessage([{"type": "text", "text": STATE}]), STATE),
        (AIMessage("It is rainy."), {"role": "assistant", "content": "It is rainy."}),
        (
            {"messages": [HumanMessage("hello"), AIMessage("bye")], "last": HumanMessage("so?"), "n": [1, None]},
            {
                "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "bye"}],
                "last": {"role": "user", "content": "so?"},
                "n": [1, None],
            },
        ),
        ([ToolMessage("7 degrees", tool_call_id="c")], [{"role": "tool", "content": "7 degrees", "tool_call_id": "c"}]),
        ({"type": "file", "name": "plain data"}, {"type": "file", "name": "plain data"}),
    ],
)
def test_messages_in_a_state_become_json(
    classifier: AsyncEngineDecisions, demo: EngineHandle, state: Any, same: Any
) -> None:
    questions = {"weather": QUESTIONS["weather"]}
    response = classifier.invoke({"state": state, "questions": questions})
    expected = demo.get().decide(same, questions)
    assert response.nouls["weather"].noul == expected["weather"].value
    assert response.usage is not None
    assert response.usage["input_tokens"] == expected.usage.prompt_tokens


@pytest.mark.parametrize(
    ("state", "questions", "named"),
    [
        ({"seen": [IMAGE]}, QUESTIONS, "state['seen'][0]"),
        ([HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])], QUESTIONS, "state[0]"),
        (STATE, {"q": Choice(instructions=[IMAGE], criteria={"a": None})}, "questions['q']['instructions'][0]"),
        (STATE, {"where": Box(instructions="Where is the dog?")}, "'where': `type`"),
    ],
)
async def test_media_and_boxes_are_refused_by_name(
    classifier: AsyncEngineDecisions, state: Any, questions: Any, named: str
) -> None:
    with pytest.raises(InvalidParameter) as refused:
        await classifier.ainvoke({"state": state, "questions": questions})
    assert named in str(refused.value)
