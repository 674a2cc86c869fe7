"""Pictures in the forms of all three dialects, beside what the engine says of them in process."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from support.data import cases_of
from support.http_server import serving_models
from support.picture_models import chat, picture, png, save_picture_model

from asyncengine import Engine, SamplingParams

ROWS: dict[str, Any] = cases_of(__file__)

SEEN = [picture(1), Image.new("RGB", (32, 32), "red")]


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """The engine's own answers about `SEEN`, filled in by `url`."""
    return []


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, answers: list[str]) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("qwen3_vl")
    save_picture_model("qwen3_vl", folder)

    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "16MiB", "num_threads": 1}
    with Engine.from_pretrained(folder, show_progress=False, **settings) as engine:
        params = SamplingParams(max_tokens=8, temperature=0.0)
        answers += [engine.chat(chat(image, "what?"), params).text for image in SEEN]
    with serving_models({"eyes": folder}, settings, aliases={"*": "eyes"}) as (address, _):
        yield address


def encoded(image: Image.Image) -> str:
    return base64.b64encode(png(image)).decode()


def data_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{encoded(image)}"


def ask_chat(url: str, image: str, question: str = "what?") -> httpx.Response:
    content = [{"type": "image_url", "image_url": {"url": image, "detail": "low"}}, {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json={"model": "m", **body})


def ask_messages(url: str, image: str, question: str = "what?") -> httpx.Response:
    media, _, data = image.partition(";base64,")
    source = {"type": "base64", "media_type": media.removeprefix("data:"), "data": data}
    source = source if data else {"type": "url", "url": image}
    content = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return httpx.post(f"{url}/v1/messages", json={"model": "m", **body})


def ask_responses(url: str, image: str, question: str = "what?") -> httpx.Response:
    content = [{"type": "input_image", "image_url": image}, {"type": "input_text", "text": question}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 8, "temperature": 0}
    return httpx.post(f"{url}/v1/responses", json={"model": "m", **body})


ASKED: list[tuple[Callable[..., httpx.Response], Callable[[Any], str]]] = [
    (ask_chat, lambda body: body["choices"][0]["message"]["content"]),
    (ask_messages, lambda body: body["content"][0]["text"]),
    (ask_responses, lambda body: body["output"][0]["content"][0]["text"]),
]


@pytest.mark.parametrize(("ask", "text"), ASKED)
def test_a_picture_is_read(
    url: str, answers: list[str], ask: Callable[[str, str], httpx.Response], text: Callable[[Any], str]
) -> None:
    assert len(set(answers)) == 2
    assert [text(ask(url, data_url(image)).json()) for image in SEEN] == answers


@pytest.mark.parametrize("ask", [ask for ask, _ in ASKED])
@pytest.mark.parametrize(("image", "says"), ROWS["what_is_no_picture_is_refused"])
def test_what_is_no_picture_is_refused(
    url: str, ask: Callable[[str, str], httpx.Response], image: str, says: str
) -> None:
    refused = ask(url, image)
    assert refused.status_code == 400
    assert f"messages[0].{says}" in refused.json()["error"]["message"]


def test_tools_return_pictures(url: str) -> None:
    """A tool's result with a picture is one prompt in both dialects that have such results."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(SEEN[0])}}
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image, {"type": "text", "text": "seen"}]}
    messages = [
        {"role": "user", "content": "look"}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    spoken = httpx.post(f"{url}/v1/messages", json={"model": "m", "messages": messages, "max_tokens": 1})
    output = [{"type": "input_image", "image_url": data_url(SEEN[0])}, {"type": "input_text", "text": "seen"}]
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    body = {"model": "m", "input": items, "max_output_tokens": 1}
    usages = [spoken.json()["usage"], httpx.post(f"{url}/v1/responses", json=body).json()["usage"]]
    counts = [usages[0]["input_tokens"] + usages[0]["cache_read_input_tokens"], usages[1]["input_tokens"]]
    assert counts[0] == counts[1] > 15


def test_a_stored_response_keeps_its_picture(url: str) -> None:
    first = ask_responses(url, data_url(SEEN[0])).json()
    body = {"model": "m", "input": "again", "previous_response_id": first["id"], "max_output_tokens": 1}
    second = httpx.post(f"{url}/v1/responses", json=body).json()
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 15
    kept = httpx.get(f"{url}/v1/responses/{first['id']}/input_items").json()["data"][0]["content"][0]
    assert kept["image_url"] == data_url(SEEN[0])


def test_tokens_of_pictures_are_counted_before_they_are_sent(url: str) -> None:
    image = data_url(SEEN[0])
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "what?"}]
    told = ask_chat(url, image).json()["usage"]["prompt_tokens"]
    chat_body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    assert told > httpx.post(f"{url}/tokenize", json=chat_body | {"messages": chat("what?")}).json()["count"] + 10
    assert httpx.post(f"{url}/tokenize", json=chat_body).json()["count"] == told
    source = {"type": "base64", "media_type": "image/png", "data": encoded(SEEN[0])}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    assert httpx.post(f"{url}/v1/messages/count_tokens", json=body).json() == {"input_tokens": told}
    parts = [{"type": "input_image", "image_url": image}, {"type": "input_text", "text": "what?"}]
    body = {"model": "m", "input": [{"role": "user", "content": parts}]}
    assert httpx.post(f"{url}/v1/responses/input_tokens", json=body).json()["input_tokens"] == told
