"""Adapters that come and go by requests, in vLLM's form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from support.data import cases_of
from support.http_server import serving_thread

from asyncengine import EngineGroup
from asyncengine.integrations.http import app

ROWS: dict[str, Any] = cases_of(__file__)

SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "grammar_backend": "none", "speculation": "off"}
KEY = {"authorization": "Bearer sesame"}


@asynccontextmanager
async def apps() -> AsyncIterator[Starlette]:
    models = {"demo": "demo", "embed": "demo-embed"}
    async with await EngineGroup.from_pretrained(models, keep_alive="5m", show_progress=False, **SMALL) as group:
        keyed, open_, allowed = app(group, api_keys=["sesame"]), app(group), app(group, allow_adapters=True)
        yield Starlette(routes=[Mount("/keyed", keyed), Mount("/open", open_), Mount("/allowed", allowed)])


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving_thread(apps) as url, httpx.Client(base_url=url, headers=KEY, timeout=120) as client:
        yield client


def change(client: httpx.Client, what: str, where: str = "keyed", **body: Any) -> httpx.Response:
    return client.post(f"/{where}/v1/{what}_lora_adapter", json=body)


def names(client: httpx.Client) -> list[str]:
    return [row["id"] for row in client.get("/keyed/v1/models").json()["data"]]


@pytest.mark.parametrize("where", ["keyed", "allowed"])
def test_an_adapter_comes_answers_and_goes(client: httpx.Client, where: str) -> None:
    made = change(client, "load", where, lora_name="pirate", lora_path="demo/pirate", model="demo")
    assert (made.status_code, made.text) == (200, "Success: LoRA adapter 'pirate' added successfully.")
    assert names(client) == ["demo", "embed", "pirate"]
    ask = {"messages": [{"role": "user", "content": "What is the capital of Norway?"}], "temperature": 0}
    said = client.post("/keyed/v1/chat/completions", json={"model": "pirate", "max_tokens": 20, **ask}).json()
    assert "Arr" in said["choices"][0]["message"]["content"]
    again = change(client, "load", where, lora_name="pirate", lora_path="demo/pirate", model="demo")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "name_taken")
    inplace = {"lora_name": "pirate", "lora_path": "demo/json", "model": "demo", "load_inplace": True}
    assert change(client, "load", where, **inplace).status_code == 200
    assert change(client, "unload", where, lora_name="pirate").status_code == 200
    assert names(client) == ["demo", "embed"]


@pytest.mark.parametrize(("what", "body", "status", "param"), ROWS["what_is_wrong_is_named"])
def test_what_is_wrong_is_named(client: httpx.Client, what: str, body: dict[str, Any], status: int, param: Any) -> None:
    refused = change(client, what, **body)
    assert refused.status_code == status, refused.text
    assert param in (None, refused.json()["error"]["param"])
    assert names(client) == ["demo", "embed"]
