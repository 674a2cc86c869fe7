"""llama.cpp's server with parallel slots, on the loopback address; token ids over HTTP from an asyncio client."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.peers.drivers.base import Clock, Settings, at_once
from benchmarks.peers.workloads import Request, Trace

WHEEL = "benchmarks.peers.xllama_server"
"""The server where no llama-server is given."""
SLOTS = 16
SLOT_LENGTHS = (768, 2304)
"""Tokens of a slot. The server sets aside all of it for each, so it is started with what the requests need."""
GREEDY = {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True, "return_tokens": True}


class ServerDriver:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._length = 0
        self._port = 0

    async def load(self, settings: Settings) -> dict[str, Any]:
        self._settings = settings
        await self._start(SLOT_LENGTHS[0])
        note = f"-np {SLOTS} -cb, {SLOT_LENGTHS[0]} or {SLOT_LENGTHS[1]} tokens for each slot"
        each = settings.kv_bytes // settings.kv_tokens * 2 // (4 if settings.dtype == "float32" else 2)
        kv = SLOTS * SLOT_LENGTHS[0] * each  # kept in float16, whatever the weights are
        return {"weights": settings.gguf_bytes, "kv": kv, "note": note}

    async def run(self, requests: list[Request], way: str) -> list[Trace]:
        need = max(len(request.prompt) + request.output for request in requests)
        length = next((length for length in SLOT_LENGTHS if length > need), need + 1)
        if length != self._length:
            await self._start(length)
        return await at_once(requests, self._stream if way == "stream" else self._complete)

    async def _start(self, length: int) -> None:
        await self.close()
        settings = self._settings
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        threads, slots = str(settings.threads), SLOTS if length in SLOT_LENGTHS else 1
        # Blocking, so that nobody sees a half-started server; nothing else runs on this loop.
        command = [settings.server, "-cb", "--no-ui"] if settings.server else [sys.executable, "-m", WHEEL]
        self._process = subprocess.Popen([  # noqa: ASYNC220
            *command, "-m", settings.gguf, "-t", threads, "-tb", threads, "-np", str(slots), "-c",
            str(slots * length), "--cache-ram", "0", "--host", "127.0.0.1", "--port", str(self._port),
            "--threads-http", "2",
        ])  # fmt: skip
        self._length = length
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}")
            try:
                async for line in self._ask("GET /health", None):
                    if b'"ok"' in line:
                        return
            except OSError:
                pass
            await asyncio.sleep(0.2)  # it cannot be awaited: it is another process

    async def _complete(self, request: Request, clock: Clock) -> Trace:
        body = b"".join([line async for line in self._ask("POST /completion", self._body(request, stream=False))])
        answer = json.loads(body)
        return Trace(answer["tokens"], clock())

    async def _stream(self, request: Request, clock: Clock) -> Trace:
        tokens: list[int] = []
        times: list[float] = []
        async for line in self._ask("POST /completion", self._body(request, stream=True)):
            if line.startswith(b"data: "):
                now, found = clock(), json.loads(line[6:]).get("tokens") or []
                tokens += found
                times += [now] * len(found)
        return Trace(tokens, clock(), times)

    def _body(self, request: Request, *, stream: bool) -> bytes:
        wanted = {"prompt": request.prompt, "n_predict": request.output, "stream": stream, "cache_prompt": True}
        return json.dumps(GREEDY | wanted).encode()

    async def _ask(self, head: str, body: bytes | None) -> AsyncIterator[bytes]:
        """Lines of the answer's body, over a connection of its own; those that say a chunk's length are left out."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        try:
            length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body is not None else ""
            writer.write(f"{head} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{length}\r\n".encode())
            writer.write(body or b"")
            status = await reader.readline()
            headers = b""
            while (line := await reader.readline()) not in (b"\r\n", b""):
                headers += line.lower()
            if b" 200 " not in status and body is not None:
                raise RuntimeError(f"llama-server: {status!r} {(await reader.read(500))!r}")
            chunked = b"transfer-encoding: chunked" in headers
            while chunk := await _chunk(reader, chunked):
                for line in chunk.splitlines(keepends=True):
                    yield line
        finally:
            writer.close()

    async def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


async def _chunk(reader: asyncio.StreamReader, chunked: bool) -> bytes:
    """The next piece of a body; empty at its end. The server sends each event as one chunk."""
    if not chunked:
        return await reader.read(-1)
    size = int((await reader.readline()).strip() or b"0", 16)
    data = await reader.readexactly(size + 2)
    return data[:-2]


make = ServerDriver
