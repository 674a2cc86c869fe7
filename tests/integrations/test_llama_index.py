"""Conformance to LlamaIndex's LLM contract, which ships no suite of its own (reference: its base classes)."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.base import BaseEvent
from pydantic import Field

from asyncengine import EngineHandle, SamplingParams
from asyncengine.errors import AdapterNotFound, ContextLengthExceeded, InvalidParameter, RequestTimeout
from asyncengine.integrations.llama_index import AsyncEngineLLM

from .conftest import CONFIG, CONTEXT, LONG, TOKENS
from .peak import slowed

HELLO = [ChatMessage("Hello")]
Make = Callable[..., AsyncEngineLLM]


@pytest.fixture
def make(model_path: str, handle: EngineHandle) -> Make:
    def make(**fields: Any) -> AsyncEngineLLM:
        return AsyncEngineLLM(
            **{"model": model_path, "engine_config": CONFIG, "temperature": 0.0, "max_tokens": TOKENS, **fields}
        )

    return make


@pytest.fixture
def llm(make: Make) -> AsyncEngineLLM:
    return make()


async def test_stream_kinds_and_delta_semantics(llm: AsyncEngineLLM) -> None:
    chats, texts = llm.stream_chat(HELLO), llm.stream_complete("Hello")
    assert isinstance(chats, Generator)
    assert isinstance(texts, Generator)
    later = await llm.astream_chat(HELLO)
    assert isinstance(later, AsyncGenerator)
    so_far = ""
    for part in chats:
        assert part.delta is not None
        so_far += part.delta
        assert part.message.content == so_far
        assert part.message.role is MessageRole.ASSISTANT
    so_far = ""
    for text in texts:
        so_far += text.delta or ""
        assert text.text == so_far
    so_far = ""
    async for part in later:
        so_far += part.delta or ""
        assert part.message.content == so_far


async def test_raw_usage_and_logprobs(make: Make) -> None:
    llm = make(max_tokens=5, top_logprobs=2)
    whole, last = llm.chat(HELLO), list(llm.stream_chat(HELLO))[-1]
    for response in (whole, last, await llm.achat(HELLO), [part async for part in await llm.astream_chat(HELLO)][-1]):
        assert isinstance(response.raw, dict)
        assert response.raw["finish_reason"] == "length"
        assert response.raw["model"] == llm.model
        usage = response.raw["usage"]
        assert usage["completion_tokens"] == 5
        assert usage["total_tokens"] == usage["prompt_tokens"] + 5
        assert response.logprobs is not None
        assert "".join(position[0].token for position in response.logprobs) == response.message.content
        assert all(len(position) == 3 for position in response.logprobs)
    for part in make(max_tokens=40).stream_chat(HELLO):  # as many parts as the reader is quick for, one at least
        assert isinstance(part.raw, dict)
        assert ("usage" in part.raw) == (part.raw.get("finish_reason") is not None)


async def test_formatted_prompts_are_sent_as_they_are(llm: AsyncEngineLLM, handle: EngineHandle) -> None:
    raw = handle.get().generate("Once", SamplingParams(temperature=0, max_tokens=10)).text
    assert llm.complete("Once", formatted=True).text == raw
    assert (await llm.acomplete("Once", formatted=True)).text == raw
    assert list(llm.stream_complete("Once", formatted=True))[-1].text == raw
    assert [part async for part in await llm.astream_complete("Once", formatted=True)][-1].text == raw
    assert llm.complete("Once").text != raw


def test_a_text_model_gets_texts(make: Make, handle: EngineHandle) -> None:
    engine, params = handle.get(), SamplingParams(temperature=0, max_tokens=10)
    llm = make(is_chat_model=False)
    assert llm.complete("Once").text == engine.generate("Once", params).text
    assert llm.chat(HELLO).message.content == engine.generate(llm.messages_to_prompt(HELLO), params).text  # type: ignore[misc]
    wrapped = make(completion_to_prompt=lambda prompt: f"<<{prompt}>>")
    assert wrapped.complete("Once").text == engine.generate("<<Once>>", params).text


def test_metadata(make: Make) -> None:
    metadata = make(max_tokens=33).metadata
    assert metadata.context_window == CONTEXT
    assert metadata.num_output == 33
    assert metadata.is_chat_model
    assert make(context_window=99).metadata.context_window == 99
    assert make(max_tokens=None).metadata.num_output == 256
    assert metadata.model_name == make().model


def test_what_observers_are_told_loads_nothing() -> None:
    llm = AsyncEngineLLM(model="/no/such/folder", temperature=0.5)
    assert llm.to_payload() == {"class_name": "AsyncEngine_llm", "model_name": "/no/such/folder", "temperature": 0.5}


class Heard(BaseEventHandler):
    names: list[str] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "Heard"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.names.append(type(event).__name__)


async def test_instrumentation_events(llm: AsyncEngineLLM) -> None:
    heard, dispatcher = Heard(), get_dispatcher()
    dispatcher.add_event_handler(heard)
    try:
        await llm.achat(HELLO)
        assert heard.names == ["LLMChatStartEvent", "LLMChatEndEvent"]
        heard.names.clear()
        parts = [part async for part in await llm.astream_chat(HELLO)]
        assert heard.names.count("LLMChatInProgressEvent") == len(parts)
        assert heard.names[-1] == "LLMChatEndEvent"
        heard.names.clear()
        llm.complete("Hello")
        assert heard.names == ["LLMCompletionStartEvent", "LLMCompletionEndEvent"]
    finally:
        dispatcher.event_handlers.remove(heard)


async def test_per_call_keywords_and_refusals(llm: AsyncEngineLLM) -> None:
    assert llm.complete("Hello", max_tokens=2).raw["usage"]["completion_tokens"] == 2  # type: ignore[index]
    with pytest.raises(InvalidParameter, match=r"max_tokns.*max_tokens"):
        llm.complete("Hello", max_tokns=2)
    with pytest.raises(InvalidParameter, match="n: must be 1"):
        await llm.acomplete("Hello", n=2)
    with pytest.raises(AdapterNotFound):
        llm.chat(HELLO, adapter="no-such-adapter")
    with pytest.raises(ContextLengthExceeded):
        await llm.achat([ChatMessage("x" * 5000)])
    with pytest.raises(InvalidParameter, match="image"):
        llm.chat([ChatMessage([{"block_type": "image", "image": b"AAAA", "image_mimetype": "image/png"}])])


async def test_a_deadline_raises_with_the_partial_text(make: Make, handle: EngineHandle) -> None:
    llm = make(**LONG, timeout=0.05)
    parts = [""]

    async def read() -> None:
        async for part in await llm.astream_chat(HELLO):
            parts.append(part.message.content or "")

    with slowed(handle):
        with pytest.raises(RequestTimeout):
            llm.complete("Hello")
        with pytest.raises(RequestTimeout):
            await llm.achat(HELLO)
        with pytest.raises(RequestTimeout) as caught:
            await read()
    assert caught.value.partial == parts[-1]


def test_serialization_leaves_the_engine_out(make: Make, handle: EngineHandle) -> None:
    llm = make(additional_kwargs={"min_tokens": 2}, seed=4)
    data = json.loads(llm.to_json())
    assert "engine" not in data
    assert data["class_name"] == "AsyncEngine_llm"
    for twin in (AsyncEngineLLM.from_dict(data), pickle.loads(pickle.dumps(llm))):
        assert (twin.seed, twin.additional_kwargs, twin.engine_config) == (4, {"min_tokens": 2}, CONFIG)
        assert twin.complete("Hello").text == llm.complete("Hello").text
    with pytest.raises(TypeError, match="explicit engine"):
        pickle.dumps(AsyncEngineLLM(engine=handle))


# -------------------------------------------------------------------- LoRA adapters


@pytest.mark.usefixtures("loaded_adapters")
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


def test_what_observers_are_told_of_an_adapter(make: Make) -> None:
    llm = make(adapter="first", context_window=500, is_chat_model=True, is_function_calling_model=False)
    assert llm.model_name == llm.metadata.model_name == "first"
    assert llm.to_payload()["model_name"] == "first"
