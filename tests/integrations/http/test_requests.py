"""Each request as operators see it: counters, log lines, lists, its end by somebody else, and the time to come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from support.fake_engine import executor_of, make_engine, until
from support.http_server import request_log, serving_models

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app
from asyncengine.integrations.http import requests as module
from asyncengine.integrations.http.requests import Requests

SECRET = "the parrot Quirinius"
CHAT = {"model": "gpt", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = {"max_num_seqs": 1, "max_queued_requests": 2}
    with serving_models({"demo": "demo", "embedder": "demo-embed"}, settings, aliases={"gpt": "demo"}) as (found, _):
        yield found


Lines = Callable[[int], list[dict[str, Any]]]


@pytest.fixture
def logged(url: str) -> Iterator[Lines]:
    """So many lines of the log."""
    with request_log() as lines:
        yield lines
        assert SECRET not in json.dumps(lines(1))


def test_a_line_tells_what_a_request_cost(url: str, logged: Lines) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    whole: Any = client.chat.completions.create(**CHAT)
    streamed = client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    last: Any = list(streamed)[-1]
    vectors = client.embeddings.create(model="embedder", input=[SECRET])
    client.close()
    one, other, embedding = logged(3)
    assert (one["model"], one["path"], one["method"], one["status"]) == ("demo", "/v1/chat/completions", "POST", 200)
    assert one["id"] == whole._request_id
    assert [one[f"{kind}_tokens"] for kind in ("prompt", "completion")] == [
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    ]
    assert one["finish"] == whole.choices[0].finish_reason
    assert 0 <= one["queued"] <= one["first_token"] <= one["total"]
    assert other["cached_tokens"] == last.usage.prompt_tokens_details.cached_tokens > 0
    assert (other["streamed"], other["finish"]) == (True, one["finish"])
    assert (embedding["model"], embedding["prompt_tokens"]) == ("embedder", vectors.usage.prompt_tokens)
    for timings, usage in ((whole.timings, whole.usage), (last.timings, last.usage)):
        assert timings["predicted_n"] == usage.completion_tokens
        assert timings["cache_n"] + timings["prompt_n"] == usage.prompt_tokens
        assert timings["predicted_ms"] > 0


def test_refusals_are_told_and_counted(url: str, logged: Lines) -> None:
    def counted() -> dict[str, float]:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("http_requests_total{")}

    before, chat = counted(), f"{url}/v1/chat/completions"
    statuses = [
        httpx.post(chat, json={**CHAT, "temperature": -1}).status_code,
        httpx.post(chat, json={**CHAT, "model": SECRET}).status_code,
        httpx.get(f"{url}/v1/models/{SECRET}").status_code,
        httpx.get(f"{url}/{SECRET}").status_code,
        httpx.get(chat).status_code,
    ]
    assert statuses == [400, 404, 404, 404, 405]
    told = [(line["path"], line["status"], line.get("error")) for line in logged(6)]
    assert told[1:] == [
        ("/v1/chat/completions", 400, "invalid_value"),
        ("/v1/chat/completions", 404, "model_not_found"),
        ("/v1/models/{name:path}", 404, "model_not_found"),
        ("other", 404, "refused"),
        ("/v1/chat/completions", 405, "refused"),
    ]
    more = {name for name, value in counted().items() if value > before.get(name, 0)}
    assert more == {
        f'http_requests_total{{handler="{path}",method="{method}",status="{status}"}}'
        for path, method, status in (
            ("/v1/chat/completions", "POST", 400), ("/v1/chat/completions", "POST", 404), ("other", "GET", 404),
            ("/v1/models/{name:path}", "GET", 404), ("/v1/chat/completions", "GET", 405), ("/metrics", "GET", 200),
        )
    }  # fmt: skip


def test_clients_are_told_when_the_queue_will_have_room(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Requests, "retry_after", lambda _, model, waiting: {("demo", 2): 17}[model, waiting])
    long = {**CHAT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.Client() as client, client.stream("POST", f"{url}/v1/chat/completions", json=long, timeout=60) as first:
        next(first.iter_lines())  # it runs
        waiting = [httpx.post(f"{url}/v1/completions", json={"model": "demo", "prompt": ["a", "b", "c"]})]
        assert [answer.status_code for answer in waiting] == [429]
        assert waiting[0].headers["retry-after"] == "17"


def test_the_wait_follows_the_rate_at_which_requests_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now, requests = [100.0], Requests()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def ended(seconds: float, after: float) -> None:
        now[0] += after
        requests._ended("demo", seconds)

    assert requests.retry_after("demo", 50) == 1, "nothing is known yet"
    for _ in range(10):
        ended(4.0, after=0.5)  # eight side by side
    ended(0.5, after=3600)  # an hour without anybody says nothing of the rate
    assert requests.retry_after("demo", 8) == 7, "8 / 2 per second, with the first, which took 4 s"
    for _ in range(64):
        ended(4.0, after=0.5)
    assert [requests.retry_after("demo", waiting) for waiting in (0, 1, 8, 9, 1000)] == [1, 1, 4, 5, 30]
    assert requests.retry_after("other", 1000) == 1


ASK: dict[str, Any] = {"prompt": [2, 3, 4], "max_tokens": 40, "ignore_eos": True, "temperature": 0}


def asking(engine: AsyncEngine, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app(engine, **options)), base_url="http://localhost")


async def test_requests_and_steps_are_listed_and_one_is_stopped() -> None:
    async with make_engine() as engine, asking(engine, api_keys=["k"]) as client:
        client.headers["x-api-key"] = "k"
        assert (await client.get("/requests")).json() == {"fake": {"requests": [], "steps": []}}
        await client.post("/v1/completions", json={**ASK, "max_tokens": 4})
        steps = (await client.get("/requests")).json()["fake"]["steps"]
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
        assert sum(step["tokens"] for step in steps) == 3 + 3
        executor_of(engine).hold()
        asked = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await until(lambda: bool(engine.requests()))
        [listed] = (await client.get("/requests")).json()["fake"]["requests"]
        assert listed.keys() == set(type(engine.requests()[0]).__dataclass_fields__)
        assert (listed["prompt_tokens"], listed["max_tokens"]) == (3, 40)
        stopped = await client.delete(f"/requests/{listed['request_id']}")
        assert (stopped.status_code, stopped.json()["stopped"]) == (200, True)
        executor_of(engine).release()
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
        assert answer.headers["x-request-id"] != ""
        again = await client.delete(f"/requests/{listed['request_id']}")
        assert (again.status_code, again.json()["error"]["code"]) == (404, "request_not_found")


NAMED = {"keys": {"reader": {"key": "r"}, "keeper": {"key": "k", "operator": True}}}


@pytest.mark.parametrize(
    ("options", "key", "status"),
    [({}, "", 403), ({"hosts": ["localhost"]}, "", 404), ({"api_keys": ["k"]}, "", 401), (NAMED, "r", 403),
     (NAMED, "k", 404)],
)  # fmt: skip
async def test_who_may_stop_a_request(options: dict[str, Any], key: str, status: int) -> None:
    """Without a key only where others than this machine are kept out; with a named one if it is an operator's."""
    async with make_engine() as engine, asking(engine, **options) as client:
        assert (await client.delete("/requests/any", headers={"x-api-key": key})).status_code == status


async def test_the_prefix_tree_has_no_text_in_it() -> None:
    async with make_engine(pages=64, page_size=4) as engine, asking(engine) as client:
        await client.post("/v1/completions", json={**ASK, "prompt": list(range(2, 20))})
        runs = (await client.get("/prefix_tree")).json()["fake"]
        assert runs[0] == {"parent": -1, "pages": 0, "users": 0, "hits": 0}
        assert {key for run in runs for key in run} == {"parent", "pages", "users", "hits"}
        assert sum(run["pages"] for run in runs) == engine.stats().pages.cached > 3
