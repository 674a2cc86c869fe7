"""However a caller leaves, the engine drops the request and everything it held comes back.

No test waits by the clock: each leaves as soon as the engine reports the request running, and then asks the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from llama_index.core.llms import ChatMessage

from asyncengine import shared_engine
from asyncengine.integrations.langchain import AsyncEngineLLM, ChatAsyncEngine
from asyncengine.integrations.llama_index import AsyncEngineLLM as LlamaIndexLLM

from .conftest import CONFIG, LONG, Watch

HELLO = [ChatMessage("Hello")]


@pytest.fixture
def chat(make_chat: Callable[..., ChatAsyncEngine]) -> ChatAsyncEngine:
    return make_chat(**LONG)


@pytest.fixture
def text(make_llm: Callable[..., AsyncEngineLLM]) -> AsyncEngineLLM:
    return make_llm(**LONG)


@pytest.fixture
def llama(model_path: str, watch: Watch) -> LlamaIndexLLM:
    return LlamaIndexLLM(model=model_path, engine_config=CONFIG, temperature=0, **LONG)


@pytest.fixture(params=["ainvoke", "llm.ainvoke", "achat", "acomplete", "astream", "llm.astream", "astream_chat"])
def call(request: pytest.FixtureRequest, chat: Any, text: Any, llama: Any) -> Callable[[], Any]:
    """A coroutine function that would run to the end of a long answer."""

    async def drain(stream: AsyncIterator[Any]) -> None:
        async for _ in stream:
            pass

    async def llama_stream() -> None:
        await drain(await llama.astream_chat(HELLO))

    return {
        "ainvoke": lambda: chat.ainvoke("Hello"),
        "llm.ainvoke": lambda: text.ainvoke("Hello"),
        "achat": lambda: llama.achat(HELLO),
        "acomplete": lambda: llama.acomplete("Hello"),
        "astream": lambda: drain(chat.astream("Hello")),
        "llm.astream": lambda: drain(text.astream("Hello")),
        "astream_chat": llama_stream,
    }[request.param]


async def test_task_cancel(call: Callable[[], Any], watch: Watch) -> None:
    task = asyncio.ensure_future(call())
    await watch.until_running()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await watch.assert_aborted()


async def test_anyio_scope(call: Callable[[], Any], watch: Watch) -> None:
    """A cancelled anyio scope raises again at every await, also inside `finally` blocks."""
    with anyio.move_on_after(600) as scope:
        trigger = asyncio.ensure_future(watch.until_running())
        trigger.add_done_callback(lambda _: scope.cancel())
        await call()
    assert scope.cancelled_caught
    await watch.assert_aborted()


async def test_cancelling_one_leaves_the_others_alone(chat: ChatAsyncEngine, watch: Watch) -> None:
    expected = (await chat.ainvoke("Hello 1", max_tokens=300)).content
    tasks = [asyncio.ensure_future(chat.ainvoke(f"Hello {i}", max_tokens=700 - 400 * i)) for i in range(2)]
    await watch.until_running(2)
    tasks[0].cancel()
    watch.release()
    assert (await tasks[1]).content == expected
    await watch.assert_aborted()


@pytest.fixture(params=["astream", "llm.astream", "astream_chat", "astream_complete"])
def stream(request: pytest.FixtureRequest, chat: Any, text: Any, llama: Any, watch: Watch) -> Callable[[], Any]:
    """A coroutine function that gives a long stream, which can't end before it is left."""
    watch.hold()

    async def ready(stream: Any) -> Any:
        return stream

    return {
        "astream": lambda: ready(chat.astream("Hello")),
        "llm.astream": lambda: ready(text.astream("Hello")),
        "astream_chat": lambda: llama.astream_chat(HELLO),
        "astream_complete": lambda: llama.astream_complete("Hello"),
    }[request.param]


async def test_break(stream: Callable[[], Any], watch: Watch) -> None:
    async for _ in await stream():
        break
    await watch.assert_aborted()


async def test_aclose(stream: Callable[[], Any], watch: Watch) -> None:
    async with aclosing(await stream()) as chunks:
        await anext(chunks)
    await watch.assert_aborted()


async def test_a_stream_never_started_costs_nothing(stream: Callable[[], Any], watch: Watch) -> None:
    await (await stream()).aclose()
    await watch.assert_all_given_back()
    assert watch.ended("abort") == 0


@pytest.mark.parametrize("name", ["stream", "llm.stream", "stream_chat", "stream_complete"])
async def test_break_out_of_a_sync_stream(name: str, chat: Any, text: Any, llama: Any, watch: Watch) -> None:
    chunks = {
        "stream": lambda: chat.stream("Hello"),
        "llm.stream": lambda: text.stream("Hello"),
        "stream_chat": lambda: llama.stream_chat(HELLO),
        "stream_complete": lambda: llama.stream_complete("Hello"),
    }[name]()
    watch.hold()
    next(chunks)
    chunks.close()
    await watch.assert_aborted()


async def test_leaving_v2_stream_events(chat: ChatAsyncEngine, watch: Watch) -> None:
    watch.hold()
    async with aclosing(chat.astream_events("Hello", version="v2")) as events:  # type: ignore[type-var]
        async for event in events:
            if event["event"] == "on_chat_model_stream":
                break
    await watch.assert_aborted()


async def test_cancelling_while_the_model_loads_spares_the_others(model_path: str) -> None:
    """Two calls wait for one load; one of them leaves."""
    own = {**CONFIG, "max_num_seqs": 5}
    chat = ChatAsyncEngine(model=model_path, engine_config=own, **LONG | {"max_tokens": 2})
    probe = shared_engine(model_path, **own)
    leaver = asyncio.ensure_future(chat.aget_engine())
    await asyncio.sleep(0)  # it asks for the load in its first step
    assert not probe.loaded
    stayer = asyncio.ensure_future(chat.ainvoke("Hello"))
    leaver.cancel()
    assert (await stayer).usage_metadata["output_tokens"] == 2  # type: ignore[index]
    with pytest.raises(asyncio.CancelledError):
        await leaver
    probe.close()
