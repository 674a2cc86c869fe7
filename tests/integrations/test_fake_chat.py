"""`testing.FakeChat`: given answers through every way in that an application has, and no model behind them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import fastapi
import httpx
import pytest
from fastapi.responses import StreamingResponse
from support.fake_engine import until

from asyncengine import Engine, SamplingParams, submitted
from asyncengine.errors import EngineClosed, InvalidParameter, QueueFull
from asyncengine.integrations.langchain import ChatAsyncEngine
from asyncengine.testing import FakeChat, assert_nothing_held

QUESTION = [{"role": "user", "content": "Will it rain in Oslo?"}]
CALL = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}


def weather(city: str, days: int) -> str:
    """Forecast for a city."""
    return f"rain in {city} for {days} days"


async def test_texts_calls_and_functions_in_process() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    offered: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": schema}}]}
    async with FakeChat(["Ja, på Ærø. 東京!", ["Let me see.", CALL, CALL], CALL, "one two three", "{}"]) as engine:
        assert (await engine.chat(QUESTION)).text == "Ja, på Ærø. 東京!"
        several = await engine.chat(QUESTION, **offered)
        assert (several.text, several.finish_reason) == ("Let me see.", "tool_calls")
        assert [(call.name, call.arguments) for call in several.tool_calls] == 2 * [
            ("weather", '{"city": "Oslo", "days": 2}')
        ]
        with pytest.raises(AssertionError, match="was to call 'weather', and the request offers"):
            await engine.chat(QUESTION)
        streamed = [chunk.text async for chunk in engine.stream_chat(QUESTION, SamplingParams(stop=[" three"]))]
        assert "".join(streamed) == "one two"
        assert (await engine.generate("Once", SamplingParams(max_tokens=1))).finish_reason == "length"
        with pytest.raises(AssertionError, match=r"no answer left for .*Once"):
            await engine.generate("Once")
        assert [messages[-1]["content"] for messages in engine.asked[-2:]] == ["Once", "Once"]
        assert_nothing_held(engine.core)
    with pytest.raises(EngineClosed):
        await engine.chat(QUESTION)
    echo = FakeChat(lambda messages: messages[-1]["content"].upper())
    assert Engine(echo).chat(QUESTION).text == "WILL IT RAIN IN OSLO?"
    await echo.aclose()


async def test_a_full_queue_is_known_before_an_event_stream_begins() -> None:
    """The handler of docs/howto/fastapi.md, over HTTP: 429 and no broken stream; who leaves is forgotten."""
    async with FakeChat(["one two", "three four five six", "seven"], max_queued_requests=1) as engine:
        chat, app = ChatAsyncEngine(engine=engine), fastapi.FastAPI()

        @app.get("/events")
        async def events(question: str) -> StreamingResponse:
            try:
                chunks = await submitted(chat.astream(question))
            except QueueFull as error:
                raise fastapi.HTTPException(429, str(error)) from error
            return StreamingResponse(f"data: {json.dumps(each.text)}\n\n" async for each in chunks)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
            await engine.pause()
            first = asyncio.create_task(client.get("/events", params={"question": "one?"}))
            await until(lambda: engine.stats().requests["waiting"] == 1)
            assert (await client.get("/events", params={"question": "two?"})).status_code == 429
            await engine.resume()
            found = await first
            assert found.status_code == 200
            assert "".join(json.loads(line[6:]) for line in found.text.split("\n\n") if line) == "one two"
        chunks = await submitted(engine.stream_chat(QUESTION))
        await chunks.aclose()
        await until(lambda: not any(engine.stats().requests.values()))
        assert_nothing_held(engine.core)
    with pytest.raises(EngineClosed):
        await submitted(engine.stream_chat(QUESTION))


def test_many_chats_at_once_tell_their_progress(capsys: pytest.CaptureFixture[str]) -> None:
    counts: list[tuple[int, int]] = []
    with Engine(FakeChat(lambda messages: messages[-1]["content"])) as engine:
        chats = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
        answers = engine.chat_many(chats, progress=lambda *now: counts.append(now))
        assert [answer.text for answer in answers] == ["one", "two", "three"]
        assert counts == [(1, 3), (2, 3), (3, 3)]
        assert len(engine.chat_many(chats, progress=True)) == 3
        assert capsys.readouterr().err == "", "a line comes after ten seconds"
        with pytest.raises(InvalidParameter, match=r"^chats\[1\]\[0\]"):
            engine.chat_many([chats[0], ["no message"]])  # type: ignore[list-item]


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from asyncengine import Engine; from asyncengine.testing import FakeChat\n"
        "with Engine(FakeChat(['Hello.'])) as engine: print(engine.generate('Hi').text)\n"
        "print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "Hello.\n[]\n"
