"""A stream that nobody reads leaves the steps, and costs others neither pages nor seats nor time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_engine import executor_of, greedy, in_thread, make_engine, until

from asyncengine import AsyncEngine, Engine, stream
from asyncengine.testing import ManualClock
from asyncengine.testing.leaks import assert_nothing_held

LIMIT, LONG = 32, 200
HOSTINGS = [pytest.param(False, id="owned"), pytest.param(True, id="hosted")]


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "UNREAD", LIMIT)


def expected(engine: AsyncEngine, prompt: list[int], count: int) -> list[int]:
    return executor_of(engine).model.oracle(prompt, count, 0, ())


async def suspended(engine: AsyncEngine, count: int) -> None:
    await until(lambda: engine.stats().requests["suspended"] == count, f"{count} suspended requests")


def long(**params: Any) -> Any:
    return greedy(LONG, ignore_eos=True, **params)


@pytest.mark.parametrize("hosted", HOSTINGS)
@pytest.mark.parametrize("depth", [1, 2])
async def test_who_does_not_read_is_not_computed_and_then_gets_everything(hosted: bool, depth: int) -> None:
    async with make_engine(hosted=hosted, max_steps_in_flight=depth, max_num_seqs=2) as engine:
        streams = [engine.stream([2, 3, 4 + i], long()) for i in range(3)]
        firsts = [await anext(each) for each in streams]
        await suspended(engine, 3)
        stats = engine.stats()
        unread = stats.generated_tokens - sum(len(first.token_ids) for first in firsts)
        assert unread <= 3 * (LIMIT + 2 * depth)
        assert (stats.requests["running"], stats.requests["waiting"], stats.pages.held) == (0, 0, 0)
        served = await engine.generate([7, 8], greedy(40, ignore_eos=True))  # the two seats are free
        assert served.token_ids == expected(engine, [7, 8], 40)
        for i, each in enumerate(streams):
            tokens = [token for chunk in [firsts[i], *[chunk async for chunk in each]] for token in chunk.token_ids]
            assert tokens == expected(engine, [2, 3, 4 + i], LONG)
        assert engine.stats().preemptions == 0
        await until(lambda: not engine.stats().pages.held)
        assert_nothing_held(engine.core)


async def test_samples_share_the_limit_and_result_lifts_it() -> None:
    async with make_engine() as engine, engine.stream([2, 3, 4], long(n=3)) as read:
        await anext(read)
        await suspended(engine, 3)
        assert engine.stats().generated_tokens <= LIMIT + 12
        done = await read.result()
    assert [len(sample.token_ids) for sample in done.samples] == [LONG] * 3


async def test_a_whole_answer_is_never_suspended() -> None:
    async with make_engine() as engine:
        asked = asyncio.create_task(engine.generate([2, 3, 4], long()))
        most = 0
        while not asked.done():
            await asyncio.sleep(0)
            most = max(most, engine.stats().requests["suspended"])
        assert most == 0


async def test_leaving_and_deadlines_of_a_suspended_request() -> None:
    clock = ManualClock()
    async with make_engine(inter_token_timeout=0.1, wiring={"clock": clock}) as engine:
        slow = engine.stream([2, 3], long())
        late = engine.stream([4, 5], long(), timeout=0.2)
        left = engine.stream([6, 7], long())
        for each in (slow, late, left):
            await anext(each)
        await suspended(engine, 3)
        clock.advance(1.0)
        left.abort()
        await suspended(engine, 1)  # the deadline of the whole has passed; that between tokens waits for the reader
        assert [chunk async for chunk in late][-1].finish_reason == "timeout"
        assert [chunk async for chunk in left][-1].finish_reason == "abort"
        assert [chunk async for chunk in slow][-1].finish_reason == "length"
        assert_nothing_held(engine.core)


async def test_draining_and_pausing_wait_for_no_reader() -> None:
    async with make_engine(hosted=True) as engine:
        first = engine.stream([2, 3], long())
        await anext(first)
        await suspended(engine, 1)
        await asyncio.wait_for(engine.pause(mode="finish"), 20)
        await engine.resume()
        second = engine.stream([4, 5], long())
        await anext(second)
        await suspended(engine, 1)
        await asyncio.wait_for(engine.aclose(drain=True), 20)
        for each in (first, second):
            assert [chunk async for chunk in each][-1].finish_reason == "length"


async def test_readers_on_threads_are_waited_for_too() -> None:
    async with make_engine(hosted=True) as engine:
        sync = Engine(engine)  # type: ignore[arg-type]
        read = await in_thread(lambda: sync.stream([2, 3], long()))
        await suspended(engine, 1)
        tokens = await in_thread(lambda: [token for chunk in read for token in chunk.token_ids])
        assert tokens == expected(engine, [2, 3], LONG)
