"""Sleep, pause and waking by requests, in vLLM's form."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from support.http_server import serving_thread

from asyncengine import EngineGroup
from asyncengine.integrations.http import app

SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "grammar_backend": "none", "speculation": "off"}
KEY = {"authorization": "Bearer sesame"}
ASK = {"model": "demo", "prompt": "The capital of Norway is", "max_tokens": 5, "temperature": 0}


@asynccontextmanager
async def apps() -> AsyncIterator[Starlette]:
    async with await EngineGroup.from_pretrained({"demo": "demo"}, show_progress=False, **SMALL) as group:
        yield Starlette(routes=[Mount("/keyed", app(group, api_keys=["sesame"])), Mount("/open", app(group))])


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving_thread(apps) as url, httpx.Client(base_url=url, headers=KEY, timeout=120) as client:
        yield client


@pytest.fixture(autouse=True)
def awake(client: httpx.Client) -> Iterator[None]:
    yield
    assert client.post("/keyed/wake_up").status_code == 200


def states(client: httpx.Client) -> tuple[bool, bool, dict[str, Any]]:
    asked = [client.get(f"/keyed/{name}").json()[name] for name in ("is_sleeping", "is_paused")]
    return asked[0], asked[1], client.get("/keyed/health").json()


@pytest.mark.parametrize("level", ["", "?level=1", "?level=2&mode=wait", "?model=demo&level=2"])
def test_sleep_and_waking(client: httpx.Client, level: str) -> None:
    before = client.post("/keyed/v1/completions", json=ASK).json()["choices"]
    assert states(client) == (False, False, {"status": "ok"})
    assert client.post(f"/keyed/sleep{level}").status_code == 200
    assert states(client) == (True, True, {"status": "ok", "states": {"demo": "asleep"}})
    assert client.post("/keyed/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert states(client) == (False, False, {"status": "ok"})
    assert client.post("/keyed/v1/completions", json=ASK).json()["choices"] == before


@pytest.mark.parametrize("how", ["pause?mode=keep", "pause", "sleep?level=0"])
def test_pause_and_resume(client: httpx.Client, how: str) -> None:
    paused = client.post(f"/keyed/{how}")
    assert paused.status_code == 200
    assert states(client) == (False, True, {"status": "ok", "states": {"demo": "paused"}})
    assert client.post("/keyed/resume").json() == {"status": "resumed"}
    assert states(client) == (False, False, {"status": "ok"})


@pytest.mark.parametrize("path", ["reset_prefix_cache", "flush_cache"])
def test_the_prefix_cache_is_reset(client: httpx.Client, path: str) -> None:
    def cached() -> int:
        return client.post("/keyed/v1/completions", json=long).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    long = {**ASK, "prompt": "The capital of Norway is " * 12}
    cached()
    known = cached()
    assert known >= 16
    assert client.post(f"/keyed/{path}?namespace=tenant").json() == {"demo": {"dropped": 0, "in_use": 0}}
    assert cached() == known
    found = client.post(f"/keyed/{path}?model=demo").json()
    assert found["demo"]["dropped"] >= known // 16
    assert not found["demo"]["in_use"]
    assert cached() == 0


def test_what_is_refused(client: httpx.Client) -> None:
    for path, field in {
        "sleep?level=3": "level", "sleep?mode=finish": "mode", "sleep?levl=1": "levl", "wake_up?tags=weights": "tags",
        "pause?clear_cache=true": "clear_cache", "pause?mode=": "mode", "resume?model=other": "model",
        "reset_prefix_cache?salt=a": "salt", "flush_cache?model=other": "model",
    }.items():  # fmt: skip
        found = client.post(f"/keyed/{path}")
        assert (found.status_code, found.json()["error"]["param"]) == (400, field), path
    assert states(client) == (False, False, {"status": "ok"})


def test_nobody_without_a_key(client: httpx.Client) -> None:
    for path in ("sleep", "wake_up", "pause", "resume", "reset_prefix_cache", "flush_cache"):
        assert client.post(f"/open/{path}").status_code == 403
        assert client.post(f"/keyed/{path}", headers={"authorization": "Bearer other"}).status_code == 401
    assert client.get("/open/is_sleeping").status_code == 403
    assert states(client) == (False, False, {"status": "ok"})


def test_what_sleep_ends_is_told_so(client: httpx.Client) -> None:
    """A whole answer and a stream that a pause ends: the error says that, and nothing of an end of the server."""
    path, told = "/open/v1/completions", "the request was aborted: the engine was put to sleep or paused"
    assert client.post("/keyed/pause?mode=keep").status_code == 200
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(client.post, path, json={**ASK, "stream": streams}) for streams in (False, True)]
        deadline = time.monotonic() + 60
        while 'num_requests_waiting{engine="0",model_name="demo"} 2' not in client.get("/keyed/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.post("/keyed/pause?mode=abort").status_code == 200
        whole, stream = (each.result() for each in asked)
    assert (whole.status_code, whole.json()["error"]["message"]) == (503, told)
    assert told in stream.text
