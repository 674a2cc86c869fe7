"""Short texts that come while an engine has nothing else to do: computed at once, on the caller's thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import numpy as np
import pytest
from support.fake_engine import SteppedExecutor, idle, make_engine, until

from asyncengine import AsyncEngine, Embeddings, Engine
from asyncengine.engine.vectors.service import VectorModel
from asyncengine.errors import EngineClosed, EngineDead, RequestFailed, RequestTimeout
from asyncengine.events import StepDone
from asyncengine.pooling_spec import PoolingSpec
from asyncengine.request_spec import Pooled
from asyncengine.seams import StepHandle
from asyncengine.step import Batch, FinishedStep, StepResult
from asyncengine.testing.fake_runner import fake_vector
from asyncengine.testing.leaks import assert_nothing_held

WIDTH, BRIEF = 3, 32
TEXT = [5, 9, 33, 2]
POOLED = Pooled(whole=True, every=True)


class BriefExecutor(SteppedExecutor):
    """A fake runner that says which steps are brief, and notes the threads that launched."""

    brief_tokens = BRIEF

    def __init__(self) -> None:
        super().__init__(128, 4, width=WIDTH)
        self.launched_by: list[int] = []
        self.broken: BaseException | None = None
        self.row_error: str | None = None
        self.interrupted = False

    def launch(self, batch: Batch) -> StepHandle:
        self.launched_by.append(threading.get_ident())
        if self.broken is not None:
            raise self.broken
        if self.interrupted:
            self.interrupted = False
            signal.raise_signal(signal.SIGINT)
        handle = super().launch(batch)
        if self.row_error is None:
            return handle
        handle.wait()
        error, self.row_error = self.row_error, None
        return FinishedStep(StepResult(batch.step, [-1] * len(batch.rows), errors={0: error}))


def embedder(**settings: Any) -> tuple[AsyncEngine, BriefExecutor]:
    executor = BriefExecutor()
    model = VectorModel(PoolingSpec("embed", ("mean",), whole=True), WIDTH)
    return make_engine(executor=executor, wiring={"vectors": model}, **settings), executor


def assert_right(found: Embeddings, *texts: list[int]) -> None:
    assert (found.vectors == np.stack([fake_vector(text, POOLED, WIDTH) for text in texts])).all()


async def test_a_text_alone_is_computed_here_and_counted_like_any_other() -> None:
    engine, executor = embedder(max_queued_requests=1)
    async with engine:
        for _ in range(3):
            assert_right(await engine.embed([TEXT]), TEXT)
        assert executor.launched_by == [threading.get_ident()] * 3
        assert_right(await engine.embed([TEXT * 20]), TEXT * 20)
        assert executor.launched_by[3] != threading.get_ident(), "a long one takes the usual way"
        stats = engine.stats()
        assert (stats.steps, stats.finished, stats.prompt_tokens) == (4, {"stop": 4}, 3 * 4 + 80)
        assert (stats.computed_tokens, stats.first_token.count, stats.step.count) == (92, 4, 4)
        await idle(engine)
        assert_nothing_held(engine.core)


async def test_a_few_texts_of_one_call_are_a_step_of_their_own() -> None:
    engine, executor = embedder()
    async with engine:
        executor.keep_batches = True
        texts = [TEXT, TEXT[::-1], TEXT[:1]]
        assert_right(await engine.embed(texts), *texts)
        assert executor.launched_by == [threading.get_ident()]
        assert [len(batch.rows) for batch in executor.executed] == [3]
        assert engine.stats().finished == {"stop": 3}


async def test_observers_hear_of_its_step() -> None:
    engine, _ = embedder()
    async with engine:
        heard: list[Any] = []
        engine.on_event(heard.append)
        await engine.embed([TEXT])
        assert [event.tokens for event in heard if isinstance(event, StepDone)] == [len(TEXT)]


async def test_calls_at_the_same_time_share_steps() -> None:
    engine, executor = embedder()
    async with engine:
        executor.keep_batches = True
        for found in await asyncio.gather(*(engine.embed([TEXT]) for _ in range(20))):
            assert_right(found, TEXT)
        assert len(executor.launched_by) <= 3
        assert threading.get_ident() not in executor.launched_by


async def test_a_busy_engine_has_the_text_wait_its_turn() -> None:
    engine, executor = embedder()
    async with engine:
        executor.hold()
        long = asyncio.create_task(engine.embed([TEXT * 20]))
        await until(executor.entered.is_set)
        short = asyncio.create_task(engine.embed([TEXT]))
        await asyncio.sleep(0.02)
        assert not short.done()
        executor.release()
        assert_right(await short, TEXT)
        assert_right(await long, TEXT * 20)
        assert threading.get_ident() not in executor.launched_by


async def test_others_run_between_two_calls_and_a_cancelled_one_computes_nothing() -> None:
    engine, executor = embedder()
    async with engine:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        for _ in range(5):
            await engine.embed([TEXT])
        counting.cancel()
        assert turns >= 5
        steps = len(executor.launched_by)
        leaving = asyncio.create_task(engine.embed([TEXT]))
        await asyncio.sleep(0)  # it has come, and lets others go first
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert len(executor.launched_by) == steps
        await idle(engine)
        assert_nothing_held(engine.core)


async def test_deadlines_pauses_and_the_end_hold() -> None:
    engine, executor = embedder()
    async with engine:
        with pytest.raises(RequestTimeout):
            await engine.embed([TEXT], timeout=1e-9)
        await engine.pause()
        waiting = asyncio.create_task(engine.embed([TEXT]))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        assert not executor.launched_by
        await engine.resume()
        assert_right(await waiting, TEXT)
    with pytest.raises(EngineClosed):
        await engine.embed([TEXT])


async def test_an_error_of_the_text_ends_it_and_one_of_the_runner_the_engine() -> None:
    engine, executor = embedder()
    async with engine:
        executor.row_error = "no memory for it"
        with pytest.raises(RequestFailed, match="no memory for it"):
            await engine.embed([TEXT])
        assert_right(await engine.embed([TEXT]), TEXT)
        executor.broken = OSError("gone")
        for _ in range(2):
            with pytest.raises(EngineDead, match="gone"):
                await engine.embed([TEXT])


async def test_a_text_of_any_thread_is_computed_there_while_the_loop_waits() -> None:
    engine, executor = embedder(hosted=True)
    async with engine:
        inbox, here, blocking = engine.core.loop.inbox, threading.get_ident(), Engine(engine)
        for _ in range(3):
            await until(lambda: inbox._waiter is not None)
            assert_right(await engine.embed([TEXT]), TEXT)
            assert_right(blocking.embed([TEXT]), TEXT)
        assert executor.launched_by == [here] * 6
        assert_right(await engine.embed([TEXT * 20]), TEXT * 20)
        assert executor.launched_by[6] not in (here, inbox._reader), "a long one takes the usual way"
        for found in await asyncio.gather(*(engine.embed([TEXT]) for _ in range(20))):
            assert_right(found, TEXT)
        with pytest.raises(RequestTimeout):
            await engine.embed([TEXT], timeout=1e-9)
        assert engine.stats().finished == {"stop": 27, "timeout": 1}
        await idle(engine)
        assert_nothing_held(engine.core)
        executor.broken = OSError("gone")
        for _ in range(2):
            with pytest.raises(EngineDead, match="gone"):
                await engine.embed([TEXT])


async def test_what_comes_while_a_thread_does_the_loops_work_waits_for_it() -> None:
    engine, executor = embedder(hosted=True)
    async with engine:
        inbox = engine.core.loop.inbox
        await until(lambda: inbox._waiter is not None)
        executor.hold()
        first = asyncio.create_task(asyncio.to_thread(Engine(engine).embed, [TEXT]))
        await until(executor.entered.is_set)
        others = [asyncio.create_task(engine.embed([TEXT * count])) for count in (1, 2, 20)]
        await until(lambda: len(inbox.items) == 3)
        assert len(executor.launched_by) == 1
        executor.release()
        assert_right(await first, TEXT)
        for found, count in zip(await asyncio.gather(*others), (1, 2, 20), strict=True):
            assert_right(found, TEXT * count)
        await idle(engine)
        assert_nothing_held(engine.core)


async def test_an_interrupt_waits_until_the_step_is_whole() -> None:
    engine, executor = embedder()

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError(engine.stats().steps)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        async with engine:
            executor.interrupted = True
            with pytest.raises(InterruptedError, match="1"):
                await engine.embed([TEXT])
            assert_right(await engine.embed([TEXT]), TEXT)
            await idle(engine)
            assert_nothing_held(engine.core)
    finally:
        signal.signal(signal.SIGINT, before)
