"""Requests as operators see them over HTTP, and the end of one by somebody else than its client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.fake_engine import executor_of, make_engine, until

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app

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
