"""Sessions by requests: each dialect's name of one, and a session that is closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.applications import Starlette
from support.http_server import serving_thread

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app

USER = [{"role": "user", "content": "Hello!"}]
engines: list[AsyncEngine] = []


@asynccontextmanager
async def demo_app() -> AsyncIterator[Starlette]:
    async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
        engines.append(engine)
        yield app(engine)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_thread(demo_app) as url:
        yield url


def known() -> list[str]:
    return list(engines[-1].core.loop.scheduler.roster.sessions._branches)


def test_official_clients_name_sessions(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-")
    messages: Any = USER
    client.chat.completions.create(model="demo", messages=messages, max_tokens=2, prompt_cache_key="chat")
    assert known()[-1] == "chat"
    client.completions.create(model="demo", prompt="Hello", max_tokens=2, extra_body={"session_id": "text"})
    assert known()[-1] == "text"
    answer = client.responses.create(model="demo", input="Hello", max_output_tokens=2, prompt_cache_key="response")
    assert (known()[-1], answer.prompt_cache_key) == ("response", "response")
    more = {"session_id": "other"}
    client.responses.create(model="demo", input="Hi", max_output_tokens=2, prompt_cache_key="k", extra_body=more)
    assert known()[-1] == "other"
    claude = anthropic.Anthropic(base_url=url, api_key="-")
    claude.messages.create(model="demo", messages=messages, max_tokens=2, metadata={"user_id": "claude"})
    assert known() == ["chat", "text", "response", "other", "claude"]


def test_a_session_is_closed(url: str) -> None:
    httpx.post(f"{url}/v1/chat/completions", json={"messages": USER, "max_tokens": 2, "session_id": "short"})
    assert "short" in known()
    assert httpx.post(f"{url}/close_session", json={"session_id": "short"}).status_code == 200
    httpx.post(f"{url}/v1/chat/completions", json={"messages": USER, "max_tokens": 2})
    assert "short" not in known()
    assert httpx.post(f"{url}/close_session", json={}).status_code == 400
