"""Clients that leave or read slowly, and engines that close: nobody's pages stay, nobody waits for ever."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from support.http_server import serving

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.integrations.http import answer, app, server

PATH = "/v1/chat/completions"


def body(number: int = 0, **fields: Any) -> dict[str, Any]:
    text = f"Tell me about city {number} and its rivers."
    return {
        "model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 1000, "ignore_eos": True,
        "stream": True, **fields,
    }  # fmt: skip


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    settings: dict[str, Any] = {"show_progress": False, "kv_cache_memory": "32MiB", "speculation": "off"}
    async with await AsyncEngine.from_pretrained("demo", **settings) as engine:
        yield engine


async def come(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.001)


def idle(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    return not sum(stats.requests.values()) and not (stats.pages.held or stats.pages.shared or stats.pages.retiring)


async def connect(url: str, content: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A socket on which a request has been sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request_of(content))
    await writer.drain()
    return reader, writer


def request_of(content: dict[str, Any]) -> bytes:
    sent = json.dumps(content).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    return head.encode() + sent


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("half_closed", [True, False])
async def test_a_request_ends_with_its_connection(engine: AsyncEngine, streaming: bool, half_closed: bool) -> None:
    async with serving(app(engine)) as url:
        _, writer = await connect(url, body(stream=streaming))
        await come(lambda: engine.stats().requests["running"] == 1)
        steps = engine.stats().steps
        if half_closed:
            writer.write_eof()
        else:
            writer.transport.abort()
        await come(lambda: idle(engine))
        assert engine.stats().finished["abort"] == 1
        assert engine.stats().steps < steps + 900, "it ran to its end"
        writer.close()


async def test_a_slow_reader_gets_everything_and_holds_little(engine: AsyncEngine) -> None:
    """Its connection is full after a while; from then on the engine's mailbox merges what it does not take."""
    async with serving(app(engine)) as url:
        reader, writer = await connect(url, body(max_tokens=700, temperature=0))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await come(lambda: engine.stats().finished.get("length") == 1)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += await reader.read(1 << 16)
        writer.close()
    frames = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
    texts = [json.loads(frame)["choices"][0]["delta"].get("content") or "" for frame in frames]
    params = SamplingParams(temperature=0, max_tokens=700, ignore_eos=True)
    whole = await engine.chat(body()["messages"], params)
    assert "".join(texts) == whole.text


async def test_who_never_reads_is_not_computed_and_loses_the_connection(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more is computed than the client's connection and the mailbox hold."""
    monkeypatch.setattr(server, "WRITE_SECONDS", 3.0)
    samples = 8
    async with serving(app(engine)) as url:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(request_of(body(n=samples, max_tokens=1000)))
        await come(lambda: engine.stats().requests["suspended"] == samples)
        computed = engine.stats().generated_tokens
        assert computed < samples * 1000 / 2, "it was computed in spite of its reader"
        await come(lambda: idle(engine))
        assert engine.stats().finished == {"abort": samples}
        assert engine.stats().generated_tokens <= computed + samples
        client.close()


async def test_a_closing_engine_ends_streams_with_an_error(engine: AsyncEngine) -> None:
    async with serving(app(engine)) as url, httpx.AsyncClient() as client:
        async with client.stream("POST", url + PATH, json=body()) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await engine.aclose()
            rest = [line async for line in lines if line.startswith("data: {")]
        assert json.loads(rest[-1][6:])["error"]["code"] == "aborted"
        refused = await client.post(url + PATH, json=body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_signs_of_life_before_the_first_token(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "PING_SECONDS", 0.0)
    async with serving(app(engine)) as url, httpx.AsyncClient() as client:
        response = await client.post(url + PATH, json=body(max_tokens=3))
    assert response.text.startswith(": still there\n\n")
    assert response.text.endswith("data: [DONE]\n\n")


async def test_an_error_before_the_first_token_is_a_status(engine: AsyncEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 5, "maxLength": 2}},
        "required": ["a"],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    async with serving(app(engine)) as url, httpx.AsyncClient() as client:
        response = await client.post(url + PATH, json=body(response_format=wanted))
    assert response.status_code == 400, response.text
    assert "error" in response.json()
