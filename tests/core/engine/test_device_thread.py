"""The threads of steps and the arrival of their results: order, depth, threads, faults, limits of time, and the end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.fake_engine import greedy, make_core, until
from support.threads import no_new_engine_thread

from asyncengine import AsyncEngine, EngineDead
from asyncengine.events import StepSlow
from asyncengine.step import Batch, StepResult
from asyncengine.testing.fake_runner import FakeExecutor


class Late:
    """A handle whose result is here when its gate is open."""

    ready = False

    def __init__(self, result: StepResult, executor: LateExecutor) -> None:
        self.result, self.gate, self.failure = result, executor.gate, executor.failure
        self.readers = executor.readers

    def block(self) -> None:
        assert self.gate.wait(120)

    def wait(self) -> StepResult:
        assert self.gate.is_set()
        self.readers[threading.current_thread().name] = None
        if self.failure is not None:
            raise self.failure
        return self.result


class LateExecutor(FakeExecutor):
    """Computes at once, as a queue of kernels would, and lets nobody know before the gate opens."""

    asynchronous = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()
        self.gate.set()
        self.launched = 0
        self.failure: BaseException | None = None
        self.threads: dict[str, None] = {}
        """Threads that launched steps."""
        self.readers: dict[str, None] = {}
        """Threads that made results of what had come."""

    def launch(self, batch: Batch) -> Any:
        assert not self.closed
        self.threads[threading.current_thread().name] = None
        self.launched += 1
        return Late(self.execute(batch), self)


class BriefExecutor(LateExecutor):
    """Says of every other step that launching it takes long, and holds such a launch where it is told to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held = threading.Event()
        self.held.set()
        self.where: dict[int, str] = {}
        """Step -> the thread that launched it, in the order of launches."""
        self.long: Callable[[Batch], bool] = lambda batch: batch.step % 2 == 0

    def is_brief(self, batch: Batch) -> bool:
        return not self.long(batch)

    def launch(self, batch: Batch) -> Any:
        if self.long(batch):
            assert self.held.wait(120)
        self.where[batch.step] = threading.current_thread().name
        return super().launch(batch)


class InlineExecutor(FakeExecutor):
    """Computes a step when it is launched. Decoding steps are said to be brief; threads that computed are noted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decoded: dict[str, None] = {}
        self.prompted: dict[str, None] = {}
        self.seconds = 0.0
        """Seconds that a decoding step takes."""

    def is_brief(self, batch: Batch) -> bool:
        return all(row.num_scheduled == 1 for row in batch.rows)

    def execute(self, batch: Batch) -> StepResult:
        assert not self.closed
        brief = self.is_brief(batch)
        (self.decoded if brief else self.prompted)[threading.current_thread().name] = None
        if brief:
            time.sleep(self.seconds)
        return super().execute(batch)


def oracle(executor: FakeExecutor, prompt: list[int], count: int) -> list[int]:
    return executor.model.oracle(prompt, count, 0, (1,))


def late_engine(**settings: Any) -> tuple[AsyncEngine, LateExecutor]:
    executor = LateExecutor(128, 4)
    return AsyncEngine(lambda: make_core(executor, **settings)), executor


def brief_engine(hosted: bool = False, **settings: Any) -> tuple[AsyncEngine, BriefExecutor]:
    executor = BriefExecutor(128, 4)
    return AsyncEngine(lambda: make_core(executor, **settings), hosted=hosted), executor


def inline_engine(hosted: bool, **settings: Any) -> tuple[AsyncEngine, InlineExecutor]:
    executor = InlineExecutor(128, 4)
    return AsyncEngine(lambda: make_core(executor, **settings), hosted=hosted), executor


async def check_answers(engine: AsyncEngine, executor: LateExecutor, depth: int) -> None:
    """Several streams, of which the first begins with `depth` steps launched ahead."""
    executor.gate.clear()
    stream = engine.stream([4, 5, 6], greedy(12))
    opening = asyncio.create_task(anext(stream))
    await until(lambda: executor.launched >= depth)
    await asyncio.sleep(0.02)
    assert executor.launched == depth
    executor.gate.set()
    await opening
    assert (await stream.result()).token_ids == oracle(executor, [4, 5, 6], 12)
    done = await asyncio.gather(*(engine.generate([2 + i, 3], greedy(5 + i)) for i in range(9)))
    assert [c.token_ids for c in done] == [oracle(executor, [2 + i, 3], 5 + i) for i in range(9)]


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_outputs_are_right_and_so_many_steps_are_launched_ahead(depth: int):
    with no_new_engine_thread():
        engine, executor = late_engine(max_steps_in_flight=depth)
        async with engine:
            await check_answers(engine, executor, depth)
        assert list(executor.threads) == ["asyncengine-device"], "nobody said that launching is brief"
        assert executor.closed


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("hosted", [False, True])
async def test_brief_launches_are_the_loops_and_nothing_overtakes_those_of_the_thread(hosted: bool, depth: int):
    with no_new_engine_thread():
        engine, executor = brief_engine(hosted, max_steps_in_flight=depth)
        async with engine:
            await check_answers(engine, executor, depth)
        own = "asyncengine-loop" if hosted else "MainThread"
        assert sorted(executor.threads) == sorted([own, "asyncengine-device"])
        assert list(executor.readers) == [own]
        assert list(executor.where) == list(range(1, executor.launched + 1))
        assert executor.closed


@pytest.mark.parametrize("hosted", [False, True])
async def test_tokens_do_not_wait_for_a_prompt_to_be_launched(hosted: bool):
    """Kernels of prompts are launched one by one, and all that the step before has given is here already."""
    engine, executor = brief_engine(hosted, max_steps_in_flight=2)
    executor.long = lambda batch: False
    launch, waiting = executor.launch, []

    def noted(batch: Batch) -> Any:
        if batch.num_tokens > len(batch.rows) and len(batch.rows) > 1:
            waiting.append(len(engine.core.loop.scheduler.roster.outputs))
        return launch(batch)

    executor.launch = noted  # type: ignore[method-assign]
    async with engine:
        executor.gate.clear()
        first = asyncio.create_task(engine.generate([4, 5, 6], greedy(12)))
        await until(lambda: executor.launched == 2)
        second = asyncio.create_task(engine.generate([7, 8, 9], greedy(12)))
        await until(lambda: bool(engine.core.loop.delivery.expected))
        executor.gate.set()
        assert (await first).token_ids == oracle(executor, [4, 5, 6], 12)
        assert (await second).token_ids == oracle(executor, [7, 8, 9], 12)
    assert waiting == [0]


async def test_a_brief_step_waits_behind_one_that_is_still_to_be_launched():
    engine, executor = brief_engine(max_steps_in_flight=3)
    async with engine:
        executor.held.clear()
        task = asyncio.create_task(engine.generate([4, 5, 6], greedy(12)))
        await until(lambda: len(engine.core.loop.in_flight) == 3)
        assert list(executor.where) == [1], "the second is held, and the third waits for it"
        executor.held.set()
        assert (await task).token_ids == oracle(executor, [4, 5, 6], 12)
        assert list(executor.where) == list(range(1, executor.launched + 1))
        assert list(executor.where.values())[:3] == ["MainThread", "asyncengine-device", "MainThread"]


async def test_nothing_is_launched_while_other_work_is_done_where_steps_run():
    engine, executor = brief_engine()
    async with engine:
        executor.long = lambda batch: False
        going, done = threading.Event(), []
        call = engine.core.loop.runner.call(lambda: done.append(going.wait(120)))
        task = asyncio.create_task(engine.generate([4, 5, 6], greedy(3)))
        await until(lambda: len(engine.core.loop.in_flight) == 1)
        assert not executor.launched
        going.set()
        await call
        assert (await task).token_ids == oracle(executor, [4, 5, 6], 3)
        assert list(executor.threads) == ["MainThread"]


@pytest.mark.parametrize("cause", [RuntimeError("device lost"), StopIteration("x"), MemoryError()], ids=repr)
@pytest.mark.parametrize("inline", [False, True], ids=["a launch", "a step"])
async def test_what_raises_on_the_loops_thread_ends_the_engine(inline: bool, cause: BaseException):
    def fail(batch: Batch) -> StepResult:
        raise cause

    with no_new_engine_thread():
        engine, executor = inline_engine(hosted=True) if inline else brief_engine(max_steps_in_flight=2)
        executor.is_brief = lambda batch: True  # type: ignore[method-assign]
        async with engine:
            await engine.generate([4, 5], greedy(5))
            executor.execute = fail  # type: ignore[method-assign]
            with pytest.raises(EngineDead):
                await engine.generate([4, 5], greedy(5))
            assert not engine.alive
        assert executor.closed
        assert inline or list(executor.threads) == ["MainThread"]  # type: ignore[attr-defined]


async def test_a_device_that_never_finishes_is_given_up():
    engine, executor = brief_engine(max_steps_in_flight=2, step_hard_limit=0.1, step_soft_limit=0.05)
    executor.long = lambda batch: False
    async with engine:
        executor.gate.clear()
        with pytest.raises(EngineDead, match="ran for over"):
            await engine.generate([4, 5], greedy(5))
        assert executor.launched == 2
        executor.gate.set()  # closing waits for the device, and not for ever
    assert executor.closed
    assert not executor.readers, "what comes after the end is nobody's"


async def test_a_result_that_fails_late_ends_the_engine():
    with no_new_engine_thread():
        engine, executor = late_engine(max_steps_in_flight=2)
        async with engine:
            executor.failure = RuntimeError("the device fell off")
            with pytest.raises(EngineDead, match="the device fell off"):
                await engine.generate([4, 5], greedy(5))


@pytest.mark.parametrize("brief", [False, True])
async def test_closing_waits_for_what_was_launched(brief: bool):
    with no_new_engine_thread():
        engine, executor = (brief_engine if brief else late_engine)(max_steps_in_flight=2)
        await engine.start()
        executor.gate.clear()
        task = asyncio.create_task(engine.generate([4, 5], greedy(50)))
        await until(lambda: executor.launched >= 2)
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0.02)
        assert not executor.closed  # its memory is still in use
        executor.gate.set()
        await closing
        assert executor.closed
        assert (await task).finish_reason == "abort"


# ---------------------------------------------------------------- steps that are over when they are launched


@pytest.mark.parametrize(
    ("hosted", "depth", "decoded"),
    [(True, None, "asyncengine-loop"), (False, None, "asyncengine-device"), (True, 2, "asyncengine-device")],
)
async def test_only_a_loop_of_the_engines_own_computes_steps_and_only_one_at_a_time(hosted, depth, decoded):
    with no_new_engine_thread():
        engine, executor = inline_engine(hosted, max_steps_in_flight=depth)
        async with engine:
            prompts = [[2 + i, 3, 4] for i in range(9)]
            done = await asyncio.gather(*(engine.generate(prompt, greedy(12)) for prompt in prompts))
            assert [c.token_ids for c in done] == [oracle(executor, prompt, 12) for prompt in prompts]
        assert list(executor.decoded) == [decoded]
        assert list(executor.prompted) == ["asyncengine-device"], "that step is not brief"
        assert executor.closed


async def test_a_stream_hears_of_a_token_before_the_next_is_computed():
    engine, executor = inline_engine(hosted=True)
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


async def test_the_limits_of_time_hold_for_a_step_of_the_loops_thread(caplog):
    """Its timers cannot fire meanwhile; they do before the result counts."""
    engine, executor = inline_engine(hosted=True, step_soft_limit=0.01)
    async with engine:
        slow: list[StepSlow] = []
        engine.on_event(lambda event: slow.append(event) if isinstance(event, StepSlow) else None)
        executor.seconds = 0.05
        assert (await engine.generate([2, 3], greedy(3))).token_ids == oracle(executor, [2, 3], 3)
        assert [event.step for event in slow if event.step > 1] == [2, 3]  # the prompt's may be slow on a busy machine
    engine, executor = inline_engine(hosted=True, step_hard_limit=0.05)
    async with engine:
        executor.seconds = 0.1
        with caplog.at_level(logging.WARNING, "asyncengine"), pytest.raises(EngineDead, match="ran for over"):
            await engine.generate([2, 3], greedy(3))
        assert not engine.alive


async def test_an_engine_closed_amid_steps_of_its_loops_thread_computes_nothing_more():
    for _ in range(8):
        with no_new_engine_thread():
            engine, executor = inline_engine(hosted=True)
            executor.seconds = 0.002
            await engine.start()
            task = asyncio.create_task(engine.generate([4, 5], greedy(400, ignore_eos=True)))
            await until(lambda executor=executor: bool(executor.decoded))
            await engine.aclose()
            assert executor.closed
            done = await task
            assert done.finish_reason == "abort" or len(done.token_ids) == 400  # this thread may have been late
