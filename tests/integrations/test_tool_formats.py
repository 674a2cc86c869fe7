"""The frameworks' tool calls and structured answers in today's formats, on a tiny model that the grammar leads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

from asyncengine import EngineHandle, shared_engine
from asyncengine.integrations.langchain import ChatAsyncEngine
from asyncengine.integrations.llama_index import AsyncEngineLLM as LlamaLLM

from ..grammar.chat.test_channels import TEMPLATE as CHANNELS
from ..grammar.chat.zoo import CASES
from .conftest import CONFIG

FORMATS = {
    "qwen3_coder": CASES["qwen3_coder text"].template,
    "gemma4": CASES["gemma4"].template,
    "harmony": CHANNELS,
}
SETTINGS: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 300}


class Trip(BaseModel):
    """A trip."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=30)
    by_train: bool | None = None
    stops: list[str] = Field(default_factory=list, max_length=2)


class Weather(BaseModel):
    """Get the weather."""

    city: str = Field(max_length=12)


@pytest.fixture(scope="module", params=FORMATS)
def loaded(request: pytest.FixtureRequest, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(format, folder, engine)"""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copytree(model_path, folder, dirs_exist_ok=True)
    for template in Path(folder).glob("*.jinja"):
        template.unlink()
    (folder / "chat_template.jinja").write_text(FORMATS[request.param], encoding="utf-8")
    held: EngineHandle = shared_engine(str(folder), **CONFIG)
    yield request.param, str(folder), held.get()
    held.get().close()
    held.close()


def test_calls_through_langchain(loaded: Any) -> None:
    name, folder, engine = loaded
    assert engine.info.tool_format == name
    chat = ChatAsyncEngine(model=folder, engine_config=CONFIG, **SETTINGS)
    assert chat.profile is not None
    assert chat.profile["tool_calling"] is True
    assert chat.profile["reasoning_output"] is (name == "harmony")
    bound = chat.bind_tools([Trip, Weather], tool_choice="any")
    question = [HumanMessage("Where to?")]
    answer = bound.invoke(question)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    {"Trip": Trip, "Weather": Weather}[call["name"]].model_validate(call["args"], strict=True)
    assert not answer.text
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    chunks = list(bound.stream(question, speculation=False))  # with guesses a piece may be a whole call
    whole = sum(chunks[1:], chunks[0])
    assert isinstance(whole, AIMessageChunk)
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [(call["name"], call["args"])]
    if call["args"]:
        assert sum(bool(chunk.tool_call_chunks) for chunk in chunks if isinstance(chunk, AIMessageChunk)) > 2
    result = ToolMessage("fine", tool_call_id=call["id"])
    assert chat.bind_tools([Trip], tool_choice="Trip").invoke([*question, answer, result]).tool_calls  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_answers_through_langchain(loaded: Any, method: Any) -> None:
    chat = ChatAsyncEngine(model=loaded[1], engine_config=CONFIG, **SETTINGS)
    assert isinstance(chat.with_structured_output(Trip, method=method).invoke("Where to?"), Trip)


def test_calls_and_structured_answers_through_llama_index(loaded: Any) -> None:
    llm = LlamaLLM(model=loaded[1], engine_config=CONFIG, model_kwargs={"on_budget": "offer"}, **SETTINGS)
    assert llm.metadata.is_function_calling_model

    def trip(city: str, days: int) -> str:
        """Plan a trip."""
        return f"{city} {days}"

    tool = FunctionTool.from_defaults(trip)
    response = llm.chat_with_tools([tool], "Where to?", tool_required=True)
    (selection,) = llm.get_tool_calls_from_response(response)
    assert selection.tool_name == "trip"
    assert isinstance(selection.tool_kwargs["city"], str)
    assert isinstance(selection.tool_kwargs["days"], int)
    assert isinstance(llm.as_structured_llm(Trip).complete("Where to?").raw, Trip)
