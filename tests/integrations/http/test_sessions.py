"""Sessions by requests: each dialect's name of one, a session that is closed, and an agent's conversation.

The conversation has the shape that Claude Code sends to /v1/messages: a system prompt below a line whose value changes
with every request, tools, thoughts, calls with their results, and a `cache_control` mark on the newest message alone.
Every turn must find what was said before it in the cache, whatever changes around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.http_server import serving_models

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app
from asyncengine.integrations.http.dialects import anthropic_messages
from asyncengine.integrations.http.fields import Fields

USER = [{"role": "user", "content": "Hello!"}]
ENGINES: list[AsyncEngine] = []


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_models({"demo": "demo"}) as (url, engines):
        ENGINES[:] = engines.values()
        yield url


def known() -> list[str]:
    return list(ENGINES[0].core.loop.scheduler.roster.sessions._branches)


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


MARK = {"cache_control": {"type": "ephemeral"}}
TURNS = 8


def bodies() -> Iterator[dict[str, Any]]:
    """The body of each request."""
    path = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools = [{"name": name, "description": "Works on files. " * 8, "input_schema": path} for name in ("Read", "Edit")]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Mend the parser."}]}]
    for turn in range(TURNS):
        head = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn + 7:05x};"
        *before, last = messages
        newest = {**last, "content": [*last["content"][:-1], last["content"][-1] | MARK]}
        yield {
            "model": "demo", "max_tokens": 4, "temperature": 0, "tools": tools, "messages": [*before, newest],
            "system": [{"type": "text", "text": head}, {"type": "text", "text": "You are an agent. " * 20} | MARK],
        }  # fmt: skip
        calls = [
            {"type": "tool_use", "id": f"toolu_{turn}{n}", "name": "Read", "input": {"path": f"{turn}.py"}}
            for n in range(turn % 3)
        ]
        thought = {"type": "thinking", "thinking": f"It is file {turn}.", "signature": "unsigned"}
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": f"{turn} of the lines\n" * 4}
            for call in calls
        ]
        messages.append({"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, *calls]})
        messages.append({"role": "user", "content": results or [{"type": "text", "text": f"Go on, for the {turn}th."}]})


async def test_all_that_is_said_again_is_cached() -> None:
    """Repeated tokens of a prompt are those up to where it differs from the prompt before it."""
    before, repeated, prompts = list[int](), 0, list[int]()
    async with await AsyncEngine.from_pretrained("demo", show_progress=False, num_threads=1) as engine:
        transport = httpx.ASGITransport(app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://agent", timeout=600) as client:
            for body in bodies():
                turn = anthropic_messages.read(Fields(body))
                assert turn.messages is not None
                ids = engine.tokenize(turn.messages, tools=turn.chat["tools"])
                again = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, before, strict=False))))
                usage = (await client.post("/v1/messages", json=body)).raise_for_status().json()["usage"]
                assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(ids), "as it was counted"
                assert usage["cache_read_input_tokens"] > again - 16, "pages are whole"
                before, repeated = ids, repeated + again
                prompts.append(len(ids))
        computed = engine.stats().computed_tokens
    assert repeated > 0.8 * sum(prompts[:-1])
    assert computed < prompts[-1] + TURNS * (16 + 4), "the newest words, and a page's rest in each turn"
