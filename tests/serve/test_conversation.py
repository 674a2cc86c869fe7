"""An agent's conversation over /v1/messages: whatever two turns share is computed once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
from support.http_server import serving

from asyncengine import AsyncEngine
from asyncengine.serve import app
from asyncengine.stream import TokenStream

TURNS = 10
PAGE = 16
TOOLS = [
    {
        "name": f"tool_{number}",
        "description": f"Looks at part {number} of the house.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        **({"cache_control": {"type": "ephemeral"}} if number == 2 else {}),
    }
    for number in range(3)
]


def system(turn: int) -> list[dict[str, Any]]:
    """A system prompt with the head that Claude Code changes with every request."""
    head = f"x-anthropic-billing-header: cc_version=2.1.37.3a9; cc_entrypoint=cli; cch={turn * 7919 % 99991:05x};"
    return [
        {"type": "text", "text": head},
        {"type": "text", "text": "You help with a house.", "cache_control": {"type": "ephemeral"}},
    ]


def turn(number: int) -> list[dict[str, Any]]:
    """A call of a tool, its result and what was said of it, as a recording has them."""
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "tool_1", "input": {"path": f"room {number}"}}
    found = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": f"Room {number} has {number} doors."}
    return [
        {"role": "user", "content": [{"type": "text", "text": f"What is in room {number}?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I shall look."}, call]},
        {"role": "user", "content": [found]},
        {"role": "assistant", "content": [{"type": "text", "text": f"It has {number} doors."}]},
    ]


def watched(engine: AsyncEngine) -> Callable[[], tuple[int, ...]]:
    """A function for the prompt of the latest chat."""
    streams, stream_chat = list[TokenStream](), engine.stream_chat

    def kept(*args: Any, **options: Any) -> TokenStream:
        streams.append(stream_chat(*args, **options))
        return streams[-1]

    engine.stream_chat = kept  # type: ignore[method-assign]
    return lambda: streams[-1].prompt_token_ids


async def test_repeated_tokens_are_cached() -> None:
    """All but the last, unfinished page of what a request shares with the one before it: marks of `cache_control` move,
    the head of the system prompt changes, and nothing else is computed again."""
    async with (
        await AsyncEngine.from_pretrained("demo", show_progress=False) as engine,
        serving(app(engine)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        prompts = watched(engine)
        history: list[dict[str, Any]] = []
        before: tuple[int, ...] = ()
        for number in range(TURNS):
            history += turn(number)
            messages = json.loads(json.dumps(history[:-1]))
            messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
            body = {
                "model": "demo",
                "max_tokens": 4,
                "system": system(number),
                "tools": TOOLS,
                "messages": messages,
            }
            answer = await client.post("/v1/messages", params={"beta": "true"}, json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            total = usage["input_tokens"] + usage["cache_read_input_tokens"]
            counted = await client.post("/v1/messages/count_tokens", json=body)
            assert counted.json() == {"input_tokens": total}
            prompt = prompts()
            shared = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), len(before))
            assert shared >= 0.9 * len(before), "what changes with every request is in the prompt"
            assert usage["cache_read_input_tokens"] >= shared // PAGE * PAGE, (number, shared, usage)
            before = prompt
        assert len(before) > 500
