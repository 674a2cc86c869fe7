"""Requests that mean no good, over a real socket: each is refused in the dialect's shape, and nobody else notices."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import fastapi
import httpx
import pytest
from starlette.applications import Starlette
from support.data import cases_of, spelled
from support.http_server import serving_thread

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app, server
from asyncengine.integrations.http.models import Models
from asyncengine.integrations.http.settings import ServerSettings

ROWS: dict[str, Any] = cases_of(__file__)

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
JSON = {"content-type": "application/json"}
KEY = "sesame"
ORIGIN = "https://chat.example"


@asynccontextmanager
async def three_apps() -> AsyncIterator[Starlette]:
    """Another program with an engine of its own, and below it, at /open an app without keys, at /locked one with keys,
    at /any a strict one that answers to every model name."""

    @asynccontextmanager
    async def lifespan(host: fastapi.FastAPI) -> AsyncIterator[None]:
        hosts = ServerSettings().hosts
        async with await AsyncEngine.from_pretrained("demo", show_progress=False, max_num_seqs=8) as engine:
            host.mount("/open", app(engine, hosts=hosts, cors=[ORIGIN], max_body=1 << 20))
            host.mount("/locked", app(engine, api_keys=[KEY, "other"], cors=[ORIGIN], hosts=hosts))
            host.mount("/any", app(engine, aliases={"*": "demo"}, strict=True))
            yield

    yield fastapi.FastAPI(lifespan=lifespan)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_thread(three_apps) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.fixture(autouse=True)
def undisturbed(client: httpx.Client) -> Iterator[None]:
    """A good request is answered after whatever a test does."""
    yield
    answer = client.post(f"/open{CHAT}", json=HELLO)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 4)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert isinstance(error["message"], str)
    assert len(answer.content) < 2000
    return error


# ---------------------------------------------------------------- bodies

BODIES: dict[str, tuple[bytes, int]] = {
    **{name: (spelled(parts).encode(), status) for name, (parts, status) in ROWS["bodies"].items()},
    "wrong encoding": (b'{"model": "\xff\xfe"}', 400),
    "UTF-16": ('{"model": "other"}'.encode("utf-16"), 404),
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses", "/v1/rerank"])
def test_bodies(client: httpx.Client, path: str) -> None:
    for name, (body, status) in BODIES.items():
        answer = client.post(f"/open{path}", content=body, headers=JSON)
        assert error_of(answer), name
        assert answer.status_code in (status, 400), name
        assert (answer.json().get("type") == "error") == (path == MESSAGES), name


@pytest.mark.parametrize(("headers", "status"), ROWS["types_and_codings_of_bodies"])
def test_types_and_codings_of_bodies(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    assert error_of(client.post(f"/open{CHAT}", content=bomb, headers=headers))["param"] in headers
    assert client.post(f"/open{CHAT}", content=json.dumps(HELLO), headers=headers).status_code == status


def test_a_body_is_not_kept_beyond_its_limit(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """One that is announced as too long is refused before it is sent if its client waits, else when it has gone by."""
    head = f"POST /open{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connection(url) as careful:
        careful.sendall(f"{head}Expect: 100-continue\r\nContent-Length: 100000000000\r\n\r\n".encode())
        assert b" 413 " in everything(careful).split(b"\r\n\r\n", 1)[0]
    monkeypatch.setattr("asyncengine.integrations.http.body.DISCARD_SECONDS", 0.05)
    with connection(url) as announced:
        announced.sendall(f"{head}Content-Length: 100000000000\r\n\r\n{{".encode())
        assert b" 413 " in announced.recv(1 << 16)
    with connection(url) as chunked:
        chunked.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            for _ in range(40):  # of a hundred thousand
                chunked.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            assert b" 413 " in chunked.recv(1 << 16)


def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr("asyncengine.integrations.http.body.BODY_SECONDS", 0.05)
    head = f"POST /open{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connection(url) as slow:
        slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert b"408" in everything(slow).split(b"\r\n")[0]


@pytest.mark.parametrize(
    "name", ["\ud800", "a\r\nset-cookie: x=1", "\0", "é" * 3000, "x" * 100_000, "../../etc/passwd"]
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_names_of_fields_and_models(client: httpx.Client, path: str, name: str) -> None:
    """Strange names come back in messages, in bodies and in a header, and break none of them."""
    for where, body in (
        ("open", {**HELLO, name: 1}),
        ("open", {**HELLO, "model": name}),
        ("any", {**HELLO, "model": name}),
    ):
        answer = client.post(f"/{where}{path}", content=json.dumps(body), headers=JSON)
        assert answer.status_code < 500, answer.text
        assert isinstance(answer.json(), dict)
        assert "set-cookie" not in answer.headers


# ---------------------------------------------------------------- paths, methods, heads


@pytest.mark.parametrize("path", [*ROWS["paths"], "/v1/models/" + "x" * 5000])
def test_paths(url: str, path: str) -> None:
    with connection(url) as raw:
        raw.sendall(f"GET /open{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = everything(raw)
    assert answer.split(b" ")[1] in (b"404", b"307", b"405"), answer[:200]
    assert b"root:" not in answer
    assert b"\r\nset-cookie" not in answer.lower()
    assert len(answer) < 7000


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"])
def test_methods(client: httpx.Client, method: str) -> None:
    assert client.request(method, f"/open{CHAT}").status_code in (400, 405)
    assert (
        client.request(method, "/open/health").status_code == (200 if method in ("GET", "HEAD") else 405)
        or method == "BREW"
    )


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /open/health\r\n\r\n",
        b"POST /open/v1/chat/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /open/v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"GET /open/health HTTP/1.1\r\nHost: localhost\r\n" + b"a: " + b"b" * 200_000,
        b"GET /open/health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 50_000,
        b"GET /" + b"x" * 200_000,
    ],
    ids=["TLS", "version", "0.9", "negative", "two lengths", "long header", "many headers", "long path"],
)
def test_heads(url: str, head: bytes) -> None:
    """Bytes that are no request, and a request whose head has no end, are refused and the connection closed."""
    with connection(url) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(head)
        answer = everything(raw)
        assert answer == b"" or answer.split(b" ")[1].startswith(b"4"), answer[:100]


# ---------------------------------------------------------------- keys, hosts, origins


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"authorization": "Bearer"}, {"authorization": f"Basic {KEY}"}, {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"}, {"x-api-key": ""}, {"x-api-key": "é"}, {"x-api-key": "x" * 10_000},
        {"cookie": f"api_key={KEY}"},
    ],
)  # fmt: skip
def test_without_a_key(client: httpx.Client, headers: dict[str, str]) -> None:
    encoded = {name: value.encode() for name, value in headers.items()}
    for path in (CHAT, MESSAGES, "/v1/models", "/v1/load_lora_adapter", "/metrics", "/nowhere"):
        answer = client.post(f"/locked{path}?api_key={KEY}&key={KEY}", json=HELLO, headers=encoded)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "authentication_error" in json.dumps(answer.json())
        assert (answer.json().get("type") == "error") == (path == MESSAGES)
    assert client.get("/locked/health").status_code == 200  # that tells nothing of anybody


def test_a_body_that_follows_its_answer_goes_by(url: str) -> None:
    """One without a key is answered before its body comes; that is no head without an end."""
    with connection(url) as raw:
        raw.sendall(f"POST /locked{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 20}\r\n\r\n".encode())
        assert b" 401 " in raw.recv(1 << 16)
        raw.sendall(b" " * (1 << 20))
        raw.sendall(b"GET /locked/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 200" in everything(raw)  # behind what was still on its way of the first answer


@pytest.mark.parametrize("headers", [{"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}, {"x-api-key": "other"}])
def test_with_a_key(client: httpx.Client, headers: dict[str, str]) -> None:
    for host in ("localhost", "llm.example"):  # a key is enough
        assert client.post(f"/locked{CHAT}", json=HELLO, headers={**headers, "host": host}).status_code == 200


def test_other_host_names_are_refused(client: httpx.Client) -> None:
    """A page whose name was made to resolve to this machine has its own name in the Host header."""
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]", "[::1]:8000"):
        assert client.get("/open/v1/models", headers={"host": host}).status_code == 200
    for host in ("evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "[::2]:80", "[::1", ""):
        answer = client.get("/open/v1/models", headers={"host": host})
        assert answer.status_code in (400, 403)
    assert client.get("/any/v1/models", headers={"host": "evil.example"}).status_code == 200


def test_other_pages_may_not_ask_unless_they_are_named(client: httpx.Client) -> None:
    def preflight(origin: str) -> httpx.Response:
        asked = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "x-api-key",
        }
        return client.options(f"/locked{CHAT}", headers=asked)

    assert preflight(ORIGIN).headers["access-control-allow-origin"] == ORIGIN
    assert preflight("https://evil.example").status_code == 400
    for where, origin in (("open", "https://evil.example"), ("any", ORIGIN)):
        answer = client.get(f"/{where}/v1/models", headers={"origin": origin})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("cut", [None, 30])
@pytest.mark.parametrize("offer", ["h2c", "foo/2"])
def test_a_request_that_offers_another_protocol_is_served(url: str, offer: str, cut: int | None, chunked: bool) -> None:
    """Clients on the JVM offer h2c with each request at http://."""
    body = json.dumps(HELLO).encode()
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = [
        f"POST /open{CHAT} HTTP/1.1", "Host: localhost", "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {offer}",
        "HTTP2-Settings: AAEAAEAAAAIAAAAB", "Content-Type: application/json", length, "", "",
    ]  # fmt: skip
    framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    sent = "\r\n".join(head).encode() + framed
    with connection(url) as raw:
        for _ in range(2):  # the connection goes on
            raw.sendall(sent[:cut])
            if cut is not None:
                raw.sendall(sent[cut:])
            answer = raw.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            _, _, content = answer.partition(b"\r\n\r\n")
            while len(content) < int(re.search(rb"content-length: (\d+)", answer)[1]):  # type: ignore[index]
                content += raw.recv(1 << 16)
            assert json.loads(content)["usage"]["completion_tokens"] == 4


# ---------------------------------------------------------------- connections


def test_connections_without_a_request_are_closed(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A byte that comes now and then does not help; a connection whose request is being answered stays."""
    with connection(url) as asking:
        asking.sendall(b"GET /open/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):  # else it may be idle for too long before it asks
            answer += (read := asking.recv(1 << 16))  # the head may come by itself
            assert read, answer
        monkeypatch.setattr(server, "IDLE_SECONDS", 0.05)
        with connection(url) as silent, connection(url) as slow:
            slow.sendall(b"GET /open/he")
            assert everything(silent) == b""
            with contextlib.suppress(ConnectionError):
                assert everything(slow) == b""
        body = json.dumps({**HELLO, "max_tokens": 200, "ignore_eos": True}).encode()
        head = (
            f"POST /open{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        asking.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert everything(asking).startswith(b"HTTP/1.1 200")


# ---------------------------------------------------------------- failures of our own


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses", "/v1/rerank", "/v1/models/demo"])
def test_a_failure_that_nobody_foresaw_is_told_in_the_dialects_shape(
    monkeypatch: pytest.MonkeyPatch, client: httpx.Client, path: str
) -> None:
    """Nothing of its inside is told, and the server that the app runs in sees no exception of it."""

    def fail(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(Models, "_find", fail)
    body = {"/v1/responses": {"input": "x"}, "/v1/rerank": {"query": "x", "documents": ["x"]}}.get(path, HELLO)
    answer = client.get(f"/open{path}") if path.endswith("demo") else client.post(f"/open{path}", json=body)
    assert answer.status_code == 500
    assert error_of(answer)["message"] == "the server failed; its log says more"
    assert (answer.json().get("type") == "error") == (path == MESSAGES)
    assert answer.headers["request-id"] == "req_" + answer.headers["x-request-id"]


# ---------------------------------------------------------------- an app within another


def connection(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=120)


def everything(raw: socket.socket) -> bytes:
    found = b""
    while piece := raw.recv(1 << 16):
        found += piece
    return found
