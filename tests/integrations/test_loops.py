"""One model object from every kind of caller: no loop, many loops one after the other, several at once, any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from llama_index.core.async_utils import asyncio_run
from llama_index.core.llms import ChatMessage

from asyncengine import EngineHandle
from asyncengine.integrations.llama_index import AsyncEngineLLM as LlamaIndexLLM

from .conftest import CONFIG
from .peak import peak_running


@dataclass
class Asker:
    """One framework's model object, asked the same question four ways; each gives the answer's text."""

    sync: Callable[[], str]
    later: Callable[[], Coroutine[Any, Any, str]]
    stream: Callable[[], str]
    astream: Callable[[], Coroutine[Any, Any, str]]


def langchain_asker(chat: Any) -> Asker:
    async def later() -> str:
        return str((await chat.ainvoke("Hello")).text)

    async def astream() -> str:
        return "".join([chunk.text async for chunk in chat.astream("Hello")])

    return Asker(
        lambda: str(chat.invoke("Hello").text), later, lambda: "".join(c.text for c in chat.stream("Hello")), astream
    )


def llama_index_asker(llm: LlamaIndexLLM) -> Asker:
    hello = [ChatMessage("Hello")]

    async def later() -> str:
        return str((await llm.achat(hello)).message.content)

    async def astream() -> str:
        return "".join([part.delta or "" async for part in await llm.astream_chat(hello)])

    return Asker(
        lambda: str(llm.chat(hello).message.content),
        later,
        lambda: "".join(part.delta or "" for part in llm.stream_chat(hello)),
        astream,
    )


@pytest.fixture(params=["langchain", "llama_index"])
def asker(request: pytest.FixtureRequest, make_chat: Any, model_path: str) -> Asker:
    if request.param == "langchain":
        return langchain_asker(make_chat(max_tokens=10))
    return llama_index_asker(LlamaIndexLLM(model=model_path, engine_config=CONFIG, temperature=0, max_tokens=10))


def test_two_loops_and_a_plain_thread_at_once(asker: Asker, handle: EngineHandle) -> None:
    text, together = asker.sync(), threading.Barrier(3)

    async def many(ask: Callable[[], Awaitable[str]]) -> list[str]:
        together.wait(120)
        return list(await asyncio.gather(*(ask() for _ in range(8))))

    def plain() -> list[str]:
        together.wait(120)
        return [asker.sync(), asker.stream()]

    with ThreadPoolExecutor(3) as pool, peak_running(handle, 2) as peak:
        jobs = [
            pool.submit(lambda: asyncio.run(many(asker.later))),
            pool.submit(lambda: asyncio.run(many(asker.astream))),
            pool.submit(plain),
        ]
        answers = [answer for job in jobs for answer in job.result(300)]
    assert answers == [text] * 18
    assert peak.rows > 1


async def test_sync_calls_inside_a_coroutine(asker: Asker) -> None:
    text = asker.sync()
    assert asker.stream() == text
    assert await asker.later() == text
    # What LlamaIndex does for `query()` in a coroutine: a new loop in a new thread, while this loop is blocked.
    assert asyncio_run(asker.later()) == text
    assert asker.sync() == await asker.astream() == text
