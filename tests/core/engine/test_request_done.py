"""The event at a request's end: told once, with all samples, in the context of the call that made it."""

from __future__ import annotations

import asyncio

import pytest
from support.engine_watches import CALLER, watch
from support.fake_engine import executor_of, greedy, idle, in_thread, make_engine, until
from support.plug_points import Compiler, Letters

from asyncengine import Engine, SamplingParams
from asyncengine.errors import EngineDead

HOSTINGS = [pytest.param(False, id="owned"), pytest.param(True, id="hosted")]


@pytest.mark.parametrize("hosted", HOSTINGS)
async def test_it_says_what_the_completion_says(hosted: bool) -> None:
    async with make_engine(hosted=hosted) as engine:
        seen = watch(engine)
        done = await engine.generate([2, 3, 4, 5, 6], greedy(7, n=3), request_id="mine")
        (event, _), params = seen[0], seen[0][0].params
        assert len(seen) == 1
        assert (event.request_id, event.adapter, params.n, params.max_tokens) == ("mine", None, 3, 7)
        assert event.finish_reasons == tuple(sample.finish_reason for sample in done.samples)
        assert (event.prompt_tokens, event.generated_tokens) == (5, done.usage.completion_tokens)
        assert event.cached_tokens == done.usage.cached_tokens
        assert event.timings.queued == done.timings.queued
        assert event.timings.first_token == done.timings.first_token
        assert event.timings.prepared is None
        assert 0 <= (event.timings.first_token or 0) <= event.timings.total <= done.timings.total


@pytest.mark.parametrize("hosted", HOSTINGS)
async def test_each_is_told_in_its_callers_context(hosted: bool) -> None:
    async with make_engine(hosted=hosted) as engine:
        seen = watch(engine)

        async def call(name: str) -> None:
            CALLER.set(name)
            await engine.generate([2, 3], greedy(4), request_id=name)

        await asyncio.gather(*(call(f"caller {number}") for number in range(5)))
        assert sorted((event.request_id, caller) for event, caller in seen) == [(f"caller {n}",) * 2 for n in range(5)]


async def test_a_blocking_call_has_its_threads_context() -> None:
    async with make_engine(hosted=True) as engine:
        seen = watch(engine)

        def call() -> None:
            CALLER.set("a thread")
            Engine(engine).generate([2, 3], greedy(3))

        await in_thread(call)
        assert [caller for _, caller in seen] == ["a thread"]


async def test_however_it_ends_it_is_told_once() -> None:
    async with make_engine() as engine:
        seen = watch(engine)
        await engine.generate([4, 5], greedy(50), timeout=1e-9)
        executor_of(engine).hold(after=2)
        left = engine.stream([2, 3], greedy(50, n=2))
        await anext(left)
        left.abort()
        executor_of(engine).release()
        await idle(engine)
        dying = engine.stream([6, 7], greedy(50))
        executor_of(engine).failure = RuntimeError("device lost")
        with pytest.raises(EngineDead):
            await dying.result()
        assert [event.finish_reasons for event, _ in seen] == [("timeout",), ("abort", "abort"), ("engine_dead",)]


async def test_waiting_for_a_grammar_is_a_time_of_its_own() -> None:
    compiler = Compiler()
    async with make_engine(wiring={"grammars": compiler}) as engine:
        seen = watch(engine)
        stream = engine.stream([2, 3], SamplingParams(temperature=0, max_tokens=3, grammar=Letters([5], 3)))
        await stream.__aenter__()
        await until(lambda: bool(compiler.pending))
        compiler.finish(compiler.started[0])
        done = await stream.result()
        timings = seen[0][0].timings
        assert timings.prepared is not None
        assert timings.queued is not None
        assert 0 < timings.prepared <= timings.queued
        assert done.timings.prepared == timings.prepared
