"""A request with an adapter gives back what it claimed, however it ends: memory, device slot, place at the gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from support.adapter_engine import ENDLESS, PROMPT, Lab, greedy
from support.fake_engine import gather_all, in_thread, num_in_line, until

from asyncengine.errors import AdapterNotFound
from asyncengine.options import RequestOptions

pytestmark = pytest.mark.usefixtures("no_thread_left")


@pytest.fixture
async def lab(hosted: bool) -> AsyncIterator[Lab]:
    """Two adapters in memory that holds one: using "b" needs no file, using "a" does."""
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_queued_requests": 8, "max_loras": 1, "page_size": 64}
    made = Lab(hosted=hosted, room=1, pages=400, **settings)
    async with made.engine:
        await made.load("a", "b")
        yield made
        made.loader.gate.set()
        made.executor.release()
        await made.settled()
        assert made.right(await made.engine.generate(PROMPT, greedy(9), adapter="b"), PROMPT, 9, "b")
        assert made.right(await made.engine.generate(PROMPT, greedy(9), adapter="a"), PROMPT, 9, "a")
        assert made.right(await made.engine.generate(PROMPT, greedy(9)), PROMPT, 9)
        await made.settled()


async def test_refused_before_anything_is_claimed(lab: Lab) -> None:
    for options in ({"adapter": "nobody"}, {"adapter": ""}, {"adapter": 7}, {"adapter": "a", "priority": "high"}):
        with pytest.raises((AdapterNotFound, ValueError)):
            await lab.engine.generate(PROMPT, greedy(3), **options)
    with pytest.raises(ValueError, match="max_tokens"):
        await lab.engine.generate(PROMPT, greedy(10**7), adapter="a")
    assert lab.claims == 0


async def test_cancelled_while_waiting_at_the_gate(hosted: bool) -> None:
    lab = Lab(hosted=hosted, max_queued_requests=1, when_full="wait", max_num_seqs=1)
    async with lab.engine:
        await lab.load("a")
        lab.executor.hold()
        calls = [asyncio.create_task(lab.engine.generate(PROMPT, greedy(4), adapter="a")) for _ in range(6)]
        claimed = 2  # one runs, one is queued
        await until(lambda: num_in_line(lab.engine) == 4 and lab.claims == claimed)
        waiting = [call for call in calls if not call.done()][-3:]
        for call in waiting:
            call.cancel()
        await asyncio.wait(waiting)
        assert lab.claims == claimed
        lab.executor.release()
        done = await gather_all(calls)
        assert all(isinstance(one, asyncio.CancelledError) for one in done[-3:])
        assert all(lab.right(one, PROMPT, 4, "a") for one in done[:-3])
        await lab.settled()


@pytest.mark.parametrize("when_full", ["error", "wait"])
async def test_unloaded_between_accept_and_post(when_full: str) -> None:
    """The name was there when the request was checked, and is gone when it has passed the gate."""
    lab = Lab(max_queued_requests=3, max_queued_tokens=100, when_full=when_full, max_num_seqs=1)
    async with lab.engine:
        await lab.load("a", "b")
        core = lab.engine.core
        prepared = core.prepare(PROMPT, greedy(4, n=2), RequestOptions(adapter="a"))
        await core.client.enter(prepared)
        assert (core.loop.queue_limit.waiting, core.loop.queue_limit.waiting_tokens) == (2, 10)
        await lab.engine.unload_adapter("a")
        with pytest.raises(AdapterNotFound):
            core.post(prepared)
        assert (core.loop.queue_limit.waiting, core.loop.queue_limit.waiting_tokens) == (0, 0)
        assert not core.loop.delivery.expected
        assert not core.client.abort(prepared.spec.request_id)
        await lab.settled()
        assert lab.right(await lab.engine.generate(PROMPT, greedy(4), adapter="b"), PROMPT, 4, "b")


async def test_unloaded_while_waiting_at_the_gate() -> None:
    lab = Lab(max_queued_requests=1, when_full="wait", max_num_seqs=1)
    async with lab.engine:
        await lab.load("a", "b")
        lab.executor.hold()
        first = [asyncio.create_task(lab.engine.generate(PROMPT, greedy(4), adapter="b")) for _ in range(2)]
        await until(lambda: lab.executor.entered.is_set() and not num_in_line(lab.engine))
        late = [asyncio.create_task(lab.engine.generate(PROMPT, greedy(4), adapter=name)) for name in "aab"]
        await until(lambda: num_in_line(lab.engine) >= 2)
        await lab.engine.unload_adapter("a")  # nothing has claimed it yet
        lab.executor.release()
        lost, also_lost, fine = await gather_all(late)
        assert isinstance(lost, AdapterNotFound)
        assert isinstance(also_lost, AdapterNotFound)
        assert lab.right(fine, PROMPT, 4, "b")
        assert all(lab.right(one, PROMPT, 4, "b") for one in await gather_all(first))
        await lab.settled()


# ---------------------------------------------------------------- leaving


async def test_left_before_it_starts_while_it_runs_and_while_its_adapter_loads(lab: Lab) -> None:
    lab.executor.hold()
    lab.loader.gate.clear()
    running = lab.engine.stream(PROMPT, greedy(200, ignore_eos=True), adapter="b")
    await running.__aenter__()
    await in_thread(lab.executor.entered.wait)
    unstarted = lab.engine.stream(PROMPT, greedy(9), adapter="b")
    loading = lab.engine.stream(PROMPT, greedy(9, n=3), adapter="a")
    for stream in (unstarted, loading):
        await stream.__aenter__()
    assert lab.claims == 5
    for stream in (unstarted, loading):
        await stream.aclose()
    lab.executor.release()
    await anext(running)
    await until(lambda: lab.claims <= 1)
    await running.aclose()
    await until(lambda: lab.claims == 0)


async def test_a_reader_that_leaves_by_any_way(lab: Lab) -> None:
    async def read(way: str, name: str) -> None:
        stream = lab.engine.stream(PROMPT, greedy(150, ignore_eos=True, n=2), adapter=name, request_id=way)
        async for _ in stream:
            if way == "break":
                break
            if way == "abort":
                lab.engine.abort("abort")
            elif way == "cancel":
                current = asyncio.current_task()
                assert current is not None
                current.cancel()

    for way in ("break", "abort", "cancel"):
        for name in "ab":
            with suppress(asyncio.CancelledError):
                await asyncio.create_task(read(way, name))
    await until(lambda: lab.claims == 0)


@pytest.mark.parametrize("timeout", [0.02, 0.2])
async def test_timed_out_while_its_adapter_loads(lab: Lab, timeout: float) -> None:
    lab.loader.gate.clear()
    calls = [lab.engine.generate(PROMPT, greedy(9, n=n), adapter="a", timeout=timeout) for n in (1, 2)]
    other = lab.engine.generate(PROMPT, greedy(9), adapter="b")
    first, second, fine = await asyncio.gather(*calls, other)
    assert (first.finish_reason, second.finish_reason) == ("timeout", "timeout")
    assert lab.right(fine, PROMPT, 9, "b")
    assert lab.claims == 0


async def test_who_waits_for_memory_and_who_holds_it_do_not_wait_for_each_other(lab: Lab) -> None:
    """Memory for one content. "b" has it, "a" waits for it and has been passed over often enough, so later requests
    for "b" wait behind "a"; and "b" cannot be dropped for "a" any more, for no name means it: it goes on."""
    lab.registry.claims.max_passes = 1
    long = greedy(ENDLESS, ignore_eos=True)
    running = lab.engine.stream(PROMPT, long, adapter="b")
    await anext(running)
    first = asyncio.create_task(lab.engine.generate(PROMPT, greedy(5), adapter="a"))
    await until(lambda: lab.waiting_claims == 1)
    passing = lab.engine.stream(PROMPT, long, adapter="b")
    await anext(passing)
    late = asyncio.create_task(lab.engine.generate(PROMPT, greedy(5), adapter="b"))
    await until(lambda: lab.waiting_claims == 2)
    leaving = asyncio.create_task(lab.engine.unload_adapter("b", wait=True))
    await until(lambda: len(lab.engine.adapters()) == 1)
    for stream in (running, passing):
        await stream.aclose()
    async with asyncio.timeout(120):
        made = await asyncio.gather(first, late)
        await leaving
    assert [one.token_ids for one in made] == [lab.expected(PROMPT, 5, name) for name in "ab"]
    await lab.load("b")
