"""A fleet of models that give vectors: the same as of one engine, whatever becomes of its replicas. Without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.fake_engine import until
from support.local_fleet import local_fleet, replaced

from asyncengine import AsyncEngine, Engine, EngineDead, InvalidParameter, QueueFull, RequestTimeout
from asyncengine.integrations.langchain import AsyncEngineEmbeddings
from asyncengine.integrations.llama_index import AsyncEngineEmbedding

EMBEDDER = {"num_threads": 1, "show_progress": False, "dtype": "float32"}
TEXTS = [f"The archive of number {number} lies in {'a distant ' * (number % 40)}town." for number in range(500)]


@pytest.fixture(scope="module")
def alone() -> Iterator[AsyncEngine]:
    with Engine.from_pretrained("demo-embed", **EMBEDDER) as engine:
        yield engine.aengine


async def test_the_same_vectors_as_of_one_engine(monkeypatch: pytest.MonkeyPatch, alone: AsyncEngine) -> None:
    async with local_fleet(monkeypatch, replicas=2, model="demo-embed") as (fleet, cluster):
        assert replace(fleet.info, no_logits_processors=None) == alone.info
        one, other = await fleet.embed(TEXTS), await alone.embed(TEXTS)
        np.testing.assert_allclose(one.vectors, other.vectors, atol=1e-6)
        assert one.usage == other.usage
        computed = [process.replica.engine.stats().prompt_tokens for process in cluster.processes.values()]
        assert min(computed) > sum(computed) / 5  # both had work
        query, wanted = "who?", {"prompt_name": "query", "dimensions": 8}
        blocking = await asyncio.to_thread(lambda: Engine(fleet).embed(query, **wanted))
        np.testing.assert_allclose((await fleet.embed(query, **wanted)).vectors, blocking.vectors, atol=1e-6)
        chains = [AsyncEngineEmbeddings(engine=engine) for engine in (fleet, alone)]
        np.testing.assert_allclose(*[await chain.aembed_documents(TEXTS[:3]) for chain in chains], atol=1e-6)
        indices = [AsyncEngineEmbedding(engine=engine) for engine in (fleet, alone)]
        np.testing.assert_allclose(*[await index.aget_text_embedding(TEXTS[5]) for index in indices], atol=1e-6)
        for call in (fleet.rerank("who?", TEXTS[:2]), fleet.classify(TEXTS[:2]), fleet.generate("x")):
            with pytest.raises(InvalidParameter, match=r"demo-embed is an embedding model: it serves embed\(\)"):
                await call
        with pytest.raises(InvalidParameter, match=r"texts\[1\]"):
            await fleet.embed(["fine", [10**6]])
        with pytest.raises(RequestTimeout):
            await fleet.embed(TEXTS, timeout=1e-6)
        await until(lambda: fleet.stats().finished.get("stop", 0) > len(TEXTS), "figures")
        await cluster.settle(fleet)


@pytest.mark.parametrize("on_loss", ["error", "resume"])
async def test_a_replica_lost_in_mid_call(monkeypatch: pytest.MonkeyPatch, alone: AsyncEngine, on_loss: str) -> None:
    """It ends the calls that had texts there, or they are computed elsewhere, and nobody notices."""
    async with local_fleet(monkeypatch, replicas=2, model="demo-embed", on_loss=on_loss) as (fleet, cluster):
        cluster.hold()
        call = asyncio.create_task(fleet.embed(TEXTS))
        await until(lambda: any(fleet.stats().loads.values()), "texts under way")
        cluster.busiest(fleet).lose()
        cluster.release()
        if on_loss == "error":
            with pytest.raises(EngineDead, match="was lost"):
                await call
        else:
            np.testing.assert_allclose((await call).vectors, (await alone.embed(TEXTS)).vectors, atol=1e-6)
            assert fleet.stats().resumed
        await replaced(fleet, 2)
        assert len((await fleet.embed(TEXTS[:3])).vectors) == 3
        await cluster.settle(fleet)


async def test_a_call_that_is_left_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_fleet(monkeypatch, replicas=2, model="demo-embed", max_queued_requests=64) as (fleet, cluster):
        cluster.hold()
        calls = [asyncio.create_task(fleet.embed(TEXTS)) for _ in range(3)]
        await until(lambda: any(fleet.stats().loads.values()), "texts under way")
        refused = [call for call in calls if call.done() and isinstance(call.exception(), QueueFull)]
        for call in calls:
            call.cancel()
        cluster.release()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, (asyncio.CancelledError, QueueFull)) for end in ended)
        assert len(refused) < 3
        await cluster.settle(fleet)
        assert len((await fleet.embed(TEXTS[:3])).vectors) == 3
    with pytest.raises(Exception, match="closed"):
        await fleet.embed("x")
