"""Calls for vectors on the fake runner: the contract's lines for them. Texts are token ids, each its own oracle."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from support.data import cases_of
from support.fake_engine import SteppedExecutor, executor_of, gather_all, idle, in_thread, make_engine, until

from asyncengine import AsyncEngine, Embeddings, Engine
from asyncengine.engine.vectors.service import VectorModel
from asyncengine.errors import (
    AdapterNotFound,
    EngineClosed,
    EngineDead,
    InvalidParameter,
    QueueFull,
    RequestFailed,
    RequestTimeout,
)
from asyncengine.pooling_spec import PoolingSpec
from asyncengine.request_spec import Pooled
from asyncengine.testing.fake_runner import fake_vector
from asyncengine.testing.leaks import assert_nothing_held

WIDTH = 3
WHOLE, LAST = Pooled(whole=True, every=True), Pooled()


def embedder(pooled: Pooled = WHOLE, *, hosted: bool = False, **settings: Any) -> AsyncEngine:
    modes = ("mean",) if pooled.every else ("lasttoken",)
    model = VectorModel(PoolingSpec("embed", modes, whole=pooled.whole), WIDTH)
    executor = SteppedExecutor(128, 4, width=WIDTH)
    return make_engine(hosted=hosted, executor=executor, wiring={"vectors": model}, **settings)


def some_texts(count: int, seed: int = 0, longest: int = 20) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(2, 97) for _ in range(chance.randrange(1, longest))] for _ in range(count)]


def assert_right(found: Embeddings, texts: list[list[int]], pooled: Pooled = WHOLE) -> None:
    right = np.stack([fake_vector(text, pooled, WIDTH) for text in texts])
    assert found.vectors.dtype == np.float32
    assert (found.vectors == right).all()
    assert found.usage.prompt_tokens == sum(map(len, texts))


@pytest.mark.parametrize("pooled", [WHOLE, Pooled(every=True), LAST], ids=["whole", "every", "last"])
async def test_each_text_has_its_vector_in_order(pooled: Pooled) -> None:
    async with embedder(pooled, max_num_batched_tokens=64) as engine:
        texts = some_texts(700)
        long = [list(range(2, 90)) * 3]  # more than a step's tokens: it goes alone, or in chunks
        assert_right(await engine.embed(texts[:350] + long + texts[350:]), texts[:350] + long + texts[350:], pooled)
        assert (await engine.embed([])).vectors.shape == (0, WIDTH)
        await idle(engine)
        assert_nothing_held(engine.core)
        assert engine.stats().finished == {"stop": 701}


async def test_many_small_calls_share_steps() -> None:
    async with embedder() as engine:
        executor = executor_of(engine)
        executor.keep_batches = True
        texts = some_texts(300)
        found = await asyncio.gather(*(engine.embed([text]) for text in texts))
        for each, text in zip(found, texts, strict=True):
            assert_right(each, [text])
        assert len(executor.executed) <= 8


async def test_a_long_list_takes_a_few_batches_at_a_time() -> None:
    async with embedder() as engine:
        most = 0

        def look(event: object) -> None:
            nonlocal most
            most = max(most, len(engine.core.loop.scheduler.requests) + len(engine.core.loop.inbox.items))

        engine.on_event(look)
        texts = some_texts(3000)
        assert_right(await engine.embed(texts), texts)
        assert 0 < most <= 3 * 256


@pytest.mark.parametrize("hosted", [False, True])
async def test_leaving_in_the_middle(hosted: bool) -> None:
    async with embedder(hosted=hosted) as engine:
        executor, core = executor_of(engine), engine.core
        executor.hold()
        leaving = [asyncio.create_task(engine.embed(some_texts(600, seed))) for seed in range(3)]
        staying = asyncio.create_task(engine.embed(some_texts(40, 9)))
        await until(executor.entered.is_set)
        for task in leaving:
            task.cancel()
        assert all(isinstance(each, asyncio.CancelledError) for each in await gather_all(leaving))
        executor.release()
        assert_right(await staying, some_texts(40, 9))
        await until(lambda: not core.loop.scheduler.requests and not core.loop.delivery.streams)
        assert executor.executed == []
        await idle(engine)
        if not hosted:
            assert_nothing_held(core)


async def test_back_pressure() -> None:
    """A call's first texts are refused where there is no room; who has begun waits for the rest."""
    async with embedder(max_queued_requests=10, max_queued_tokens=120, max_num_seqs=4) as engine:
        executor = executor_of(engine)
        executor.hold()
        texts = some_texts(200)
        call = asyncio.create_task(engine.embed(texts))
        await until(executor.entered.is_set)
        await until(lambda: len(engine.core.loop.queue_limit.line) == 1)
        with pytest.raises(QueueFull, match="max_queued_requests=10"):
            await engine.embed(texts[:10])
        executor.release()
        assert_right(await call, texts)
        await idle(engine)
        assert_nothing_held(engine.core)
    async with embedder(max_queued_requests=3, when_full="wait") as engine:
        found = await asyncio.gather(*(engine.embed(texts) for _ in range(4)))
        for each in found:
            assert_right(each, texts)


async def test_ways_to_end() -> None:
    async with embedder() as engine:
        executor = executor_of(engine)
        executor.hold()
        first = asyncio.create_task(engine.embed(some_texts(5)))
        await until(executor.entered.is_set)
        late = asyncio.create_task(engine.embed(some_texts(300), timeout=0.01))
        aborted = asyncio.create_task(engine.embed(some_texts(300), request_id="mine"))
        await until(lambda: engine.abort("mine"))
        out_of_time = engine.core.loop.clock.now() + 0.01
        await until(lambda: engine.core.loop.clock.now() > out_of_time)
        executor.release()
        with pytest.raises(RequestFailed, match="mine: text 0 was aborted"):
            await aborted
        with pytest.raises(RequestTimeout, match="not done in time"):
            await late
        assert_right(await first, some_texts(5))
        executor.fail_tickets = dict.fromkeys(range(1000, 2000), "broken")
        ticket = engine.core.validator.next_ticket()
        executor.fail_tickets = {ticket + 4: "broken"}
        with pytest.raises(RequestFailed, match="text 3: broken"):
            await engine.embed(some_texts(6))
        assert_right(await engine.embed(some_texts(6)), some_texts(6))
        await idle(engine)
        assert_nothing_held(engine.core)
        assert {"timeout", "abort", "error", "stop"} <= set(engine.stats().finished)


async def test_the_first_failure_of_a_call_aborts_the_rest_of_it() -> None:
    async with embedder(max_num_seqs=1) as engine:
        executor_of(engine).fail_tickets = {engine.core.validator.next_ticket() + 1: "broken"}
        with pytest.raises(RequestFailed, match="text 0: broken"):
            await engine.embed(some_texts(6))
        await idle(engine)
        assert engine.stats().finished["abort"] >= 4  # the second may be in a step already
        assert_nothing_held(engine.core)


async def test_the_end_of_the_engine() -> None:
    engine = embedder()
    async with engine:
        executor_of(engine).hold()
        calls = [asyncio.create_task(engine.embed(some_texts(400, seed))) for seed in range(3)]
        await until(executor_of(engine).entered.is_set)
        executor_of(engine).failure = RuntimeError("planted")
        executor_of(engine).release()
        assert [type(each) for each in await gather_all(calls)] == [EngineDead] * 3
        with pytest.raises(EngineDead):
            await engine.embed([[2]])
    engine = embedder()
    await engine.start()
    executor_of(engine).hold()
    call = asyncio.create_task(engine.embed(some_texts(20)))
    await until(executor_of(engine).entered.is_set)
    closing = asyncio.create_task(engine.aclose(drain=True))
    await until(lambda: not engine.alive)
    executor_of(engine).release()
    await closing
    assert_right(await call, some_texts(20))
    with pytest.raises(EngineClosed):
        await engine.embed([[2]])


async def test_blocking_calls_from_threads() -> None:
    async with embedder(hosted=True) as engine:
        blocking = Engine(engine)
        found = await asyncio.gather(*(in_thread(lambda s=s: blocking.embed(some_texts(300, s))) for s in range(4)))
        for seed, each in enumerate(found):
            assert_right(each, some_texts(300, seed))


async def test_a_causal_embedder_starts_from_the_cache() -> None:
    async with embedder(LAST) as engine:
        shared = list(range(2, 34))
        texts = [[*shared, token] for token in range(2, 30)]
        found = await engine.embed(texts)
        assert_right(found, texts, LAST)
        assert found.usage.cached_tokens >= 27 * 32
    async with embedder(Pooled(every=True)) as engine:
        executor_of(engine).keep_batches = True
        found = await engine.embed(texts)
        assert_right(found, texts, Pooled(every=True))
        assert found.usage.cached_tokens == 0
        assert len(executor_of(engine).executed) <= 3  # they gain nothing by waiting for each other


BAD: list[tuple[str, Any, dict[str, Any], str, type[Exception]]] = [
    *((*row, InvalidParameter) for row in cases_of(__file__)["bad"]),
    ("bytes", [b"ab"], {}, r"texts\[0\]: must be a str", InvalidParameter),
    ("too long", [[2] * 2000], {"truncate": False}, r"texts\[0\]: .*1000 tokens", InvalidParameter),
    ("dimensions too many", [[2]], {"dimensions": WIDTH + 1}, "dimensions: .*3", InvalidParameter),
    ("timeout", [[2]], {"timeout": float("nan")}, "timeout", InvalidParameter),
    ("no adapters", [[2]], {"adapter": "a"}, "adapter", AdapterNotFound),
]


async def test_bad_input_is_named_and_disturbs_nobody() -> None:
    async with embedder() as engine:
        good = asyncio.create_task(engine.embed(some_texts(500)))
        for _, texts, options, match, kind in BAD:
            with pytest.raises(kind, match=match):
                await engine.embed(texts, **options)
        for call in (engine.generate([2, 3]), engine.chat([{"role": "user", "content": "a"}])):
            with pytest.raises(InvalidParameter, match="is an embedding model: it serves embed"):
                await call
        with pytest.raises(InvalidParameter, match="rerank: is not served: fake is an embedding model"):
            await engine.rerank("a", ["b"])
        with pytest.raises(InvalidParameter, match="classify: is not served"):
            await engine.classify(["b"])
        cut = await engine.embed([[2], [3] * 2000])
        assert cut.truncated == (1,)
        assert cut.usage.prompt_tokens == 1001
        assert_right(await good, some_texts(500))
        await idle(engine)
        assert_nothing_held(engine.core)
    async with make_engine() as engine:
        with pytest.raises(InvalidParameter, match=r'embed: .*text generator.*pooling="last"'):
            await engine.embed(["a"])
        with pytest.raises(InvalidParameter, match=r'rerank: .*task="rerank"'):
            await engine.rerank("a", ["b"])
