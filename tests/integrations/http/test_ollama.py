"""Ollama's API as its clients speak it: lines of JSON, its names of options, its objects of models."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from support.http_server import serving_thread

from asyncengine import DEMO_MODEL, EngineGroup
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http import app
from asyncengine.integrations.http.dialects import ollama
from asyncengine.integrations.http.events import CallArguments, CallBegin, CallEnd, End, Text, Thinking
from asyncengine.integrations.http.fields import Fields
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.turn import Answered
from asyncengine.outputs import Timings, Usage

COUNT: list[Any] = [{"role": "user", "content": "Count from 1 to 5."}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Get it.", "parameters": CITY}}
GREEDY = {"temperature": 0}
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@asynccontextmanager
async def two_models() -> AsyncIterator[Starlette]:
    models = {"demo": "demo", "embed": {"model": "demo-embed", "task": "embed"}}
    settings: dict[str, Any] = {"show_progress": False, "kv_cache_memory": "32MiB", "num_threads": 1}
    async with await EngineGroup.from_pretrained(models, keep_alive="5m", **settings) as group:
        yield app(group, aliases={"small": "demo"})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_thread(two_models) as url:
        yield url


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/api/{path}", json={"model": "demo", **body}, timeout=120)


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_whole_and_in_pieces(url: str) -> None:
    whole = post(url, "chat", messages=COUNT, options=GREEDY, stream=False).json()
    pieces = lines(post(url, "chat", model="small:latest", messages=COUNT, options=GREEDY))
    assert whole["message"] == {"role": "assistant", "content": "1, 2, 3, 4, 5"}
    assert "".join(piece["message"]["content"] for piece in pieces) == "1, 2, 3, 4, 5"
    assert len(pieces) > 3
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece["model"] for piece in pieces} == {"small:latest"}
    last = pieces[-1]
    assert (whole["done_reason"], last["done_reason"]) == ("stop", "stop")
    for name in ("prompt_eval_count", "eval_count"):
        assert whole[name] == last[name] > 0
    for name in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"):
        assert type(last[name]) is int
        assert last[name] <= last["total_duration"]
    began = datetime.fromisoformat(whole["created_at"]).timestamp()
    assert abs(time.time() - began) < 60


def test_generate_is_a_chat_of_one_message_unless_it_is_raw(url: str) -> None:
    chat = post(url, "chat", messages=[{"role": "system", "content": "Be brief."}, *COUNT], options=GREEDY)
    one = post(url, "generate", prompt=COUNT[0]["content"], system="Be brief.", options=GREEDY)
    assert "".join(piece["response"] for piece in lines(one)) == "".join(
        piece["message"]["content"] for piece in lines(chat)
    )
    most = {**GREEDY, "num_predict": 3, "stop": []}
    raw = post(url, "generate", prompt="One, two, three,", raw=True, options=most, stream=False).json()
    text = httpx.post(f"{url}/v1/completions", json={"prompt": "One, two, three,", "max_tokens": 3, "temperature": 0})
    assert raw["response"] == text.json()["choices"][0]["text"]
    assert (raw["done_reason"], raw["eval_count"]) == ("length", 3)
    held = post(url, "generate", prompt="As JSON: ", raw=True, format=AGE, options={"num_predict": 24}, stream=False)
    assert type(json.loads(held.json()["response"])["age"]) is int


def test_tools_are_called_with_objects(url: str) -> None:
    for stream in (False, True):
        answer = post(url, "chat", messages=WEATHER, tools=[TOOL], options=GREEDY, stream=stream)
        messages = [each["message"] for each in (lines(answer) if stream else [answer.json()])]
        (call,) = (call for message in messages for call in message.get("tool_calls", ()))
        assert call["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Oslo"}}
    told = [*WEATHER, messages[0], {"role": "tool", "content": "20 degrees", "tool_name": "get_weather"}]
    assert post(url, "chat", messages=told, tools=[TOOL], options=GREEDY, stream=False).json()["message"]["content"]


def test_options_by_their_names(url: str) -> None:
    names = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 1}
    asked = {**names, "temperature": 1.5, "repeat_penalty": 1.2, "num_predict": 8, "num_ctx": 2048, "typical_p": 0.7}
    answers = [post(url, "chat", messages=COUNT, options=asked, stream=False, think=False) for _ in range(2)]
    assert answers[0].json()["message"] == answers[1].json()["message"]
    ours = {**names, "temperature": 1.5, "repetition_penalty": 1.2, "max_tokens": 8}
    same = httpx.post(f"{url}/v1/chat/completions", json={"model": "demo", "messages": COUNT, **ours}).json()
    assert same["choices"][0]["message"]["content"] == answers[0].json()["message"]["content"]
    assert answers[0].headers["x-asyncengine-ignored"] == "options.num_ctx, options.typical_p, think"
    scored = post(url, "chat", messages=COUNT, options=GREEDY, logprobs=True, top_logprobs=2, stream=False).json()
    assert "".join(entry["token"] for entry in scored["logprobs"]) == "1, 2, 3, 4, 5"
    assert [len(entry["top_logprobs"]) for entry in scored["logprobs"]] == [2] * len(scored["logprobs"])


@pytest.mark.parametrize(
    ("page", "status"), [({}, 200), ({"origin": "http://localhost"}, 415), ({"sec-fetch-site": "cross-site"}, 415)]
)
def test_a_body_is_called_json_by_browsers_alone(url: str, page: dict[str, str], status: int) -> None:
    form = {"content-type": "application/x-www-form-urlencoded", **page}
    body = json.dumps({"model": "demo", "messages": COUNT, "options": GREEDY})
    assert httpx.post(f"{url}/api/chat", content=body, headers=form, timeout=120).status_code == status
    chat = f"{url}/v1/chat/completions"
    assert httpx.post(chat, content=body, headers=form, timeout=120).status_code == 415


def test_models_as_clients_ask_for_them(url: str) -> None:
    version = httpx.get(f"{url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "what editors ask for at least"
    assert lines(post(url, "generate"))[0]["done_reason"] == "load"
    listed = {each["name"]: each for each in httpx.get(f"{url}/api/tags").json()["models"]}
    assert listed.keys() == {"demo", "embed"}
    assert (listed["demo"]["model"], listed["demo"]["size"] > 0) == ("demo", True)
    assert listed["demo"]["digest"] == hashlib.sha256(b"demo").hexdigest()
    assert listed["demo"]["details"]["quantization_level"]
    datetime.fromisoformat(listed["embed"]["modified_at"])
    shown = post(url, "show").json()
    assert shown["capabilities"] == ["completion", "tools"]
    context = shown["model_info"][shown["model_info"]["general.architecture"] + ".context_length"]
    (running,) = (each for each in httpx.get(f"{url}/api/ps").json()["models"] if each["name"] == "demo")
    assert running["context_length"] == context == 4096
    assert post(url, "show", model="embed").json()["capabilities"] == ["embedding"]
    assert [each["status"] for each in lines(post(url, "pull"))] == ["pulling manifest", "success"]
    assert post(url, "pull", stream=False).json() == {"status": "success"}


def test_a_model_is_unloaded_when_nobody_wants_it_kept(url: str) -> None:
    def running() -> set[str]:
        return {each["name"] for each in httpx.get(f"{url}/api/ps").json()["models"]}

    assert lines(post(url, "chat", messages=[]))[0]["done_reason"] == "load"
    assert "demo" in running()
    post(url, "generate", keep_alive="1h")
    (ends,) = (each["expires_at"] for each in httpx.get(f"{url}/api/ps").json()["models"] if each["name"] == "demo")
    assert timedelta(minutes=50) < datetime.fromisoformat(ends) - datetime.now(UTC) <= timedelta(hours=1)
    assert lines(post(url, "generate", keep_alive=0))[0]["done_reason"] == "unload"
    deadline = time.monotonic() + 30
    while "demo" in running():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert lines(post(url, "generate", keep_alive=0))[0]["done_reason"] == "unload"
    assert "demo" not in running(), "to unload it is no reason to load it"
    post(url, "chat", messages=COUNT, options={"num_predict": 1})
    time.sleep(0.3)
    assert "demo" in running(), "what was asked for counts until the model is unloaded"


def test_vectors_are_those_of_the_other_dialect(url: str) -> None:
    texts = ["Who leads Velmora?", "a lamp"]
    theirs = httpx.post(f"{url}/v1/embeddings", json={"model": "embed", "input": texts}).json()["data"]
    found = post(url, "embed", model="embed", input=texts).json()
    assert np.array_equal(found["embeddings"], [each["embedding"] for each in theirs])
    assert (found["model"], found["prompt_eval_count"] > 0) == ("embed", True)
    old = post(url, "embeddings", model="embed", prompt=texts[1]).json()
    assert old == {"embedding": found["embeddings"][1]}
    short = post(url, "embed", model="embed", input=texts[0], dimensions=8)
    assert len(short.json()["embeddings"][0]) == 8


def test_a_text_has_its_system_before_it_and_a_message_its_role() -> None:
    assert ollama.read_generate(Fields({"model": "demo", "prompt": "a", "system": "b"}), False).prompts == ["b\n\na"]
    with pytest.raises(InvalidParameter, match=r"messages\[0\].role"):
        ollama.read_chat(Fields({"model": "demo", "messages": [{"content": "a"}]}))


def test_thoughts_and_calls_that_were_cut_off() -> None:
    turn = ollama.read_chat(Fields({"model": "demo", "messages": COUNT}))
    timings, usage = Timings(queued=0.25, first_token=0.5, total=1.5), Usage(7, 3)
    writer = ollama.Writer(turn, Answered("1", "demo", 0, timings=lambda: timings))
    assert json.loads(writer.write(Thinking(0, "Hm.")))["message"] == {
        "role": "assistant", "content": "", "thinking": "Hm."
    }  # fmt: skip
    assert json.loads(writer.write(Text(0, "So")))["message"]["content"] == "So"
    said = [writer.write(CallBegin(0, 0, "c", "f")), writer.write(CallArguments(0, 0, '{"a": ')), ""]
    assert "".join([*said, writer.write(CallEnd(0, 0)), writer.write(End(0, "length"))]) == ""
    end = json.loads(writer.end(usage))
    assert (end["done_reason"], end["prompt_eval_count"], end["eval_count"]) == ("length", 7, 3)
    assert (end["prompt_eval_duration"], end["eval_duration"]) == (250_000_000, 1_000_000_000)
    assert json.loads(writer.failed(Problem(503, "over"))) == {"error": "over"}


def test_a_model_without_a_chat_template_goes_on_with_the_text(tmp_path: Path) -> None:
    for each in DEMO_MODEL.iterdir():
        if each.name != "chat_template.jinja":
            (tmp_path / each.name).symlink_to(each)

    async def answered() -> list[httpx.Response]:
        models = {"plain": {"model": str(tmp_path), "max_model_len": 256, "num_threads": 1}}
        async with await EngineGroup.from_pretrained(models, show_progress=False) as group:
            transport = httpx.ASGITransport(app(group))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                options = {"num_predict": 4, **GREEDY}
                body = {"model": "plain", "prompt": "One, two,", "options": options, "stream": False}
                return [await client.post("/api/generate", json={**body, "raw": raw}) for raw in (False, True)]

    said = [answer.json()["response"] for answer in asyncio.run(answered())]
    assert said[0] == said[1] != ""
