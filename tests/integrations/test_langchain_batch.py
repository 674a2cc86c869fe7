"""Many LangChain calls at once, from one thread or one loop: all of them wait in the engine, in one batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError

from asyncengine import EngineHandle
from asyncengine.integrations.langchain import ChatAsyncEngine

from .peak import peak_running

Make = Callable[..., ChatAsyncEngine]


class AllAtOnce(BaseCallbackHandler):
    """Lets no call go on before `count` calls have started: fewer at once fail by the barrier's timeout."""

    raise_error = True

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.barrier.wait(120)


class AllAtOnceAsync(AsyncCallbackHandler):
    raise_error = True

    def __init__(self, count: int) -> None:
        self.barrier = asyncio.Barrier(count)

    async def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        await asyncio.wait_for(self.barrier.wait(), 120)


async def test_batch_runs_together_and_keeps_order(make_chat: Make, handle: EngineHandle) -> None:
    chat = make_chat(max_tokens=48)
    prompts = [f"Tell me about the number {i}." for i in range(32)]
    with peak_running(handle, 7) as peak:
        answers = [answer.content for answer in chat.batch(prompts, {"callbacks": [AllAtOnce(32)]})]
    assert peak.rows > 6
    assert len(set(answers)) > 1
    assert answers[7] == chat.invoke(prompts[7]).content
    with peak_running(handle, 7) as peak:
        assert [a.content for a in await chat.abatch(prompts, {"callbacks": [AllAtOnceAsync(32)]})] == answers
    assert peak.rows > 6
    done = dict(chat.batch_as_completed(prompts, {"callbacks": [AllAtOnce(32)]}))
    assert [done[i].content for i in range(32)] == answers  # type: ignore[union-attr]


def test_batch_returns_exceptions_beside_answers(chat: ChatAsyncEngine) -> None:
    answers: list[Any] = chat.batch(["fine", "x" * 5000, "fine"], return_exceptions=True)
    assert answers[0].content == answers[2].content
    assert isinstance(answers[1], ContextOverflowError)
    with pytest.raises(ContextOverflowError):
        chat.batch(["fine", "x" * 5000])
    assert chat.batch([]) == []
