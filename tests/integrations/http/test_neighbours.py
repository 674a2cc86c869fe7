"""A law: beside the worst requests the server still answers, and running streams keep their share of it.

Every request here is within its limits or just beyond, and asks for much by little: long to read, to tokenize, to
compile, to render or to decode. The server is a process of its own. How late it answers, and how much a stream gets,
is told in its own processor time, so that a busy machine is not taken for a fault.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

MOST_LATE = 0.5
"""Seconds of the server's processor time within which /health answers."""
LEAST_SHARE = 0.25
"""Share of the tokens for each second of the server's processor time that a stream keeps: about half of its rate on two
idle cores, of which the worst request has one."""
WINDOW = 1.6
"""Seconds of that time over which tokens are counted, at least: a shorter stop is judged by `MOST_LATE`."""
CHAT = "/v1/chat/completions"
STREAM = {
    "model": "demo", "messages": [{"role": "user", "content": "Tell me about rivers."}], "stream": True,
    "ignore_eos": True, "max_tokens": 900,
}  # fmt: skip


class Server:
    """`asyncengine serve` in a process, with one stream that always runs and somebody who always asks /health."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "asyncengine", "serve", "demo", "demo-vision", "--port", str(port)]
        self._child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._process = psutil.Process(self._child.pid)
        self.url = f"http://127.0.0.1:{port}"
        self._ends = threading.Event()
        self.tokens: list[float] = []
        """When each piece of the stream came."""
        self.late: list[tuple[float, float]] = []
        """When /health was asked, and the processor time of the server until it answered."""
        self._threads = [threading.Thread(target=self._guarded, args=(each,)) for each in (self._read, self._probe)]
        self._broken: list[Exception] = []

    def __enter__(self) -> Server:
        while True:
            try:
                httpx.get(self.url + "/health")
                break
            except httpx.TransportError:
                assert self._child.poll() is None, "the server ended"
                time.sleep(0.1)
        for thread in self._threads:
            thread.start()
        while len(self.tokens) < 50:
            assert not self._broken
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        self._child.terminate()
        self._child.wait()
        assert not self._broken

    def _guarded(self, call: Callable[[httpx.Client], None]) -> None:
        try:
            with httpx.Client(base_url=self.url, timeout=60) as client:
                while not self._ends.is_set():
                    call(client)
        except Exception as error:
            self._broken.append(error)

    def _read(self, client: httpx.Client) -> None:
        with client.stream("POST", CHAT, json=STREAM) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.tokens.append(time.monotonic())
                if self._ends.is_set():
                    return

    def _probe(self, client: httpx.Client) -> None:
        before, asked = self.cpu, time.monotonic()
        assert client.get("/health").status_code == 200
        self.late.append((asked, self.cpu - before))
        time.sleep(0.02)

    @property
    def cpu(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def spend(self, seconds: float) -> float:
        """Tokens of the stream for each second of processor time, over `seconds` of that or more."""
        tokens, before = len(self.tokens), self.cpu
        while self.cpu < before + seconds:
            assert not self._broken
            time.sleep(0.02)
        return (len(self.tokens) - tokens) / (self.cpu - before)

    def latest(self, since: float) -> float:
        return max(cpu for asked, cpu in list(self.late) if asked >= since)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def chat(content: Any = "Hi", model: str = "demo", **fields: Any) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return json.dumps(body).encode()


def schema(wanted: dict[str, Any]) -> tuple[str, bytes]:
    return CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": wanted}})


def picture(data: bytes) -> tuple[str, bytes]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return CHAT, chat([{"type": "image_url", "image_url": {"url": url}}], "demo-vision")


def png(width: int, height: int, rows: int) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(rows * (1 + 3 * width)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


TEXT = ("The rivers of the north carry ice until May. " * 90_000)[:3_900_000]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
WORST: dict[str, Callable[[], tuple[str, bytes]]] = {
    "a long text": lambda: (CHAT, chat(TEXT)),
    "a long text to tokenize": lambda: ("/tokenize", json.dumps({"model": "demo", "prompt": TEXT[:800_000]}).encode()),
    "many messages": lambda: (
        CHAT, json.dumps({"model": "demo", "messages": [{"role": "user", "content": "a"}] * 100_000}).encode()
    ),
    "many keys": lambda: (CHAT, b"{" + b",".join(b'"k%d":0' % n for n in range(2_000_000)) + b"}"),
    "many ids": lambda: (
        "/v1/completions", json.dumps({"model": "demo", "prompt": [5] * 3_000_000, "max_tokens": 1}).encode()
    ),
    "many tools": lambda: (
        CHAT, chat(tools=[{**TOOL, "function": {**TOOL["function"], "name": f"f{n}"}} for n in range(20_000)])
    ),
    "many listed values": lambda: schema({"enum": [f"value number {n}" for n in range(20_000)]}),
    "many alternatives": lambda: schema(
        {"anyOf": [{"type": "object", "properties": {f"k{n}": {"type": "integer"}}} for n in range(1500)]}
    ),
    "nested repeats": lambda: schema({"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}),
    "a picture that unpacks to gigabytes": lambda: picture(png(30_000, 30_000, 300)),
    "variables of the template": lambda: (CHAT, chat(chat_template_kwargs={f"v{n}": [n] * 10 for n in range(50_000)})),
}  # fmt: skip


@pytest.mark.parametrize("name", WORST)
def test_nobody_pays_for_a_neighbour(server: Server, name: str) -> None:
    path, body = WORST[name]()
    alone = server.spend(WINDOW / 2)
    assert alone > 0
    sent, tokens, before = time.monotonic(), len(server.tokens), server.cpu
    with httpx.Client(base_url=server.url, timeout=120) as client:
        status = client.post(path, content=body, headers={"content-type": "application/json"}).status_code
    assert status in (200, 400, 413)
    server.spend(max(0.0, before + WINDOW - server.cpu))
    assert server.latest(sent) <= MOST_LATE
    share = (len(server.tokens) - tokens) / (server.cpu - before) / alone
    assert share >= LEAST_SHARE, "the stream starved"
