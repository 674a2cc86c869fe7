"""Several models behind one app: which one answers, and what becomes of those that are not loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest
from starlette.applications import Starlette
from support.data import cases_of
from support.http_server import serving_thread

from asyncengine import EngineGroup
from asyncengine.errors import EngineError, InvalidParameter, ModelNotFound, OutOfMemory
from asyncengine.integrations.http import app
from asyncengine.integrations.http.models import Models
from asyncengine.integrations.http.problems import Problem

ROWS: dict[str, Any] = cases_of(__file__)

SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "grammar_backend": "none", "speculation": "off"}
HELLO = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def two_models() -> AsyncIterator[Starlette]:
    models = {
        "demo": {"model": "demo", "adapters": {"pirate": "demo/pirate"}, "max_loras": 2},
        "gone": {"model": "/nowhere/at/all"},
        "wrong": {"model": "demo", "adapters": {"none": "/nowhere/at/all"}},
    }
    async with await EngineGroup.from_pretrained(models, keep_alive="5m", show_progress=False, **SMALL) as group:
        yield app(group, aliases={"gpt": "demo", "captain": "pirate"})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_thread(two_models) as url:
        yield url


def ask(url: str, model: str | None, **more: Any) -> httpx.Response:
    body = {"messages": HELLO, "max_tokens": 4, "temperature": 0, **({"model": model} if model else {}), **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def test_rows_tell_what_a_model_can(url: str) -> None:
    before = {row["id"]: row for row in httpx.get(f"{url}/v1/models").json()["data"]}
    assert (before["gone"]["max_model_len"], before["gone"]["capabilities"]) == (None, None)
    assert ask(url, "demo").status_code == 200
    row = httpx.get(f"{url}/v1/models/demo").json()
    assert (row["max_model_len"], row["task"]) == (256, "generate")
    assert row["capabilities"] == ["completion", "chat"], "tools and structured output need a grammar library"
    assert before["gone"]["created"] <= row["created"] <= time.time()
    assert httpx.get(f"{url}/v1/models/pirate").json()["max_model_len"] == 256
    theirs = anthropic.Anthropic(base_url=url, api_key="none").models.retrieve("demo")
    assert (theirs.max_input_tokens, int(theirs.created_at.timestamp())) == (256, row["created"])


def test_a_model_loads_at_its_first_request_whatever_it_is_called(url: str) -> None:
    said = {name: ask(url, name) for name in ("demo", "gpt", "pirate", "captain")}
    assert [answer.status_code for answer in said.values()] == [200] * 4
    assert [answer.json()["model"] for answer in said.values()] == list(said)
    text = {name: answer.json()["choices"][0]["message"]["content"] for name, answer in said.items()}
    assert text["demo"] == text["gpt"]
    assert text["pirate"] == text["captain"] != text["demo"]
    loaded = {row["id"] for row in httpx.get(f"{url}/v1/models").json()["data"] if row["loaded"]}
    assert loaded == {"demo", "pirate"}


def test_what_cannot_be_loaded_is_said_and_costs_nobody_else(url: str) -> None:
    for _ in range(2):  # it is tried again
        answer = ask(url, "gone")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_unavailable")
        assert answer.json()["error"]["message"] == "'gone' cannot be loaded; the server's log says why"
    answer = ask(url, "wrong")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
    assert ask(url, "demo").status_code == 200
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("name", ["other", "../demo", "demo\0", "/etc/passwd", "x" * 10_000, "DEMO", "*"])
def test_other_names_are_refused_with_those_there_are(url: str, name: str) -> None:
    answer = ask(url, name)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "'demo', 'gone', 'wrong'" in error["message"]
    assert len(error["message"]) < 300


class Group(EngineGroup):
    """Three models of which none can be loaded, and one that can."""

    def __init__(self) -> None:
        self.errors = {
            "a": OutOfMemory("full"),
            "b": InvalidParameter("max_num_seqs", "too many"),
            "c": ModelNotFound("c"),
            "e": EngineError("no host of a stage answers at 10.0.0.2:7070"),
        }
        self._names, self._loaded, self._on_demand = ("a", "b", "c", "d", "e"), {}, None
        self.released: list[str] = []

    def adapter_names(self, model: str) -> list[str]:
        return []

    def task_of(self, name: str) -> str:
        return "embed" if name == "d" else "generate"

    async def acquire(self, model: str) -> Any:
        if model in self.errors:
            raise self.errors[model]
        return object()

    def release(self, model: str) -> None:
        self.released.append(model)


async def test_a_target_is_let_go_once() -> None:
    group = Group()
    seen: list[str] = []
    models = Models(group, {"*": "d"})
    models.watch(lambda name, engine: seen.append(name))
    one, other = await models.acquire(None, "embed"), await models.acquire("whatever")
    assert (one.name, other.name) == ("d", "whatever")
    assert seen == ["d", "d"]  # each load is another engine
    for _ in range(2):
        one.release()
    assert group.released == ["d"]
    for name in ("b", "e"):
        with pytest.raises(Problem, match=f"'{name}' cannot be loaded; the server's log says why"):
            await Models(group, {"*": name}).acquire(None)
    with pytest.raises(Problem, match="must say which model: 'a', 'b', 'c', 'e'"):
        await asyncio.wait_for(models.acquire(None), 60)
    with pytest.raises(Problem, match="no model here is one to rerank"):
        await models.acquire(None, "rerank")


def change(url: str, what: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/models/{what}", json=body, timeout=120)


def status(url: str, name: str) -> str:
    rows = httpx.get(f"{url}/models").json()["data"]  # where llama.cpp's router has them
    return str(next(row["status"]["value"] for row in rows if row["id"] == name))


def test_models_are_loaded_and_unloaded_by_request(url: str) -> None:
    made = change(url, "load", model="gpt", keep_alive=-1).json()
    assert (made["success"], made["id"], made["root"], made["loaded"]) == (True, "gpt", "demo", True)
    assert status(url, "demo") == "loaded"
    endless = {"model": "demo", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    answering = httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=120)
    with answering as answer, ThreadPoolExecutor() as pool:
        pieces = answer.iter_lines()
        next(pieces)
        unloaded = pool.submit(change, url, "unload", model="pirate")  # the model under this adapter
        assert sum(piece.startswith("data: ") for piece in pieces) > 100, "the answer is not cut"
        assert unloaded.result().json()["loaded"] is False
    assert status(url, "demo") == "unloaded"
    assert change(url, "unload", model="demo").json()["success"], "there is nothing to do"
    assert status(url, "demo") == "unloaded"
    assert ask(url, "demo").status_code == 200, "its next request loads it"


@pytest.mark.parametrize(("what", "body", "code", "param"), ROWS["what_is_wrong_with_a_load_is_named"])
def test_what_is_wrong_with_a_load_is_named(url: str, what: str, body: dict[str, Any], code: int, param: str) -> None:
    answer = change(url, what, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (code, param)
