"""Every stream ends exactly once, only its last chunk says why, and the tokens are the model's (contract 1)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop
from support.fake_engine import executor_of, greedy, idle, in_thread, make_engine, oracle

from asyncengine import Chunk, Engine, SamplingParams
from asyncengine.engine.mailbox import Mailbox
from asyncengine.errors import RequestFailed

HOSTINGS = [pytest.param(False, id="owned"), pytest.param(True, id="hosted")]
LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]
REASONS = {"stop", "length", "tool_calls", "abort", "timeout", "error", "engine_dead"}


def assert_ends_once(chunks: list[Any]) -> None:
    assert chunks
    assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish_reason in REASONS
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]


async def many_streams(hosted: bool, depth: int, engine_uvloop: bool) -> None:
    async with make_engine(hosted=hosted, max_steps_in_flight=depth, uvloop=engine_uvloop) as engine:

        async def read(i: int) -> None:
            prompt = [5, 6, 7, 2 + i]
            chunks = [chunk async for chunk in engine.stream(prompt, greedy(1 + i % 13))]
            assert_ends_once(chunks)
            assert [t for c in chunks for t in c.token_ids] == oracle(engine, prompt, 1 + i % 13)

        await asyncio.gather(*(read(i) for i in range(60)))
        await idle(engine)
        assert sum(engine.stats().finished.values()) == 60


@pytest.mark.parametrize("hosted", HOSTINGS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("new_loop", LOOPS)
def test_every_stream_ends_once_with_the_right_tokens(hosted: bool, depth: int, new_loop: Any):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(many_streams(hosted, depth, engine_uvloop=hosted and new_loop is uvloop.new_event_loop))


@pytest.mark.parametrize("hosted", HOSTINGS)
async def test_generate_and_stream_agree(hosted: bool):
    async with make_engine(hosted=hosted) as engine:
        whole = await engine.generate([2, 3, 4], greedy(9))
        async with engine.stream([2, 3, 4], greedy(9)) as stream:
            result = await stream.result()
        assert whole.token_ids == result.token_ids == oracle(engine, [2, 3, 4], 9)
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, len(whole.token_ids))
        assert whole.timings.queued is not None
        assert whole.timings.first_token is not None
        assert 0 <= whole.timings.queued <= whole.timings.first_token <= whole.timings.total


async def test_a_slow_reader_gets_merged_chunks_and_the_engine_does_not_wait():
    async with make_engine() as engine:
        async with engine.stream([2, 3, 4], greedy(200, ignore_eos=True)) as stream:
            await idle(engine)
            chunks = [chunk async for chunk in stream]
        assert len(chunks) == 1
        assert len(chunks[0].token_ids) == 200
        assert_ends_once(chunks)


async def test_samples_of_one_request_come_in_one_stream_each_ending_once():
    async with make_engine() as engine:
        params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=7, ignore_eos=True)
        chunks = [chunk async for chunk in engine.stream([2, 3, 4], params)]
        assert sum(c.finish_reason is not None for c in chunks) == 4
        assert sorted(c.index for c in chunks if c.finish_reason) == [0, 1, 2, 3]
        assert [c for c in chunks if c.usage] == [chunks[-1]]
        whole = await engine.generate([2, 3, 4], params)
        assert [s.token_ids for s in whole.samples] == [
            [t for c in chunks if c.index == i for t in c.token_ids] for i in range(4)
        ]
        assert len({tuple(s.token_ids) for s in whole.samples}) == 4
        assert whole.usage.completion_tokens == 28
        assert whole.token_ids == whole.samples[0].token_ids


async def test_a_fault_of_one_row_ends_one_request():
    async with make_engine() as engine:
        executor = executor_of(engine)
        executor.hold()
        streams = [engine.stream([2 + i, 3], greedy(6)) for i in range(3)]
        for stream in streams:
            await stream.__aenter__()
        executor.fail_tickets[2] = "not a number"
        executor.release()
        with pytest.raises(RequestFailed, match="not a number"):
            await streams[1].result()
        for i in (0, 2):
            assert (await streams[i].result()).token_ids == oracle(engine, [2 + i, 3], 6)


async def test_reading_past_a_failure_raises_once_and_then_ends():
    async with make_engine() as engine:
        executor_of(engine).fail_tickets[1] = "bad"
        stream = engine.stream([2, 3], greedy(6))
        assert (await anext(stream)).finish_reason == "error"
        with pytest.raises(RequestFailed):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_logprobs_come_one_per_token_even_through_a_slow_reader():
    async with make_engine() as engine:
        async with engine.stream([2, 3, 4], greedy(20, logprobs=True)) as stream:
            await idle(engine)
            done = await stream.result()
        assert done.logprobs is not None
        assert [entry.token_id for entry in done.logprobs] == done.token_ids


async def test_nothing_runs_before_the_first_await():
    async with make_engine() as engine:
        stream = engine.stream([2, 3], greedy(4))
        assert stream.request_id is None
        assert engine.core.loop.delivery.expected == {}
        del stream
        bad = engine.stream([], greedy(4))
        with pytest.raises(ValueError, match="prompt"):
            await anext(bad)


@pytest.mark.parametrize("blocking", [False, True])
async def test_who_wants_the_whole_answer_is_woken_for_many_tokens_at_a_time(blocking: bool):
    """A reader that is cancelled reads on where it left off."""
    async with make_engine(hosted=True) as engine:
        woken = []
        put = Mailbox.put

        def counted(mailbox: Mailbox, chunk: Chunk) -> Any:
            waiter = put(mailbox, chunk)
            if waiter is not None:
                woken.append(chunk)
            return waiter

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Mailbox, "put", counted)
            if blocking:
                completion = await in_thread(lambda: Engine(engine).generate([4, 5], greedy(200, ignore_eos=True)))
            else:
                completion = await engine.generate([4, 5], greedy(200, ignore_eos=True))
        expected = executor_of(engine).model.oracle([4, 5], 200)
        assert completion.token_ids == expected
        assert 1 <= len(woken) <= 5, "twice for 64, once at the end; once more where it came late"
        executor_of(engine).hold(after=40)
        stream = engine.stream([4, 5], greedy(200, ignore_eos=True))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stream.result(), 0.2)
        executor_of(engine).release()  # what there was may have been read: then only a further step brings more
        read_on = [token async for chunk in stream for token in chunk.token_ids]
        assert len(read_on) >= 160
        assert read_on == expected[-len(read_on) :]
        assert (await stream.result()).token_ids == expected
