"""Replicas of a fleet pull prefixes from each other: the same answers as one engine's, whatever becomes of a peer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_engine import PATIENCE, until
from support.local_fleet import ENGINE, local_fleet

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.cache_news import CacheNews
from asyncengine.engine import peers, prefix_store
from asyncengine.integrations.fleet.replica import PeerConnections
from asyncengine.integrations.placement.routing import Route, Router, RouteRequest
from asyncengine.request_spec import Peer

pytest.importorskip("zmq", reason='needs pyzmq: pip install "asyncengine[cluster]"')

HERE = "127.0.0.1"
PROMPT = [100 + (7 * place) % 300 for place in range(200)]
FULL = (len(PROMPT) - 1) // 16
PARAMS = SamplingParams(max_tokens=4, temperature=0, logprobs=True, ignore_eos=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model computes sooner than anybody answers. Each answer has one record."""
    monkeypatch.setattr(prefix_store, "WORTH", 1e9)
    monkeypatch.setattr(prefix_store, "LEAST_PATIENCE", PATIENCE)
    monkeypatch.setattr(peers, "ASK_SECONDS", PATIENCE)
    monkeypatch.setattr(peers, "BATCH_BYTES", 1)


def scores(answer: Any) -> list[tuple[int, float]]:
    return [(each.token_id, each.logprob) for each in answer.logprobs]


# ---------------------------------------------------------------- who is asked


def test_the_router_names_who_has_more_than_where_the_request_goes() -> None:
    router, pages = Router(), list(range(10, 18))
    request = RouteRequest(pages)
    router.add("d")
    router.assign(request)  # what is only expected there can be had from nobody
    for name, there in (("a", 2), ("b", 6), ("c", 8)):
        router.add(name)
        router.update(name, CacheNews(tuple(pages[:there])))
    found = {
        name: list(router.holders(Route(name, request, matched)).items())
        for name, matched in {"a": 2, "c": 8, "d": 0}.items()
    }
    assert found == {"a": [("c", 8), ("b", 6)], "c": [], "d": [("c", 8), ("b", 6), ("a", 2)]}


async def test_a_replica_pulls_what_another_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_fleet(monkeypatch, replicas=2) as (fleet, cluster):
        dispatcher = fleet.core.fleet.dispatcher  # type: ignore[attr-defined]
        await until(lambda: all(each.peer is not None for each in dispatcher.replicas.values()), "acquaintance")
        first = await fleet.generate(PROMPT, PARAMS)
        assert first.usage.restored_tokens == 0
        (holder,) = [name for name, each in cluster.processes.items() if each.replica.engine.stats().pages.cached]
        await until(lambda: dispatcher.router.index.match([*dispatcher.router.index.cached]), "news of its cache")
        dispatcher.router.close(holder)
        second = await fleet.generate([*PROMPT, 7, 8], PARAMS)
        assert second.usage.restored_tokens == second.usage.cached_tokens == FULL * 16
        async with await AsyncEngine.from_pretrained("demo", **ENGINE) as alone:
            assert scores(second) == scores(await alone.generate([*PROMPT, 7, 8], PARAMS))
        await until(lambda: fleet.stats().restored_tokens == FULL * 16, "its figures")
        await cluster.settle(fleet)


async def test_without_sharing_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_fleet(monkeypatch, replicas=2, share_prefixes=False) as (fleet, cluster):
        await fleet.generate(PROMPT, PARAMS)
        for process in cluster.processes.values():
            assert "share" not in process.calls


async def test_whoever_is_not_admitted_is_not_answered() -> None:
    answered: list[bytes] = []

    async def answer(question: bytes) -> bytes:
        answered.append(question)
        if question == b"?":
            raise ValueError(question)
        if question == b"...":
            await asyncio.Event().wait()
        return question[::-1]

    here, friend, stranger = (PeerConnections(HERE) for _ in range(3))
    serving = [asyncio.create_task(each.serve(answer)) for each in (here, friend, stranger)]
    try:
        here.admit([friend.public_key])
        with pytest.raises(ConnectionError, match="not admitted"):
            await friend.call(Peer("here", here.url, here.public_key), b"")
        for each in (friend, stranger):
            each.admit([here.public_key])
        peer = Peer("here", here.url, here.public_key)
        refused = asyncio.create_task(stranger.call(peer, b"from a stranger"))
        for number in range(50):
            assert await asyncio.wait_for(friend.call(peer, b"abc%d" % number), PATIENCE) == (b"abc%d" % number)[::-1]
        assert await asyncio.wait_for(friend.call(peer, b"?"), PATIENCE) == b""
        assert not refused.done()
        assert len(answered) == 51
        refused.cancel()
        waiting = asyncio.create_task(friend.call(peer, b"..."))
        await until(lambda: len(answered) == 52, "a question")
        friend.admit([])
        with pytest.raises(ConnectionError, match="gone"):
            await waiting
        assert not friend.sockets
        assert not friend.waiting
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
