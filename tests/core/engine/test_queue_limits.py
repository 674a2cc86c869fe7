"""Back-pressure at submit: refused at once, or a place in line; n samples are all or nothing (contract 6)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.fake_engine import executor_of, greedy, idle, in_thread, make_engine, num_in_line, until

from asyncengine import AsyncEngine, Engine, TokenStream
from asyncengine.engine.serving_loop import QueueLimit
from asyncengine.errors import EngineClosed, QueueFull
from asyncengine.options import RequestOptions
from asyncengine.testing.leaks import assert_nothing_held


@asynccontextmanager
async def one_running(**settings: Any) -> AsyncIterator[AsyncEngine]:
    """An engine with one seat, taken by a request whose step is held until `executor_of(engine).release()`."""
    async with make_engine(max_num_seqs=1, **settings) as engine:
        executor_of(engine).hold()
        async with engine.stream([2, 3], greedy(4)) as running:
            await in_thread(executor_of(engine).entered.wait)
            await until(lambda: engine.core.loop.queue_limit.waiting == 0)
            yield engine
            assert (await running.result()).finish_reason == "length"
        await idle(engine)
        assert_nothing_held(engine.core)


async def queued(engine: AsyncEngine, prompt: Sequence[int] = (4, 5), **params: Any) -> TokenStream:
    """A stream that has its place in the queue."""
    return await engine.stream([*prompt], greedy(2, **params)).__aenter__()


@pytest.mark.parametrize(
    ("settings", "field", "limit"),
    [({"max_queued_requests": 2}, "max_queued_requests", 2), ({"max_queued_tokens": 5}, "max_queued_tokens", 5)],
)
async def test_a_full_queue_is_refused_at_once_and_names_its_limit(settings, field: str, limit: int):
    async with one_running(**settings) as engine:
        streams = [await queued(engine) for _ in range(2)]
        with pytest.raises(QueueFull, match=f"{field}={limit}") as refused:
            await engine.generate([6, 7], greedy(2))
        assert (refused.value.field, refused.value.limit) == (field, limit)
        executor_of(engine).release()
        for stream in streams:
            assert (await stream.result()).finish_reason
        await engine.generate([6, 7], greedy(2))


async def test_n_samples_take_n_places_or_none():
    async with one_running(max_queued_requests=3) as engine:
        first = await queued(engine, n=2)
        with pytest.raises(QueueFull):
            await engine.generate([6, 7], greedy(2, n=2))
        assert engine.core.loop.queue_limit.waiting == 2
        last = await queued(engine)
        executor_of(engine).release()
        await asyncio.gather(first.result(), last.result())


async def test_a_limit_of_zero_admits_only_what_nobody_waits_before():
    async with one_running(max_queued_requests=0) as engine:
        one = await queued(engine)
        with pytest.raises(QueueFull):
            await engine.generate([6, 7], greedy(2))
        executor_of(engine).release()
        await one.result()


async def test_leaving_the_queue_frees_the_place():
    async with one_running(max_queued_requests=1) as engine:
        await (await queued(engine)).aclose()
        executor_of(engine).release()
        await until(lambda: engine.core.loop.queue_limit.waiting == 0)
        await engine.generate([6, 7], greedy(2))


async def test_waiting_for_a_place_is_first_come_first_served():
    async with one_running(max_queued_requests=1, when_full="wait") as engine:
        order: list[int] = []

        async def call(i: int) -> None:
            async with engine.stream([4, 2 + i], greedy(2)) as stream:
                order.append(i)
                await stream.result()

        tasks = []
        for i in range(8):
            tasks.append(asyncio.create_task(call(i)))
            await asyncio.sleep(0)
        executor_of(engine).release()
        await asyncio.gather(*tasks)
        assert order == list(range(8))


async def test_cancelling_the_wait_gives_the_place_in_line_back():
    async with one_running(max_queued_requests=1, when_full="wait") as engine:
        calls = [asyncio.create_task(engine.generate([4, 2 + i], greedy(2))) for i in range(5)]
        await until(lambda: num_in_line(engine) == 4)
        for call in calls[1:4]:
            call.cancel()
        await until(lambda: num_in_line(engine) == 1)
        executor_of(engine).release()
        await asyncio.gather(calls[0], calls[4])


async def test_cancelling_in_the_very_moment_of_the_grant_gives_the_place_on():
    gate = QueueLimit(1, None)
    gate.enter(1, 1)
    waits = [asyncio.create_task(gate.enter_when_free(1, 1)) for _ in range(2)]
    await asyncio.sleep(0)
    gate.leave(1, 1)
    waits[0].cancel()
    await asyncio.wait(waits)
    assert waits[0].cancelled()
    assert waits[1].exception() is None
    assert gate.waiting == 1


@pytest.mark.parametrize("drain", [True, False])
async def test_closing_tells_those_in_line_at_once(drain: bool):
    engine = await make_engine(max_num_seqs=1, max_queued_requests=1, when_full="wait").__aenter__()
    executor_of(engine).hold()
    running = await queued(engine)
    await until(lambda: engine.core.loop.queue_limit.waiting == 0)
    behind = await queued(engine)
    waits = [asyncio.create_task(engine.generate([4, 5], greedy(2))) for _ in range(3)]
    await until(lambda: num_in_line(engine) == 3)
    closing = asyncio.create_task(engine.aclose(drain=drain))
    await asyncio.sleep(0)
    executor_of(engine).release()
    for wait in waits:
        with pytest.raises(EngineClosed):
            await wait
    await closing
    for stream in (running, behind):
        assert (await stream.result()).finish_reason == ("length" if drain else "abort")


async def test_what_exceeds_a_limit_alone_is_refused_even_where_others_wait():
    async with make_engine(max_queued_requests=2, max_queued_tokens=10, when_full="wait") as engine:
        with pytest.raises(QueueFull):
            await engine.generate([2], greedy(2, n=3))
        with pytest.raises(QueueFull):
            await engine.generate([2] * 11, greedy(2))
        assert (await engine.generate([2] * 10, greedy(2))).token_ids


def test_a_plain_thread_waits_in_the_same_line():
    engine = Engine(make_engine(hosted=True, max_queued_requests=1, when_full="wait", max_num_seqs=1))
    engine.aengine.start_blocking()
    with engine:
        results: list[int] = []
        threads = [
            threading.Thread(target=lambda i=i: results.append(len(engine.generate([2 + i], greedy(3)).token_ids)))
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(results) == 8


def test_an_interrupted_wait_gives_its_place_back():
    """Ctrl-C in a blocking call that waits for a place."""

    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            raise KeyboardInterrupt

    gate = QueueLimit(1, None)
    gate.enter(1, 1)
    real, threading.Event = threading.Event, Interrupted  # type: ignore[misc]
    try:
        with pytest.raises(KeyboardInterrupt):
            gate.enter_blocking(1, 1)
    finally:
        threading.Event = real  # type: ignore[misc]
    gate.leave(1, 1)
    assert gate.waiting == 0
    gate.enter(1, 1)  # nobody is in line before it


# -------------------------------------------------------------------- deadlines at the gate


@pytest.mark.parametrize("how", ["call", "chat of many samples", "request_timeout", "waiting_timeout", "thread"])
async def test_deadlines_run_while_a_request_waits_for_a_place(how: str):
    """The request never reached the engine: the step in progress may take any time."""
    settings = {how: 0.05} if how.endswith("_timeout") else {}
    async with one_running(max_queued_requests=2, when_full="wait", hosted=how == "thread") as engine:
        ahead = await queued(engine, n=2)
        config, samples = engine.core.config, 2 if "many" in how else 1
        if settings:
            engine.core.validator.config = config.replace(**settings)
        options: dict[str, float] = {} if settings else {"timeout": 0.05}
        params = greedy(2, n=samples)
        if how == "thread":
            done = await in_thread(lambda: Engine(engine).generate([6, 7], params, **options))
        else:
            done = await engine.generate([6, 7], params, **options)
        assert [sample.finish_reason for sample in done.samples] == ["timeout"] * samples
        assert (done.text, done.usage.prompt_tokens, done.usage.completion_tokens) == ("", 2, 0)
        assert done.timings.first_token is None
        assert 0.05 <= done.timings.total < 60
        assert engine.stats().finished == {"timeout": samples}
        assert not num_in_line(engine)
        executor_of(engine).release()
        await ahead.result()


async def test_one_whose_time_is_up_makes_room_for_those_behind():
    gate = QueueLimit(None, 10)
    gate.enter(1, 8)
    times = [0.02, 0.0]
    large = asyncio.create_task(gate.enter_when_free(1, 9, lambda: times.pop(0)))
    await asyncio.sleep(0)
    small = asyncio.create_task(gate.enter_when_free(1, 2))
    assert await large is False
    assert await small is True
    assert (gate.waiting, gate.expired) == (2, 1)


async def test_deadlines_count_from_submit_and_not_from_the_gate():
    async with one_running(max_queued_requests=1, when_full="wait") as engine:
        clock = engine.core.loop.clock
        prepared = engine.core.prepare([4, 5], greedy(2), RequestOptions(timeout=9.0), clock.now() - 10.0)
        ahead = await queued(engine)
        assert prepared.spec.start_by <= clock.now()
        assert await engine.core.client.enter(prepared) is False
        executor_of(engine).release()
        await ahead.result()
