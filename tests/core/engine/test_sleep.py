"""`sleep`, `wake`, `pause` and `resume` on the fake runner: who waits, what is refused, and every way out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.fake_engine import executor_of, greedy, idle, in_thread, make_core, make_engine, until
from support.threads import no_new_engine_thread

from asyncengine import (
    AsyncEngine,
    Engine,
    EngineAsleep,
    EngineClosed,
    EngineGroup,
    InvalidParameter,
    UnsupportedModel,
    WrongLoop,
)
from asyncengine.errors import ModelNotFound
from asyncengine.testing import Recording, assert_nothing_held
from asyncengine.testing.fake_runner import FakeExecutor

from .updatable import Updatable, answer, prompt, replayed


class Forgetful(Updatable):
    """Its memory is gone when it is given back: to read a page nobody wrote raises, and so does a step without
    weights."""

    without_weights = False
    lost = ""
    """The fault of the files of the weights; empty: none."""

    def prepare_update(self, weights: Any, config: Any, partial: bool) -> Callable[[], None]:
        if self.lost:
            raise ModelNotFound(self.lost)
        inner = super().prepare_update(0 if weights in (None, "files") else weights, config, partial)

        def write() -> None:
            inner()
            self.without_weights = False

        return write

    def update(self, weights: int) -> None:
        if not self.without_weights or self.model.weights != weights:
            return super().update(weights)
        return None

    def prepare_release(self, weights: bool, cache: bool) -> Callable[[], None]:
        def run() -> None:
            self.without_weights |= weights
            if cache:
                FakeExecutor.update(self, self.model.weights)

        return run

    def execute(self, batch: Any) -> Any:
        assert not self.without_weights, "a step without weights"
        return super().execute(batch)


def engine_of(**settings: Any) -> AsyncEngine:
    return make_engine(executor=Forgetful(128, 4), **settings)


async def running(engine: AsyncEngine, count: int = 200, number: int = 0) -> asyncio.Task[Any]:
    """A request that has some of its tokens."""
    before = engine.stats().generated_tokens
    task = asyncio.create_task(engine.generate(prompt(number), greedy(count)))
    await until(lambda: engine.stats().generated_tokens > before + 3)
    return task


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("dropped", [("keep", "keep"), ("keep", "drop"), ("drop", "keep"), ("drop", "drop")])
async def test_requests_wait_and_are_answered_as_if_nothing_had_been(dropped: tuple[Any, Any], depth: int):
    """Requests that ran with "keep" and those that came meanwhile are answered; an engine asleep runs no steps."""
    async with engine_of(max_steps_in_flight=depth) as engine:
        first = await running(engine)
        await engine.sleep(weights=dropped[0], cache=dropped[1], mode="keep")
        assert engine.stats().state == ("paused" if dropped == ("keep", "keep") else "asleep")
        late = asyncio.create_task(engine.generate(prompt(1), greedy(9)))
        await until(lambda: engine.stats().requests["waiting"] >= 1)
        steps = engine.stats().steps
        assert (await asyncio.wait({first, late}, timeout=0.02))[0] == set()
        assert engine.stats().steps == steps
        assert await engine.wake() == 0
        assert engine.stats().state == "awake"
        assert (await first).token_ids == answer(prompt(0), 200)
        assert (await late).token_ids == answer(prompt(1), 9)
        await idle(engine)
        assert_nothing_held(engine.core)


async def test_finish_lets_earlier_requests_end_and_abort_ends_them():
    async with engine_of() as engine:
        first = await running(engine, 60)
        await engine.sleep()
        assert first.done()
        assert (await first).token_ids == answer(prompt(0), 60)
        await engine.wake()
        second = await running(engine, 300)
        await engine.pause(mode="abort")
        found = await second
        assert (found.finish_reason, found.token_ids) == ("abort", answer(prompt(0), 300)[: len(found.token_ids)])
        assert found.error == "the engine was put to sleep or paused"
        await engine.resume()
        assert (await engine.generate(prompt(3), greedy(5))).token_ids == answer(prompt(3), 5)


async def test_refusing_by_choice_and_only_meanwhile():
    async with engine_of(hosted=True) as engine:
        executor_of(engine).hold(after=3)
        first = asyncio.create_task(engine.generate(prompt(0), greedy(300)))
        await until(executor_of(engine).entered.is_set)
        asleep = asyncio.create_task(engine.sleep(requests="refuse"))
        await until(lambda: engine.core.loop.refuses)
        with pytest.raises(EngineAsleep, match="asleep or paused"):
            await engine.generate(prompt(1), greedy(3))
        with pytest.raises(EngineAsleep):
            await in_thread(lambda: Engine(engine).generate(prompt(1), greedy(3)))
        executor_of(engine).release()
        await asleep
        assert (await first).token_ids == answer(prompt(0), 300)
        assert engine.alive, "it is not closed"
        await engine.wake()
        assert (await engine.generate(prompt(1), greedy(3))).token_ids == answer(prompt(1), 3)


async def test_deadlines_and_leaving_go_on_during_sleep():
    async with engine_of() as engine:
        await engine.sleep()
        found = await engine.generate(prompt(1), greedy(3), timeout=0.01)
        assert found.finish_reason == "timeout"
        left = asyncio.create_task(engine.generate(prompt(2), greedy(3)))
        await until(lambda: engine.stats().requests["waiting"] == 1)
        left.cancel()
        await until(lambda: engine.stats().requests["waiting"] == 0)
        assert_nothing_held(engine.core)


async def test_twice_deeper_and_waking_one_that_is_awake():
    async with engine_of() as engine:
        assert await engine.wake() == 0
        await engine.resume()
        await engine.pause()
        assert engine.stats().state == "paused"
        await engine.sleep(weights="keep")
        await engine.sleep()
        await engine.sleep(weights="keep", cache="keep")
        assert executor_of(engine).without_weights
        assert engine.stats().state == "asleep"
        late = asyncio.create_task(engine.generate(prompt(1), greedy(9)))
        await engine.wake()
        assert (await late).token_ids == answer(prompt(1), 9)
        both = await asyncio.gather(engine.sleep(), engine.sleep(mode="keep"), engine.wake(), engine.wake())
        assert both == [None, None, 0, 0]
        assert (await engine.generate(prompt(1), greedy(9))).token_ids == answer(prompt(1), 9)


async def test_other_weights_meanwhile():
    """Weights change by `update_weights`, at once in any mode, and by `wake`; kept requests go on with the new ones."""
    async with engine_of() as engine:
        first = await running(engine, 150)
        await engine.pause()
        assert await engine.update_weights(5, mode="wait", version=40) == 40  # type: ignore[arg-type]
        assert engine.stats().state == "paused"
        await engine.resume()
        found = await first
        kept = found.weight_versions[0][1]
        assert [version for version, _ in found.weight_versions] == [0, 40]
        assert found.token_ids[kept:] == answer([*prompt(0), *found.token_ids[:kept]], 150 - kept, 5)
        await engine.sleep()
        assert await engine.wake(6) == 41  # type: ignore[arg-type]
        assert (await engine.generate(prompt(0), greedy(9))).token_ids == answer(prompt(0), 9, 6)
        await engine.sleep()
        with pytest.raises(InvalidParameter, match=r"^partial: cannot be"):
            await engine.update_weights(7, partial=True)  # type: ignore[arg-type]
        await engine.update_weights(7)  # type: ignore[arg-type]
        assert engine.stats().state == "asleep"
        assert await engine.wake() == 42
        assert (await engine.generate(prompt(0), greedy(9))).token_ids == answer(prompt(0), 9, 7)


async def test_weights_that_came_from_tensors_must_be_given_again():
    async with engine_of() as engine:
        await engine.update_weights(5)  # type: ignore[arg-type]
        await engine.sleep()
        with pytest.raises(InvalidParameter, match=r"^weights: must be given: those that were dropped"):
            await engine.wake()
        assert engine.stats().state == "asleep"
        assert await engine.wake("files", version=9) == 9
        await engine.sleep()
        assert await engine.wake() == 9, "those are files again"


@pytest.mark.parametrize("given", [None, "vanishes"])
async def test_weights_that_cannot_be_read_leave_it_asleep(given: Any):
    async with engine_of() as engine:
        await engine.sleep()
        late = asyncio.create_task(engine.generate(prompt(1), greedy(9)))
        executor_of(engine).lost = "" if given else "the folder is gone"
        with pytest.raises((ModelNotFound, OSError), match="is gone"):
            await engine.wake(given)
        assert engine.stats().state == "asleep"
        assert not late.done()
        executor_of(engine).lost = ""
        await engine.wake()
        assert (await late).token_ids == answer(prompt(1), 9)


CHANGES: list[Callable[[AsyncEngine], Awaitable[None]]] = [
    lambda engine: engine.sleep(requests="refuse"), lambda engine: engine.update_weights(5),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=["sleep", "an update of the weights"])
async def test_cancelling_takes_it_back(change: Callable[[AsyncEngine], Awaitable[None]]):
    async with engine_of() as engine:
        executor_of(engine).hold(after=3)
        first = asyncio.create_task(engine.generate(prompt(0), greedy(300)))
        await until(executor_of(engine).entered.is_set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(change(engine), 0.01)
        executor_of(engine).release()
        assert (await engine.generate(prompt(1), greedy(5))).token_ids == answer(prompt(1), 5)
        assert not first.done()
        assert (await first).token_ids == answer(prompt(0), 300)
        assert not engine.core.loop.updates
        assert engine.stats().state == "awake"


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("begun", [True, False])
async def test_closing_ends_sleep_and_those_that_wait(drain: bool, begun: bool):
    """A drain lets no sleep begin, and wakes nobody: who waits behind a sleep is aborted."""
    with no_new_engine_thread():
        engine = engine_of()
        await engine.start()
        first = await running(engine, 40)
        asleep = asyncio.create_task(engine.sleep(mode="finish"))
        await until(lambda: bool(engine.core.loop.updates))
        if begun:
            await asleep
        late = asyncio.create_task(engine.generate(prompt(1), greedy(5)))
        await until(lambda: engine.stats().requests["waiting"] == 1)
        await engine.aclose(drain=drain)
        if begun:
            assert ((await late).finish_reason, (await late).error) == ("abort", "the engine is closing")
        else:
            with pytest.raises(EngineClosed):
                await asleep
            assert (await first).finish_reason == ("length" if drain else "abort")
            assert (await late).finish_reason == ("length" if drain else "abort")
        for call in (engine.sleep, engine.wake, engine.pause, engine.resume):
            with pytest.raises(EngineClosed):
                await call()


async def test_what_is_refused_by_name():
    async with engine_of() as engine, make_engine() as plain:
        for name, calls in {
            "weights": engine.sleep(weights="lose"),  # type: ignore[arg-type]
            "cache": engine.sleep(cache=True),  # type: ignore[arg-type]
            "mode": engine.pause(mode="recompute"),  # type: ignore[arg-type]
            "requests": engine.pause(requests="abort"),  # type: ignore[arg-type]
            "version": engine.wake(version=3),
        }.items():
            with pytest.raises(InvalidParameter, match=f"^{name}: "):
                await calls
        with pytest.raises(UnsupportedModel, match="cannot be given back"):
            await plain.sleep()
        await plain.pause()
        await plain.resume()
    with pytest.raises(EngineClosed, match="has not been started"):
        await engine_of().sleep()


async def test_blocking_calls_and_groups():
    async with engine_of() as owned:
        for call in (Engine(owned).sleep, Engine(owned).wake, Engine(owned).pause, Engine(owned).resume):
            with pytest.raises(WrongLoop):
                call()
    engine, other = engine_of(hosted=True), engine_of(hosted=True)
    await engine.start()
    await other.start()
    group = EngineGroup({"a": engine, "b": other})
    await in_thread(Engine(engine).sleep)
    assert {name: each.state for name, each in group.stats().items()} == {"a": "asleep", "b": "awake"}
    assert await in_thread(Engine(engine).wake) == 0
    await in_thread(Engine(engine).pause)
    await in_thread(Engine(engine).resume)
    await group.sleep(weights="drop")
    assert {each.state for each in group.stats().values()} == {"asleep"}
    await group.wake("b")
    assert {name: each.state for name, each in group.stats().items()} == {"a": "asleep", "b": "awake"}
    await group.pause("b", mode="abort")
    executor_of(engine).lost = "it is gone"
    with pytest.raises(ModelNotFound, match="it is gone"):
        await group.wake()
    assert group["b"].stats().state == "awake", "the other call's error stopped nobody"
    executor_of(engine).lost = ""
    with pytest.raises(InvalidParameter, match=r"^model: must be one of"):
        await group.sleep("c")
    await group.wake()
    assert (await group.generate(prompt(0), greedy(9), model="a")).token_ids == answer(prompt(0), 9)
    await group.aclose()


async def test_a_recording_replays_with_its_sleep(tmp_path: Any):
    told: list[tuple[str, Any]] = []
    core = make_core(Forgetful(64, 4), wiring={"recorder": lambda *entry: told.append(entry)})
    async with AsyncEngine(lambda: core) as engine:
        tasks = [asyncio.create_task(engine.generate(prompt(i), greedy(30))) for i in range(3)]
        await until(lambda: engine.stats().generated_tokens > 3)
        await engine.sleep(mode="keep")
        tasks.append(asyncio.create_task(engine.generate(prompt(3), greedy(30))))
        await until(lambda: engine.stats().requests["waiting"] == 4)
        await engine.update_weights(5)  # type: ignore[arg-type]
        await engine.wake()
        found = [(await task).token_ids for task in tasks]
    assert {"pause", "clear_cache", "resume", "start_anew"} <= {kind for kind, _ in told}
    assert replayed(Recording(core.config, 64, told).save(tmp_path / "a.jsonl")) == found
