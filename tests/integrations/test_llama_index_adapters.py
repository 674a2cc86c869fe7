"""LlamaIndex: which LoRA adapter answers, how a call says so, and what is told about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage

from asyncengine.integrations.llama_index import AsyncEngineLLM

from .conftest import CONFIG, TOKENS

HELLO = [ChatMessage("Hello")]
Make = Callable[..., AsyncEngineLLM]

pytestmark = pytest.mark.usefixtures("loaded_adapters")


@pytest.fixture
def make(model_path: str) -> Make:
    def make(**fields: Any) -> AsyncEngineLLM:
        return AsyncEngineLLM(
            **{"model": model_path, "engine_config": CONFIG, "temperature": 0.0, "max_tokens": TOKENS, **fields}
        )

    return make


async def test_eight_calls_take_the_adapter(make: Make, answers: dict[str | None, str]) -> None:
    """The adapter is named by a field, and by a keyword on top of another one's field."""
    for llm, kwargs in ((make(adapter="first"), {}), (make(adapter="second"), {"model": "first"})):
        responses: list[Any] = [
            llm.chat(HELLO, **kwargs),
            await llm.achat(HELLO, **kwargs),
            list(llm.stream_chat(HELLO, **kwargs))[-1],
            [part async for part in await llm.astream_chat(HELLO, **kwargs)][-1],
            llm.complete("Hello", **kwargs),
            await llm.acomplete("Hello", **kwargs),
            list(llm.stream_complete("Hello", **kwargs))[-1],
            [part async for part in await llm.astream_complete("Hello", **kwargs)][-1],
        ]
        for response in responses:
            text = response.text if hasattr(response, "text") else response.message.content
            assert text == answers["first"]
            assert response.raw["model"] == "first"


def test_what_observers_are_told(make: Make) -> None:
    llm = make(adapter="first", context_window=500, is_chat_model=True, is_function_calling_model=False)
    assert llm.model_name == llm.metadata.model_name == "first"
    assert llm.to_payload()["model_name"] == "first"
