"""Steps that are over in milliseconds are computed on the thread of an event loop that is the engine's own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest
from support.fake_engine import greedy, make_core, until
from support.threads import no_new_engine_thread

from asyncengine import AsyncEngine, EngineDead
from asyncengine.events import StepSlow
from asyncengine.step import Batch, StepResult
from asyncengine.testing.fake_runner import FakeExecutor


class BriefExecutor(FakeExecutor):
    """Says of decoding steps that they are brief, and remembers which thread computed what."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decoded: dict[str, None] = {}
        self.prompted: dict[str, None] = {}
        self.failure: BaseException | None = None
        self.seconds = 0.0
        """What a decoding step takes."""

    def is_brief(self, batch: Batch) -> bool:
        return all(row.num_scheduled == 1 for row in batch.rows)

    def execute(self, batch: Batch) -> StepResult:
        assert not self.closed
        brief = self.is_brief(batch)
        (self.decoded if brief else self.prompted)[threading.current_thread().name] = None
        if brief and self.failure is not None:
            raise self.failure
        if brief:
            time.sleep(self.seconds)
        return super().execute(batch)


def brief_engine(hosted: bool, **settings: Any) -> tuple[AsyncEngine, BriefExecutor]:
    executor = BriefExecutor(128, 4)
    return AsyncEngine(lambda: make_core(executor, **settings), hosted=hosted), executor


def oracle(executor: FakeExecutor, prompt: list[int], count: int) -> list[int]:
    return executor.model.oracle(prompt, count, 0, (1,))


@pytest.mark.parametrize(
    ("hosted", "depth", "decoded"),
    [(True, None, "asyncengine-loop"), (False, None, "asyncengine-device"), (True, 2, "asyncengine-device")],
)
async def test_only_a_loop_of_the_engines_own_computes_steps_and_only_one_at_a_time(hosted, depth, decoded):
    with no_new_engine_thread():
        engine, executor = brief_engine(hosted, max_steps_in_flight=depth)
        async with engine:
            prompts = [[2 + i, 3, 4] for i in range(9)]
            done = await asyncio.gather(*(engine.generate(prompt, greedy(12)) for prompt in prompts))
            assert [c.token_ids for c in done] == [oracle(executor, prompt, 12) for prompt in prompts]
        assert list(executor.decoded) == [decoded]
        assert list(executor.prompted) == ["asyncengine-device"], "that step is not brief"
        assert executor.closed


async def test_a_stream_hears_of_a_token_before_the_next_is_computed():
    engine, executor = brief_engine(hosted=True)
    async with engine:
        gates = [threading.Event() for _ in range(6)]
        entered: list[int] = []
        execute = executor.execute

        def held(batch: Batch) -> StepResult:
            entered.append(batch.step)
            assert gates[batch.step - 1].wait(60)
            return execute(batch)

        executor.execute = held  # type: ignore[method-assign]
        stream = engine.stream([4, 5, 6], greedy(6, ignore_eos=True))
        expected = oracle(executor, [4, 5, 6], 6)
        for number, gate in enumerate(gates):
            gate.set()
            chunk = await anext(stream)
            assert chunk.token_ids == [expected[number]]
            assert len(entered) <= number + 2, "the next step is held"


@pytest.mark.parametrize("cause", [RuntimeError("device lost"), StopIteration("x"), MemoryError()], ids=repr)
async def test_one_that_raises_ends_the_engine(cause: BaseException):
    with no_new_engine_thread():
        engine, executor = brief_engine(hosted=True)
        async with engine:
            executor.failure = cause
            with pytest.raises(EngineDead):
                await engine.generate([4, 5], greedy(5))
            assert not engine.alive
        assert executor.closed


async def test_the_limits_of_a_steps_time_hold(caplog):
    """Its timers cannot fire meanwhile; they do before the result counts."""
    engine, executor = brief_engine(hosted=True, step_soft_limit=0.01, step_hard_limit=0.3)
    async with engine:
        slow: list[StepSlow] = []
        engine.on_event(lambda event: slow.append(event) if isinstance(event, StepSlow) else None)
        executor.seconds = 0.05
        assert (await engine.generate([2, 3], greedy(3))).token_ids == oracle(executor, [2, 3], 3)
        assert [event.step for event in slow] == [2, 3]
        executor.seconds = 0.5
        with caplog.at_level(logging.WARNING, "asyncengine"), pytest.raises(EngineDead, match="ran for over"):
            await engine.generate([2, 3], greedy(3))
        assert not engine.alive


async def test_an_engine_that_is_closed_in_the_middle_computes_nothing_more():
    for _ in range(8):
        with no_new_engine_thread():
            engine, executor = brief_engine(hosted=True)
            executor.seconds = 0.002
            await engine.start()
            task = asyncio.create_task(engine.generate([4, 5], greedy(400, ignore_eos=True)))
            await until(lambda executor=executor: bool(executor.decoded))
            await engine.aclose()
            assert executor.closed
            assert (await task).finish_reason == "abort"
