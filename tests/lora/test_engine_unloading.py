"""Loading and unloading while an engine serves: refused, awaited, cancelled, or cut off by the engine's end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.adapter_engine import PROMPT, Face, greedy
from support.fake_adapters import digest_of
from support.fake_engine import until

from asyncengine.errors import AdapterInUse, AdapterNotFound, InvalidParameter

pytestmark = pytest.mark.usefixtures("no_thread_left")


@pytest.fixture
async def face(kind: str) -> AsyncIterator[Face]:
    made = Face(kind, pages=600, page_size=64)
    async with made.engine:
        yield made
        made.loader.gate.set()
        made.executor.release()
        await made.settled()


async def test_load_list_use_unload(face: Face) -> None:
    infos = [await face.load_adapter(name, name) for name in ("b", "a")]
    assert [(info.name, info.digest, info.requests, info.in_memory) for info in infos] == [
        (name, digest_of(name), 0, True) for name in ("b", "a")
    ]
    assert face.names() == ["a", "b"]
    assert face.engine.adapters() == (infos[1], infos[0])
    assert face.engine.stats().adapters == {"loaded": 2, "in_memory": 2, "nbytes": 1600}
    assert face.right(await face.engine.generate(PROMPT, greedy(9), adapter="a"), PROMPT, 9, "a")
    await face.unload_adapter("a")
    assert face.names() == ["b"]
    for call in (face.unload_adapter("a"), face.engine.generate(PROMPT, greedy(9), adapter="a")):
        with pytest.raises(AdapterNotFound, match="loaded: 'b'"):
            await call


async def test_what_is_no_path_is_refused_by_name(face: Face) -> None:
    for path in (None, 7, b"a"):
        with pytest.raises(InvalidParameter, match="path"):
            await face.load_adapter("a", path)


async def test_unload_is_refused_while_in_use_and_waits_if_told_to(face: Face) -> None:
    await face.load("a", "b")
    streams = [await face.running("a") for _ in range(3)]
    with pytest.raises(AdapterInUse, match="3 requests"):
        await face.unload_adapter("a")
    assert face.names() == ["a", "b"]
    waiting = asyncio.create_task(face.unload_adapter("a", wait=True))
    await until(lambda: face.names() == ["b"])
    with pytest.raises(AdapterNotFound):
        await face.engine.generate(PROMPT, greedy(3), adapter="a")
    for stream in streams:
        assert not waiting.done()
        await stream.aclose()
    await waiting
    assert face.registry.counts()["in_memory"] == 1


async def test_waiting_to_unload_does_not_keep_old_requests_from_finishing(face: Face) -> None:
    """Requests that had not started finish, too; the name may be taken again meanwhile."""
    await face.load("a")
    face.executor.hold()
    calls = [asyncio.create_task(face.engine.generate(PROMPT, greedy(9, n=1 + i % 2), adapter="a")) for i in range(4)]
    await until(lambda: face.claims == 6)
    waiting = [asyncio.create_task(face.unload_adapter("a", wait=True))]
    await until(lambda: face.names() == [])
    face.loader.contents["a"] = "changed"
    await face.load_adapter("a", "a")
    newer = asyncio.create_task(face.engine.generate(PROMPT, greedy(9), adapter="a"))
    await until(lambda: face.claims == 7)
    face.executor.release()
    for made in await asyncio.gather(*calls):
        assert made.samples[0].token_ids == face.expected(PROMPT, 9, "a")
    await asyncio.gather(*waiting)
    assert face.right(await newer, PROMPT, 9, "changed")


async def test_a_finished_request_is_not_in_the_way(face: Face) -> None:
    """A caller that has read the end of a request may unload what it used at once, from any thread."""
    deliver, delivery = face.engine.core.loop.delivery.deliver, face.engine.core.loop.delivery

    def slowly(outputs: Any) -> None:
        deliver(outputs)
        if face.engine.hosted and any(output.reason for output in outputs):
            threading.Event().wait(0.01)  # consumers on other threads are quicker than the rest of this turn

    delivery.deliver = slowly  # type: ignore[method-assign]
    for turn in range(5):
        await face.load_adapter("a", "a")
        made = await face.engine.generate(PROMPT, greedy(2 + turn, n=1 + turn % 2), adapter="a")
        assert made.samples[0].token_ids == face.expected(PROMPT, 2 + turn, "a")
        await face.unload_adapter("a")
