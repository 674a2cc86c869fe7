"""`cache_events`: adding up the batches gives what the cache holds, for any reader, however late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict

import pytest
from support.fake_engine import CACHE_KINDS, SteppedExecutor, executor_of, greedy, idle, make_engine, until

from asyncengine import (
    AllBlocksCleared,
    AsyncEngine,
    BlockRemoved,
    BlockStored,
    EngineClosed,
    EngineDead,
    InvalidParameter,
    KVEventBatch,
)
from asyncengine.cache_news import page_hashes

PROMPT = list(range(2, 30))


class Mirror:
    """The knowledge of a router: the path of tokens that each block of a cache stands for."""

    def __init__(self) -> None:
        self.paths: dict[int, tuple[int, ...]] = {}
        self.next = self.lost = 0

    def apply(self, batch: KVEventBatch) -> None:
        assert batch.seq == self.next + batch.lost
        self.next, self.lost = batch.seq + 1, self.lost + batch.lost
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.paths.clear()
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.paths[block]  # it was told of it
            else:
                self.store(event)

    def store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        path = () if parent is None else self.paths[parent]
        for index, block in enumerate(event.block_hashes):
            path += event.token_ids[index * size : (index + 1) * size]
            assert block not in self.paths
            self.paths[block] = path


def cached(engine: AsyncEngine) -> set[int]:
    return {node.hash % 2**64 for node in engine.core.loop.scheduler.kv.tree.nodes()}


async def read(stream: AsyncIterator[KVEventBatch], mirror: Mirror, engine: AsyncEngine) -> None:
    """Read until the mirror knows all that is cached."""
    while not mirror.next or set(mirror.paths) != cached(engine):
        mirror.apply(await anext(stream))


@pytest.mark.parametrize("kind", ["pages", "states", "window pages"])
async def test_batches_add_up_to_the_cache(kind: str) -> None:
    """With evictions and resets, for a reader in time, one that comes later, and one that sleeps most of the time."""
    rng = random.Random(kind)
    async with make_engine(executor=SteppedExecutor(40, 4, **CACHE_KINDS[kind])) as engine:
        prompt, late, slow = Mirror(), Mirror(), Mirror()
        streams = [engine.cache_events(), engine.cache_events(), engine.cache_events(buffer=2)]
        await read(streams[0], prompt, engine)
        await read(streams[2], slow, engine)
        assert (prompt.paths, prompt.next) == ({}, 1), "it begins with an empty cache"
        for turn in range(24):
            prompts = [[rng.randrange(2, 4) for _ in range(rng.randrange(4, 40))] for _ in range(3)]
            await asyncio.gather(*(engine.generate(tokens, greedy(5)) for tokens in prompts))
            await idle(engine)
            if turn % 8 == 5:
                await engine.reset_prefix_cache()
            await read(streams[0], prompt, engine)
            if turn > 9:
                await read(streams[1], late, engine)
        await read(streams[2], slow, engine)
        assert prompt.paths == late.paths == slow.paths != {}
        assert (prompt.lost, late.lost, slow.lost > 10) == (0, 0, True)
        for block, path in prompt.paths.items():
            assert page_hashes(("", ""), path, 4)[-1] % 2**64 == block
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        await engine.generate(PROMPT, greedy(2))
        await idle(engine)
        assert not engine.core.loop.cache_feeds
        assert not engine.core.loop.scheduler.kv.tree.logs, "who has left costs nothing"


async def test_fields_are_those_of_vllm() -> None:
    async with make_engine() as engine, aclosing(engine.cache_events()) as stream:
        assert asdict(await anext(stream))["events"] == ({"type": "AllBlocksCleared"},)
        await engine.generate(PROMPT[:9], greedy(1), cache_salt="tenant")
        batch = asdict(await anext(stream))
        hashes = tuple(page % 2**64 for page in page_hashes(("", "tenant"), PROMPT[:8], 4))
        assert batch["events"] == (
            {
                "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": (*PROMPT[:8],),
                "block_size": 4, "medium": "CPU", "lora_id": None, "lora_name": None, "extra_keys": (("tenant",), None),
            },
        )  # fmt: skip
        assert {name: batch[name] for name in ("seq", "lost", "data_parallel_rank")} == {
            "seq": 1, "lost": 0, "data_parallel_rank": None,
        }  # fmt: skip
        await engine.generate(PROMPT, greedy(1), cache_salt="tenant")
        (stored,) = (await anext(stream)).events
        assert isinstance(stored, BlockStored)
        assert (stored.parent_block_hash, stored.extra_keys) == (hashes[-1], None)
        await engine.reset_prefix_cache("tenant")
        assert (await anext(stream)).events == (AllBlocksCleared(),)


async def test_it_ends_with_the_engine() -> None:
    engine = make_engine()
    async with engine:
        stream = engine.cache_events()
        await anext(stream)
        rest = asyncio.create_task(anext(stream, None))
        await until(lambda: len(engine.core.loop.cache_feeds) == 1)
    assert await rest is None
    with pytest.raises(EngineClosed):
        engine.cache_events()
    engine = make_engine()
    await engine.start()
    stream = engine.cache_events()
    await anext(stream)
    executor_of(engine).failure = RuntimeError("the device fell off")
    with pytest.raises(EngineDead):
        await engine.generate(PROMPT, greedy(2))
    with pytest.raises(EngineDead, match="fell off"):
        _ = [batch async for batch in stream]
    await engine.aclose()


async def test_a_hosted_engine_is_read_from_another_loop() -> None:
    async with make_engine(hosted=True) as engine, aclosing(engine.cache_events()) as stream:
        mirror = Mirror()
        await engine.generate(PROMPT, greedy(2))
        await read(stream, mirror, engine)
        assert len(mirror.paths) == 7


async def test_refused_by_name() -> None:
    async with make_engine(prefix_caching=False) as engine:
        with pytest.raises(InvalidParameter, match="prefix cache"):
            engine.cache_events()
    async with make_engine() as engine:
        with pytest.raises(InvalidParameter, match="buffer"):
            engine.cache_events(buffer=0)
