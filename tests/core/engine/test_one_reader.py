"""A stream has one reader, and neither a stream nor an engine has a copy."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.fake_engine import executor_of, greedy, idle, in_thread, make_engine, num_in_line, oracle, until

from asyncengine import AsyncEngine, Engine
from asyncengine.engine.mailbox import wake_all
from asyncengine.outputs import Chunk
from asyncengine.stream import TokenStream

PROMPT = [2, 3, 4]
READS: list[Callable[[TokenStream], Awaitable[Any]]] = [anext, TokenStream.result, TokenStream.__aenter__]
COPIES = [copy.copy, copy.deepcopy, pickle.dumps]


@pytest.mark.parametrize("hosted", [False, True], ids=["owned", "hosted"])
@pytest.mark.parametrize("read", READS, ids=["next", "result", "enter"])
async def test_a_second_reader_is_refused_and_costs_the_first_nothing(
    hosted: bool, read: Callable[[TokenStream], Awaitable[Any]]
):
    async with make_engine(hosted=hosted) as engine:
        executor = executor_of(engine)
        executor.hold()
        stream = engine.stream(PROMPT, greedy(9))
        first = asyncio.ensure_future(stream.result())
        await in_thread(executor.entered.wait)  # it has begun, and waits
        with pytest.raises(RuntimeError, match="another task or thread"):
            await read(stream)
        executor.release()
        assert (await first).token_ids == oracle(engine, PROMPT, 9)


async def test_a_reader_that_was_woken_loses_nothing_to_one_that_comes_before_it_runs():
    async with make_engine() as engine:
        executor = executor_of(engine)
        executor.hold()
        stream = engine.stream(PROMPT, greedy(2))
        first = asyncio.ensure_future(anext(stream))
        await in_thread(executor.entered.wait)
        (sent,) = engine.core.loop.delivery.streams.values()
        waiter = sent.mailbox.put(Chunk("", [7], None, 0))
        assert waiter is not None
        wake_all([waiter])  # it runs at the next turn of the loop; a second one is there before that
        with pytest.raises(RuntimeError, match="another task or thread"):
            await anext(stream)
        assert (await first).token_ids == [7]
        executor.release()


async def test_two_who_start_one_stream_do_not_submit_it_twice():
    async with make_engine(max_queued_requests=1, max_num_seqs=1, when_full="wait") as engine:
        executor = executor_of(engine)
        executor.hold()
        there = [asyncio.ensure_future(engine.generate(PROMPT, greedy(2))) for _ in range(2)]
        await until(lambda: executor.entered.is_set() and engine.core.loop.queue_limit.waiting == 1)
        stream = engine.stream(PROMPT, greedy(2))
        starting = asyncio.ensure_future(anext(stream))
        await until(lambda: bool(num_in_line(engine)))
        with pytest.raises(RuntimeError, match="another task or thread"):
            await anext(stream)
        executor.release()
        await starting
        await asyncio.gather(*there, stream.result())
        await idle(engine)
        assert sum(engine.stats().finished.values()) == 3


async def test_who_was_cancelled_leaves_the_stream_to_others():
    async with make_engine() as engine:
        executor = executor_of(engine)
        executor.hold()
        stream = engine.stream(PROMPT, greedy(5))
        reading = asyncio.ensure_future(anext(stream))
        await in_thread(executor.entered.wait)
        reading.cancel()
        await asyncio.wait([reading])
        executor.release()
        assert (await stream.result()).token_ids == oracle(engine, PROMPT, 5)


async def test_two_threads_cannot_read_one_stream():
    async with make_engine(hosted=True) as engine:
        executor = executor_of(engine)
        executor.hold()
        stream = Engine(engine).stream(PROMPT, greedy(9))
        found: list[Any] = []
        reader = threading.Thread(target=lambda: found.append(stream.result()), daemon=True)
        reader.start()
        await in_thread(executor.entered.wait)
        with pytest.raises(RuntimeError, match="another task or thread"):
            next(stream)
        with pytest.raises(RuntimeError, match="another task or thread"):
            stream.result()
        executor.release()
        await in_thread(reader.join)
        assert found[0].token_ids == oracle(engine, PROMPT, 9)


@pytest.mark.parametrize("copied", COPIES)
async def test_copies_of_streams_are_refused_and_end_nothing(copied: Callable[[Any], Any]):
    async with make_engine(hosted=True) as engine:
        with pytest.raises(TypeError, match="a TokenStream cannot be copied or pickled"):
            copied(engine.stream(PROMPT))
        async with engine.stream(PROMPT, greedy(9)) as stream:
            with pytest.raises(TypeError, match="a TokenStream cannot be copied or pickled"):
                copied(stream)
            assert (await stream.result()).token_ids == oracle(engine, PROMPT, 9)
        with Engine(engine).stream(PROMPT, greedy(9)) as blocking:
            with pytest.raises(TypeError, match="a SyncTokenStream cannot be copied or pickled"):
                copied(blocking)
            assert (await in_thread(blocking.result)).token_ids == oracle(engine, PROMPT, 9)


@pytest.mark.parametrize("copied", COPIES)
def test_copies_of_engines_are_refused(copied: Callable[[Any], Any]):
    """An engine is not copied before it is started either: two objects would start it twice."""
    engine: AsyncEngine = make_engine(hosted=True)
    with pytest.raises(TypeError, match="an engine cannot be copied or pickled"):
        copied(engine)
    if copied is not copy.copy:  # which makes another name for the same engine
        with pytest.raises(TypeError, match="an engine cannot be copied or pickled"):
            copied(Engine(engine))
