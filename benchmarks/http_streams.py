"""The price of HTTP: the app of `asyncengine.integrations.http` beside the same engine in process.

    python -m benchmarks.http_streams rate   [--streams 16] [--tokens 128] [--repeat 5]
    python -m benchmarks.http_streams first  [--requests 100]
    python -m benchmarks.http_streams cpu    [--streams 64] [--tokens 400] [--repeat 3]
    python -m benchmarks.http_streams lag    [--streams 256] [--tokens 400]
    python -m benchmarks.http_streams leave  [--clients 1000]

A child process holds the engine and serves it with uvicorn; this process is the clients, which read raw bytes from
sockets and so cost little. The child also runs the same requests in process when asked to (`/inside`), and tells its
CPU seconds, its memory, its pages and how late its loop was. `rate` and `first` take the demo model, in turns with the
same in process; `cpu` and `lag` take a device that answers at once, so that what is measured is the host's work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil

QUESTION = "Tell me about city {} and the rivers that meet there."


# ---------------------------------------------------------------- the child


def instant_engine(streams: int) -> Any:
    """An engine over a device that answers at once, with the demo model's tokenizer and template."""
    from asyncengine import DEMO_MODEL, AsyncEngine, EngineConfig
    from asyncengine.assembly.wiring import wire
    from asyncengine.info import ModelInfo
    from asyncengine.text.tokenizer import load_tokenizer
    from benchmarks.host_cost import InstantExecutor

    def build() -> Any:
        config = EngineConfig(max_num_seqs=streams, max_num_batched_tokens=max(2048, 64 * streams))
        tokenizer = load_tokenizer(DEMO_MODEL, config)
        executor = InstantExecutor(2 + streams * 128)
        info = ModelInfo(
            "instant", tokenizer.vocab_size, 4096, (), "none", "cpu", executor.num_pages, 16, has_tokenizer=True
        )
        return wire(executor, info, config, tokenizer=tokenizer)

    return AsyncEngine(build)


def chat(number: int, tokens: int) -> dict[str, Any]:
    return {
        "model": "any", "messages": [{"role": "user", "content": QUESTION.format(number)}], "temperature": 0,
        "max_tokens": tokens, "ignore_eos": True, "stream": True,
    }  # fmt: skip


async def inside(engine: Any, streams: int, tokens: int) -> list[float]:
    """Seconds to the first token of each stream, and of all of them to the end, last."""
    from asyncengine import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began, firsts = time.perf_counter(), list[float]()

    async def one(number: int) -> None:
        at = time.perf_counter()
        stream = engine.stream_chat([{"role": "user", "content": QUESTION.format(number)}], params)
        await anext(stream)
        firsts.append(time.perf_counter() - at)
        async for _ in stream:
            pass

    await asyncio.gather(*(one(number) for number in range(streams)))
    return [*firsts, time.perf_counter() - began]


def turns_of(loop: Any) -> list[float]:
    """CPU seconds of each turn of an event loop from here on: no timer runs within one, and the work of other processes
    is not in it."""
    turns: list[float] = []
    wait, began = loop._selector.select, time.thread_time()

    def select(timeout: float | None = None) -> Any:
        nonlocal began
        turns.append(time.thread_time() - began)
        events = wait(timeout)
        began = time.thread_time()
        return events

    loop._selector.select = select
    return turns


async def child(kind: str, streams: int) -> None:
    """Serve on a free port, which is printed."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Mount, Route

    from asyncengine import AsyncEngine
    from asyncengine.integrations.http import app
    from asyncengine.integrations.http.server import bind
    from asyncengine.integrations.http.settings import ServerSettings

    lags: list[float] = []
    turns = turns_of(asyncio.get_running_loop())

    async def watch() -> None:
        while True:
            due = time.perf_counter() + 0.005
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - due)

    async def look(request: Request) -> JSONResponse:
        """CPU seconds, bytes of memory, pages that requests hold, and since the last look: how late the loop was, and
        the CPU seconds of its turns."""
        stats = engine.stats()
        found, spent = sorted(lags) or [0.0], sorted(turns) or [0.0]
        lags.clear()
        turns.clear()
        process = psutil.Process()
        times = process.cpu_times()
        seen = {"cpu": times.user + times.system, "rss": process.memory_info().rss}
        seen |= {"held": stats.pages.shared + stats.pages.held, "running": sum(stats.requests.values())}
        for name, values in (("lag", found), ("turn", spent)):
            seen |= {f"{name}_p99": values[int(len(values) * 0.99)], f"{name}_max": values[-1]}
        return JSONResponse(seen)

    async def run_inside(request: Request) -> JSONResponse:
        query = request.query_params
        return JSONResponse(await inside(engine, int(query["streams"]), int(query["tokens"])))

    if kind == "demo":
        engine = AsyncEngine.from_pretrained(
            "demo", show_progress=False, max_num_seqs=max(64, streams), kv_cache_memory="128MiB"
        )
        engine = await engine
    else:
        engine = instant_engine(streams)
        await engine.start()
    paths = [
        Route("/look", look),
        Route("/inside", run_inside),
        Mount("/", app(engine, aliases={"*": engine.info.name})),
    ]
    with bind(ServerSettings(port=0)) as listener:
        print(listener.getsockname()[1], flush=True)
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=paths), log_level="warning", access_log=False))
        watcher = asyncio.create_task(watch())
        await server.serve(sockets=[listener])
        watcher.cancel()
    await engine.aclose()


# ---------------------------------------------------------------- the clients


class Client:
    """Raw HTTP to one port."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        return reader, writer

    async def get(self, path: str) -> Any:
        reader, writer = await self.open("GET", path)
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], answer
        return json.loads(body)

    async def stream(self, number: int, tokens: int) -> float:
        """Seconds to the first token of a stream that is read to its end."""
        began = time.perf_counter()
        reader, writer = await self.open("POST", "/v1/chat/completions", json.dumps(chat(number, tokens)).encode())
        first, seen, last = 0.0, b"", b""
        while piece := await reader.read(1 << 16):
            if not first and b'"content": "' in (seen := seen + piece) and seen.count(b"data: ") > 1:
                first = time.perf_counter() - began
            last = last[-100:] + piece
        writer.close()
        assert b"[DONE]" in last, last
        return first

    async def streams(self, streams: int, tokens: int) -> list[float]:
        """Seconds to the first token of each stream, and of all of them to the end, last."""
        began = time.perf_counter()
        firsts = await asyncio.gather(*(self.stream(number, tokens) for number in range(streams)))
        return [*firsts, time.perf_counter() - began]


@asynccontextmanager
async def served(kind: str, streams: int) -> AsyncIterator[Client]:
    command = [sys.executable, "-m", "benchmarks.http_streams", "child", "--kind", kind, "--streams", str(streams)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220 - nothing else runs yet
    assert process.stdout is not None
    client = Client(int(process.stdout.readline()))
    for _ in range(300):
        try:
            await client.get("/health")
            break
        except OSError:
            await asyncio.sleep(0.1)
    try:
        yield client
    finally:
        process.terminate()
        process.wait()


async def rate(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second over HTTP and in process, in turns."""
    found: dict[str, list[float]] = {"http": [], "in process": []}
    async with served("demo", args.streams) as client:
        for number in range(args.repeat + 1):
            for name, rates in found.items():
                if name == "http":
                    seconds = (await client.streams(args.streams, args.tokens))[-1]
                else:
                    seconds = (await client.get(f"/inside?streams={args.streams}&tokens={args.tokens}"))[-1]
                if number:  # the first round fills the prefix cache
                    rates.append(args.streams * args.tokens / seconds)
    ratios = [a / b for a, b in zip(*found.values(), strict=True)]
    medians = {name: round(statistics.median(values), 1) for name, values in found.items()}
    return {"tokens a second": medians, "ratio": round(statistics.median(ratios), 3), "ratios": ratios}


async def first(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token of one stream after the other."""
    found: dict[str, list[float]] = {"http": [], "in process": []}
    async with served("demo", 1) as client:
        for _ in range(args.requests):
            found["http"].append((await client.streams(1, 2))[0] * 1e3)
            found["in process"].append((await client.get("/inside?streams=1&tokens=2"))[0] * 1e3)
    medians = {name: statistics.median(values[args.requests // 10 :]) for name, values in found.items()}
    return {"milliseconds": medians, "added": medians["http"] - medians["in process"]}


async def cpu(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of CPU for a token of a stream, in the serving process."""
    found: dict[str, list[float]] = {"http": [], "in process": []}
    async with served("instant", args.streams) as client:
        for number in range(args.repeat + 1):
            for name, values in found.items():
                before = (await client.get("/look"))["cpu"]
                if name == "http":
                    await client.streams(args.streams, args.tokens)
                else:
                    await client.get(f"/inside?streams={args.streams}&tokens={args.tokens}")
                used = (await client.get("/look"))["cpu"] - before
                if number:
                    values.append(used / (args.streams * args.tokens) * 1e6)
    lowest = {name: min(values) for name, values in found.items()}
    return {"microseconds": lowest, "added": lowest["http"] - lowest["in process"], "runs": found}


async def lag(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds by which the serving loop was late while all streams ran, and of CPU that its turns took."""
    async with served("demo", args.streams) as client:
        await client.streams(args.streams, 4)
        await client.get("/look")
        seconds = (await client.streams(args.streams, args.tokens))[-1]
        seen = await client.get("/look")
    return {
        "p99": seen["lag_p99"] * 1e3,
        "most": seen["lag_max"] * 1e3,
        "CPU of a turn, p99": seen["turn_p99"] * 1e3,
        "CPU of a turn, most": seen["turn_max"] * 1e3,
        "tokens a second": args.streams * args.tokens / seconds,
    }


async def leave(args: argparse.Namespace) -> dict[str, Any]:
    """Pages and memory after clients that leave: before the first byte, in mid-prompt, in mid-stream, half-closed."""
    rng = random.Random(1)
    results: list[dict[str, Any]] = []
    async with served("demo", 64) as client:

        async def one(number: int) -> None:
            body = chat(number, 1000)
            how = rng.randrange(4)
            if how == 1:  # a long prompt
                body["messages"][0]["content"] *= 40
            body["stream"] = rng.random() < 0.7
            reader, writer = await client.open("POST", "/v1/chat/completions", json.dumps(body).encode())
            if how == 2 and body["stream"]:
                await reader.read(rng.randrange(1, 4096))
            elif how:
                await asyncio.sleep(rng.random() * 0.05)
            if how == 3:
                writer.write_eof()
                await asyncio.sleep(0.05)
            if rng.random() < 0.5:
                writer.transport.abort()
            writer.close()

        for _ in range(5):
            for first_of in range(0, args.clients // 5, 50):
                await asyncio.gather(*(one((first_of + each) % 100) for each in range(50)))
            began = time.perf_counter()
            while (seen := await client.get("/look"))["running"] and time.perf_counter() - began < 60:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            results.append({**seen, "seconds": time.perf_counter() - began})
    return {"after each fifth": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rate", "first", "cpu", "lag", "leave", "child"])
    parser.add_argument("--streams", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--kind", default="demo", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.streams = args.streams or {"rate": 16, "cpu": 64, "lag": 256}.get(args.what, 1)
    args.tokens = args.tokens or {"rate": 128}.get(args.what, 400)
    if args.what == "child":
        asyncio.run(child(args.kind, args.streams))
    else:
        print(json.dumps(asyncio.run(globals()[args.what](args)), indent=1))


if __name__ == "__main__":
    main()
