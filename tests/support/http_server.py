"""An app over an engine, served on a free port of this machine as `asyncengine serve` does."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from starlette.applications import Starlette

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app
from asyncengine.integrations.http.requests import JsonLines
from asyncengine.integrations.http.server import Server, address_of, bind
from asyncengine.integrations.http.settings import ServerSettings


@contextmanager
def request_log() -> Iterator[Callable[[int], list[dict[str, Any]]]]:
    """The log of requests: a function that waits for so many lines and gives all. A request is logged behind its
    answer, so that a client may be quicker."""
    stream, handler = io.StringIO(), logging.StreamHandler()
    handler.setStream(stream)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("asyncengine.serve.requests")
    log.addHandler(handler)
    log.setLevel(logging.INFO)

    def lines(count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 120
        while stream.getvalue().count("\n") < count:
            assert time.monotonic() < deadline, stream.getvalue()
            time.sleep(0.01)
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


@asynccontextmanager
async def serving(served: Starlette) -> AsyncIterator[str]:
    """Serve an app on the running loop; its base URL, without a path."""
    settings = ServerSettings(host="127.0.0.1", port=0, log_level="error")
    with bind(settings) as listener:
        server = Server(served, settings, lambda: None)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        try:
            yield address_of(listener)
        finally:
            server.should_exit = True
            await task


@contextmanager
def serving_thread(make_app: Any) -> Iterator[str]:
    """Serve on a thread of its own, for clients that block. `make_app` makes an async context manager, entered on that
    thread's loop, whose value is the app."""
    started, stop, found = threading.Event(), threading.Event(), list[str]()

    async def run() -> None:
        async with make_app() as made, serving(made) as url:
            found.append(url)
            started.set()
            await asyncio.to_thread(stop.wait)

    def main() -> None:
        try:
            asyncio.run(run())
        finally:
            started.set()

    thread = threading.Thread(target=main, name="http-server")
    thread.start()
    started.wait()
    assert found, "the server did not start"
    try:
        yield found[0]
    finally:
        stop.set()
        thread.join()


@contextmanager
def serving_models(
    models: Mapping[str, Any], settings: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[tuple[str, dict[str, AsyncEngine]]]:
    """Serve models by their names, each loaded with `settings`, as `serving_thread` does; `options` of the app. The
    address, and the engines by name."""
    engines: dict[str, AsyncEngine] = {}

    @asynccontextmanager
    async def make_app() -> AsyncIterator[Starlette]:
        async with AsyncExitStack() as stack:
            for name, model in models.items():
                engine = await AsyncEngine.from_pretrained(model, show_progress=False, **(settings or {}))
                engines[name] = await stack.enter_async_context(engine)
            yield app(engines, **options)

    with serving_thread(make_app) as url:
        yield url, engines
