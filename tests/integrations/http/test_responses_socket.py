"""The Responses API over a WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.http_server import serving
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from asyncengine import EngineGroup
from asyncengine.integrations.http import app

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def socket(demo_url: str) -> Iterator[ClientConnection]:
    with connect(demo_url.replace("http", "ws") + "/v1/responses") as made:
        yield made


def send(socket: ClientConnection, **given: Any) -> None:
    body = {"type": "response.create", "model": "demo", "input": "hello", "temperature": 0, "store": False}
    socket.send(json.dumps(body | given))


def send_for_ever(socket: ClientConnection) -> None:
    while True:
        send(socket, ignore_eos=True)


def events(socket: ClientConnection) -> list[dict[str, Any]]:
    """Everything up to the end of one response, or to its error."""
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] not in ("response.completed", "response.incomplete", "error"):
        found.append(json.loads(socket.recv(timeout=60)))
    return found


def kinds(told: list[dict[str, Any]]) -> list[str]:
    """Types of events, without the pieces of text: a slow reader gets fewer of them."""
    return [event["type"] for event in told if "delta" not in event]


def text(told: list[dict[str, Any]]) -> str:
    return "".join(event.get("delta", "") for event in told)


def test_it_tells_what_a_stream_tells(socket: ClientConnection, demo_url: str) -> None:
    send(socket)
    told = events(socket)
    body = {"input": "hello", "temperature": 0, "stream": True, "store": False}
    lines = httpx.post(f"{demo_url}/v1/responses", json=body, timeout=60).text.splitlines()
    streamed = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert kinds(told) == kinds(streamed)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert text(told) == text(streamed) != ""


def test_one_that_could_not_be_gone_on_from_is_forgotten(socket: ClientConnection) -> None:
    send(socket)
    first = events(socket)[-1]["response"]["id"]
    send(socket, previous_response_id=first, input=[{"type": "function_call_output", "call_id": "c", "output": "x"}])
    assert events(socket)[-1]["error"]["param"] == "input[0].call_id"
    send(socket, previous_response_id=first)
    assert events(socket)[-1]["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("given", ["{", "[]", "{}", '{"type": "response.create", "background": true}'])
def test_what_is_no_request_is_refused_and_the_next_one_served(socket: ClientConnection, given: str) -> None:
    socket.send(given)
    (refused,) = events(socket)
    assert (refused["type"], refused["status"]) == ("error", 400)
    send(socket)
    assert events(socket)[-1]["type"] == "response.completed"


def test_a_client_that_asks_for_too_much_is_closed(socket: ClientConnection) -> None:
    with pytest.raises(ConnectionClosed) as closed:
        send_for_ever(socket)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008


def test_a_page_of_another_site_gets_no_connection(demo_url: str) -> None:
    with pytest.raises(InvalidStatus):
        connect(demo_url.replace("http", "ws") + "/v1/responses", origin="http://evil.example")  # type: ignore[arg-type]


async def test_a_connection_needs_a_key_where_requests_do() -> None:
    nothing = {"gone": {"model": "/nowhere/at/all"}}
    lazy = {"keep_alive": "5m", "show_progress": False}
    async with (
        await EngineGroup.from_pretrained(nothing, **lazy) as group,  # type: ignore[arg-type]
        serving(app(group, api_keys=["secret"])) as url,
    ):
        at = url.replace("http", "ws") + "/v1/responses"
        with pytest.raises(InvalidStatus) as denied:
            await asyncio.to_thread(connect, at)
        assert denied.value.response.status_code == 401
        made = await asyncio.to_thread(connect, at, additional_headers={"authorization": "Bearer secret"})
        await asyncio.to_thread(send, made, model="other")
        assert json.loads(await asyncio.to_thread(made.recv, 60))["error"]["code"] == "model_not_found"
        await asyncio.to_thread(made.close)


def test_what_is_not_stored_stays_with_its_connection(socket: ClientConnection, demo_url: str) -> None:
    send(socket)
    first = events(socket)[-1]["response"]
    assert httpx.get(f"{demo_url}/v1/responses/{first['id']}").status_code == 404
    send(socket, previous_response_id=first["id"], max_output_tokens=2)
    second = events(socket)[-1]["response"]
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    with connect(socket.request.headers["Host"].join(("ws://", "/v1/responses"))) as other:  # type: ignore[union-attr]
        send(other, previous_response_id=first["id"])
        assert events(other)[-1]["error"]["code"] == "previous_response_not_found"
