"""Steps whose results come later than their launch, as on a GPU: order, depth, faults, and the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from support.fake_engine import greedy, make_core, until
from support.threads import no_new_engine_thread

from asyncengine import AsyncEngine, EngineDead
from asyncengine.step import Batch, StepResult
from asyncengine.testing.fake_runner import FakeExecutor


class Late:
    """A handle whose result is here when its gate is open."""

    ready = False

    def __init__(self, result: StepResult, gate: threading.Event, failure: BaseException | None) -> None:
        self.result, self.gate, self.failure = result, gate, failure

    def wait(self) -> StepResult:
        assert self.gate.wait(120)
        if self.failure is not None:
            raise self.failure
        return self.result


class LateExecutor(FakeExecutor):
    """Computes at once, as a queue of kernels would, and lets nobody know before the gate opens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()
        self.gate.set()
        self.launched = 0
        self.failure: BaseException | None = None
        self.threads: dict[str, None] = {}

    def launch(self, batch: Batch) -> Any:
        assert not self.closed
        self.threads[threading.current_thread().name] = None
        self.launched += 1
        return Late(self.execute(batch), self.gate, self.failure)


def oracle(executor: FakeExecutor, prompt: list[int], count: int) -> list[int]:
    return executor.model.oracle(prompt, count, 0, (1,))


def late_engine(**settings: Any) -> tuple[AsyncEngine, LateExecutor]:
    executor = LateExecutor(128, 4)
    return AsyncEngine(lambda: make_core(executor, **settings)), executor


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_outputs_are_right_and_so_many_steps_are_launched_ahead(depth: int):
    with no_new_engine_thread():
        engine, executor = late_engine(max_steps_in_flight=depth)
        async with engine:
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
        assert list(executor.threads) == ["asyncengine-device"]
        assert executor.closed


async def test_a_result_that_fails_late_ends_the_engine():
    with no_new_engine_thread():
        engine, executor = late_engine(max_steps_in_flight=2)
        async with engine:
            executor.failure = RuntimeError("the device fell off")
            with pytest.raises(EngineDead, match="the device fell off"):
                await engine.generate([4, 5], greedy(5))


async def test_closing_waits_for_what_was_launched():
    with no_new_engine_thread():
        engine, executor = late_engine(max_steps_in_flight=2)
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
