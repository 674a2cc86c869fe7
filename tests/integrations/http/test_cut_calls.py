"""Over HTTP no client gets a call with arguments that the engine wrote in the model's place (contract line 15)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

QUESTION = "What is the weather in Sankt Petersburg?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT: dict[str, Any] = {"name": "get_weather", "description": "Get the current weather for a city."}
CHAT: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
FUNCTION = {**ABOUT, "parameters": SCHEMA}
WHOLE = {"city": "Sankt Petersburg"}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat/completions": ("max_tokens", {"messages": CHAT, "tools": [{"type": "function", "function": FUNCTION}]}),
    "responses": ("max_output_tokens", {"input": QUESTION, "tools": [{"type": "function", **FUNCTION}]}),
    "messages": ("max_tokens", {"messages": CHAT, "tools": [{**ABOUT, "input_schema": SCHEMA}]}),
}


@pytest.fixture
def client(demo_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{demo_url}/v1/", timeout=120) as made:
        yield made


def post(client: httpx.Client, path: str, budget: int, **more: Any) -> httpx.Response:
    name, body = BODIES[path]
    made = client.post(path, json={"model": "demo", "temperature": 0, name: budget, **body, **more})
    assert made.status_code == 200, made.text
    return made


def whole(path: str, answer: dict[str, Any]) -> tuple[str, list[str]]:
    """Why it ended, and the arguments of its calls."""
    if path == "chat/completions":
        [choice] = answer["choices"]
        return choice["finish_reason"], [c["function"]["arguments"] for c in choice["message"].get("tool_calls", ())]
    if path == "responses":
        reason = (answer["incomplete_details"] or {"reason": answer["status"]})["reason"]
        return reason, [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]
    return answer["stop_reason"], [json.dumps(b["input"]) for b in answer["content"] if b["type"] == "tool_use"]


def streamed(text: str) -> list[str]:
    """The arguments of the calls of a stream, "" for one that has none."""
    calls: list[str] = []
    for event in [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]:
        for choice in event.get("choices", ()):
            for call in choice["delta"].get("tool_calls", ()):
                calls += [""] if call.get("id") else []
                calls[-1] += call["function"].get("arguments", "")
        begun = event.get("item") if event.get("type") == "response.output_item.added" else event.get("content_block")
        calls += [""] if (begun or {}).get("type") in ("function_call", "tool_use") else []
        if event.get("type") == "response.function_call_arguments.delta":
            calls[-1] += event["delta"]
        if event.get("type") == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            calls[-1] += event["delta"]["partial_json"]
    return calls


@pytest.mark.parametrize("path", BODIES)
def test_a_call_that_the_engine_closed_is_not_sent_as_one(client: httpx.Client, path: str) -> None:
    cut = 0
    for budget in (14, 16, 20, 24, 25, 26, 60):
        reason, calls = whole(path, post(client, path, budget).json())
        sent = streamed(post(client, path, budget, stream=True).text)
        if calls:
            assert [json.loads(arguments) for arguments in calls] == [WHOLE]
            assert [json.loads(arguments) for arguments in sent] == [WHOLE]
            continue
        assert reason in ("length", "max_output_tokens", "max_tokens")
        for arguments in sent:
            cut += 1
            assert json.dumps(WHOLE).startswith(arguments) != (arguments == json.dumps(WHOLE))
            with pytest.raises(json.JSONDecodeError):
                json.loads(arguments)
    assert cut >= 3
    assert calls  # with enough tokens
    reason, [offered] = whole(path, post(client, path, 20, on_budget="offer").json())
    assert reason in ("tool_calls", "completed", "tool_use")
    assert json.loads(offered) != WHOLE


def test_a_text_that_the_engine_closed_ends_with_length(client: httpx.Client) -> None:
    """A client's parser takes one that ends with "stop"."""
    form = {
        "prompt": "The answer, in JSON: ",
        "guided_json": {"type": "array", "items": {"type": "string"}, "minItems": 3},
    }
    body: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 9, **form}
    [closed] = client.post("completions", json=body).json()["choices"]
    [offered] = client.post("completions", json={**body, "on_budget": "offer"}).json()["choices"]
    assert closed["text"] == offered["text"]
    assert len(json.loads(closed["text"])) >= 3
    assert (closed["finish_reason"], offered["finish_reason"]) == ("length", "stop")
