"""256 streams at once on the bundled model, through LangChain; every tenth leaves early and disturbs no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk
from support.fake_engine import posted, until
from support.held_steps import HeldSteps

from asyncengine import AsyncEngine
from asyncengine.integrations.langchain import ChatAsyncEngine

STREAMS = 256
SETTINGS: dict[str, Any] = {
    "dtype": "float32",  # a near tie could fall the other way in a batch of another shape
    "num_threads": 1,
    "max_num_seqs": STREAMS,
    "kv_cache_memory": "256MiB",
}
RULES = "You are a helpful assistant. Answer the question in one short sentence, politely, and do not repeat yourself."
"""Longer than a page, so that all streams have a prefix to share."""


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with await AsyncEngine.from_pretrained("demo", hosted=True, **SETTINGS) as engine:
        yield engine


def prompt(number: int) -> list[tuple[str, str]]:
    return [("system", RULES), ("human", f"Count from {number} to {number + 8}.")]


def submitted(engine: AsyncEngine) -> int:
    """Requests that have come to the engine and not ended, whether it has seen them or not."""
    return len(engine.core.loop.scheduler.requests) + len(posted(engine))


async def test_every_tenth_leaves_and_nobody_else_notices(engine: AsyncEngine) -> None:
    chat = ChatAsyncEngine(engine=engine, temperature=0, max_tokens=24)
    running = 0

    def hook(event: object) -> None:
        nonlocal running
        running = max(running, getattr(event, "rows", 0))

    engine.on_event(hook)
    with HeldSteps(engine):
        batch = asyncio.create_task(chat.abatch([prompt(number) for number in range(STREAMS)]))
        await until(lambda: submitted(engine) == STREAMS)
    alone = [answer.content for answer in await batch]
    assert running > STREAMS // 2
    assert len(set(alone)) > STREAMS // 2

    began: set[int] = set()

    async def read(number: int) -> str:
        parts: list[AIMessageChunk] = []
        async for part in chat.astream(prompt(number)):
            parts.append(part)
            began.add(number)
        return "".join(str(part.content) for part in parts)

    leavers = range(0, STREAMS, 10)
    with HeldSteps(engine):
        tasks = [asyncio.create_task(read(number)) for number in range(STREAMS)]
        await until(lambda: submitted(engine) == STREAMS)
    with HeldSteps(engine, after=3) as held:  # no answer is so short
        await until(lambda: held.reached.is_set() and bool(began))
        for number in leavers:
            tasks[number].cancel()
        await asyncio.wait([tasks[number] for number in leavers])
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    for number, answer in enumerate(answers):
        if number in leavers:
            assert isinstance(answer, asyncio.CancelledError)
        else:
            assert answer == alone[number]

    # One more request: when it has ended, every abort before it has been applied.
    (last,) = await chat.abatch([prompt(1)])
    assert last.content == alone[1]
    assert last.usage_metadata["input_token_details"]["cache_read"] >= 16
    stats = engine.stats()
    assert not any(stats.requests.values())
    assert stats.finished["abort"] == len(leavers)
    assert stats.pages.free + stats.pages.cached == stats.pages.total
