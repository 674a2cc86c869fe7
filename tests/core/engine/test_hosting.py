"""A hosted engine serves every loop and thread; one engine is shared by a whole process."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.engine_watches import own_registry, use_shared
from support.fake_engine import executor_of, greedy, idle, in_thread, make_core, make_engine, oracle, until

import asyncengine
from asyncengine import Engine
from asyncengine.errors import EngineClosed, InvalidParameter, ModelNotFound, WrongLoop
from asyncengine.shared import SOON
from asyncengine.testing import ManualClock
from asyncengine.testing.leaks import assert_nothing_held


def test_many_threads_and_their_loops_share_one_batch():
    with Engine(make_engine(hosted=True)) as engine:
        engine.aengine.start_blocking()
        results: dict[int, Any] = {}

        def call(i: int) -> None:
            if i % 3 == 2:
                results[i] = asyncio.run(engine.aengine.generate([2 + i, 3], greedy(6))).token_ids
            elif i % 3:
                results[i] = engine.generate([2 + i, 3], greedy(6)).token_ids
            else:
                results[i] = [t for c in engine.stream([2 + i, 3], greedy(6)) for t in c.token_ids]

        threads = [threading.Thread(target=call, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert results == {i: oracle(engine.aengine, [2 + i, 3], 6) for i in range(16)}
        assert engine.stats().finished


def test_generate_many_submits_everything_before_it_waits_and_aborts_the_rest_on_an_error():
    with Engine(make_engine(hosted=True)) as engine:
        engine.aengine.start_blocking()
        executor = executor_of(engine.aengine)
        done = engine.generate_many([[2 + i] for i in range(9)], greedy(4))
        assert [c.token_ids for c in done] == [oracle(engine.aengine, [2 + i], 4) for i in range(9)]
        counts: list[tuple[int, int]] = []
        engine.generate_many([[2], [3]], greedy(4), progress=lambda *now: counts.append(now))
        assert counts == [(1, 2), (2, 2)]
        with pytest.raises(InvalidParameter, match="progress: must be a function"):
            engine.generate_many([[2]], greedy(4), progress=3)  # type: ignore[arg-type]
        executor.hold()
        with pytest.raises(ValueError, match="prompt"):
            engine.generate_many([[2], [3], []], greedy(300, ignore_eos=True))
        executor.release()
        asyncio.run(idle(engine.aengine))
        assert engine.stats().finished["abort"] == 2


def test_leaving_a_blocking_stream_aborts():
    with Engine(make_engine(hosted=True)) as engine:
        engine.aengine.start_blocking()
        for chunk in engine.stream([2, 3], greedy(300, ignore_eos=True)):
            assert chunk.token_ids
            break
        with engine.stream([2, 3], greedy(300, ignore_eos=True)) as stream:
            next(stream)
            stream.close()
            assert list(stream) == []
        asyncio.run(idle(engine.aengine))
        assert_nothing_held(engine.aengine.core)


# -------------------------------------------------------------------- shared engines


class Loader:
    """Stands for `load_frontend`: counts, waits and fails as told."""

    def __init__(self) -> None:
        self.calls = 0
        self.fail: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    def __call__(self, model: str, config: Any, attempt: Any = None) -> Any:
        self.calls += 1
        self.go.wait(120)
        if self.fail is not None:
            raise self.fail
        return make_core()


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    loader = Loader()
    monkeypatch.setattr("asyncengine.assembly.wiring.load_frontend", loader)
    return loader


async def test_handles_are_cheap_and_equal_ones_share_one_engine(loader: Loader):
    handles = [asyncengine.shared_engine("some/model", keep_alive=0, max_num_seqs=4) for _ in range(50)]
    assert loader.calls == 0
    assert not handles[0].loaded
    engines = await asyncio.gather(*(handle.aget() for handle in handles))
    assert loader.calls == 1
    assert len(set(map(id, engines))) == 1
    assert handles[7].loaded
    for handle in handles[:-1]:
        handle.close()
        handle.close()
    assert (await engines[0].generate([2, 3], greedy(3))).token_ids
    handles[-1].close()
    await until(lambda: not engines[0].alive)
    assert handles[-1].closed
    with pytest.raises(EngineClosed):
        await handles[-1].aget()


async def test_a_dropped_handle_is_given_back(loader: Loader):
    handle = asyncengine.shared_engine("m", keep_alive=0)
    engine = await handle.aget()
    cycle: list[Any] = [handle]
    cycle.append(cycle)
    del handle, cycle
    gc.collect()
    await until(lambda: not engine.alive)


async def test_failing_to_load_is_told_to_everyone_and_tried_again(loader: Loader):
    handle = asyncengine.shared_engine("m", keep_alive=0)
    loader.fail = ModelNotFound("m is not there")
    loader.go.clear()
    waits = [asyncio.create_task(handle.aget()) for _ in range(5)]
    blocking = asyncio.create_task(in_thread(handle.get))
    await until(lambda: loader.calls == 1)
    await asyncio.sleep(0)
    loader.go.set()
    for wait in [*waits, blocking]:
        with pytest.raises(ModelNotFound):
            await wait
    assert not handle.loaded
    loader.fail = None
    assert (await (await handle.aget()).generate([2, 3], greedy(3))).token_ids
    handle.close()


async def test_one_impatient_caller_does_not_cancel_the_loading_for_the_others(loader: Loader):
    handle = asyncengine.shared_engine("m", keep_alive=0)
    loader.go.clear()
    impatient, patient = asyncio.create_task(handle.aget()), asyncio.create_task(handle.aget())
    await until(lambda: loader.calls == 1)
    impatient.cancel()
    await asyncio.wait([impatient])
    loader.go.set()
    engine = await patient
    assert loader.calls == 1
    assert await handle.aget() is engine
    handle.close()


async def test_a_handle_closed_while_it_loads_closes_the_engine_when_it_comes(loader: Loader):
    handle = asyncengine.shared_engine("m", keep_alive=0)
    loader.go.clear()
    wait = asyncio.create_task(handle.aget())
    await until(lambda: loader.calls == 1)
    handle.close()
    loader.go.set()
    engine = await wait
    await until(lambda: not engine.alive)


async def test_a_dead_shared_engine_is_replaced_at_the_next_use(loader: Loader):
    handle = asyncengine.shared_engine("m", keep_alive=0)
    first = await handle.aget()
    executor_of(first).failure = RuntimeError("device lost")
    with pytest.raises(asyncengine.EngineDead):
        await first.generate([2, 3])
    second = await handle.aget()
    assert second is not first
    assert (await second.generate([2, 3], greedy(3))).token_ids
    handle.close()


# -------------------------------------------------------------------- shared engines without a handle


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[ManualClock]:
    """The clock of a registry of the test's own."""
    with own_registry(monkeypatch) as clock:
        yield clock


async def some_ticks(engine: asyncengine.AsyncEngine, count: int = 3) -> None:
    """Waits until the engine's loop has looked at the clock `count` times."""
    seen, loop = [], engine.core.loop
    tick = loop.on_tick
    assert tick is not None

    def counting() -> None:
        tick()
        seen.append(1)

    loop.on_tick = counting
    await until(lambda: len(seen) >= count)
    loop.on_tick = tick


async def test_an_engine_stays_for_a_minute_after_its_last_handle(loader: Loader, time: ManualClock):
    engine = await use_shared()
    time.advance(59)
    await some_ticks(engine)
    assert await use_shared() is engine
    time.advance(59)  # counted from the last handle
    await some_ticks(engine)
    assert engine.alive
    time.advance(2)
    await until(lambda: not engine.alive)
    assert loader.calls == 1
    assert await use_shared() is not engine
    assert loader.calls == 2


@pytest.mark.parametrize("first", [0, 10])
async def test_the_last_handle_says_how_long(first: float, loader: Loader, time: ManualClock):
    short, long = (asyncengine.shared_engine("m", keep_alive=seconds) for seconds in (first, 1000))
    engine = await short.aget()
    short.close()
    long.close()
    time.advance(999)
    await some_ticks(engine)
    assert engine.alive
    time.advance(1)
    await until(lambda: not engine.alive)


async def test_nothing_is_kept_with_keep_alive_0_and_the_repeat_is_said_once(
    loader: Loader, time: ManualClock, caplog: pytest.LogCaptureFixture
):
    for _ in range(4):
        engine = await use_shared(keep_alive=0)
        await until(lambda engine=engine: not engine.alive)
        time.advance(5)
    assert loader.calls == 4
    (said,) = [record.getMessage() for record in caplog.records if "again" in record.getMessage()]
    assert said.startswith("m is loaded again, 5 s after")
    assert "keep_alive" in said


async def test_a_load_of_long_ago_is_no_repeat(loader: Loader, time: ManualClock, caplog: pytest.LogCaptureFixture):
    for _ in range(3):
        await use_shared(keep_alive=0)
        time.advance(SOON)
    assert not [record for record in caplog.records if "again" in record.getMessage()]


async def test_a_load_that_nobody_waits_for_any_more_is_kept_for_the_next(loader: Loader, time: ManualClock):
    """A client that leaves while a model loads for minutes must not have it loaded anew for the one behind."""
    loader.go.clear()
    handle = asyncengine.shared_engine("m")
    wait = asyncio.create_task(handle.aget())
    await until(lambda: loader.calls == 1)
    wait.cancel()
    handle.close()
    loader.go.set()
    await use_shared()
    assert loader.calls == 1


async def test_a_failed_load_and_an_engine_that_ended_are_not_kept(loader: Loader, time: ManualClock):
    loader.fail, handle = ModelNotFound("m is not there"), asyncengine.shared_engine("m")
    loader.go.clear()
    wait = asyncio.create_task(handle.aget())
    await until(lambda: loader.calls == 1)
    handle.close()
    loader.go.set()
    with pytest.raises(ModelNotFound):
        await wait
    loader.fail = None
    engine = await use_shared()
    assert loader.calls == 2
    await engine.aclose()  # got from a handle, and closed by somebody all the same
    assert await use_shared() is not engine
    assert loader.calls == 3


# -------------------------------------------------------------------- stats


async def test_stats_add_up_and_may_be_read_from_any_thread_while_running():
    async with make_engine(hosted=True, pages=60, max_num_seqs=6) as engine:
        stop, failures, reads = threading.Event(), [], 0

        def watch() -> None:
            nonlocal reads
            while not stop.is_set():
                try:
                    stats = engine.stats()
                    assert stats.pages.total == 59
                    assert all(value >= 0 for value in stats.requests.values())
                    reads += 1
                except BaseException as error:
                    failures.append(error)
                    return

        watchers = [threading.Thread(target=watch)]
        for watcher in watchers:
            watcher.start()
        done = await asyncio.gather(*(engine.generate([2 + i % 90, 3, 4, 5], greedy(12)) for i in range(20)))
        await idle(engine)
        await until(lambda: reads > 3 or bool(failures))
        stop.set()
        for watcher in watchers:
            watcher.join(120)
        assert not failures
        stats = engine.stats()
        assert stats.generated_tokens == sum(len(c.token_ids) for c in done)
        assert stats.prompt_tokens == 80
        assert sum(stats.finished.values()) == 20
        assert stats.first_token.count == 20
        assert stats.inter_token.count == stats.generated_tokens - 20
        assert stats.step.count == stats.steps
        assert {*stats.requests} > {"waiting", "running", "grammar_queue", "adapter_queue", "restore_queue"}
        assert not any(stats.requests.values())
        pages = stats.pages
        assert pages.free + pages.cached + pages.shared + pages.held + pages.retiring == pages.total


# -------------------------------------------------------------------- what a blocking stream promises


def test_a_blocking_stream_is_submitted_when_it_is_made():
    """A stream does not wait for `next`: it is served though nobody reads, and refused where it is asked for."""
    with Engine(make_engine(hosted=True)) as engine:
        engine.aengine.start_blocking()
        streams = [engine.stream([2 + i, 3], greedy(6)) for i in range(3)]
        assert all(stream.request_id for stream in streams)
        asyncio.run(until(lambda: sum(engine.stats().finished.values()) == 3))
        assert [stream.result().token_ids for stream in streams] == [
            oracle(engine.aengine, [2 + i, 3], 6) for i in range(3)
        ]
        with pytest.raises(ValueError, match="prompt"):
            engine.stream([], greedy(2))
        executor_of(engine.aengine).hold()
        dropped = engine.stream([2, 3], greedy(300, ignore_eos=True))
        del dropped
        executor_of(engine.aengine).release()
        asyncio.run(until(lambda: engine.stats().finished.get("abort") == 1))


async def test_a_blocking_stream_read_on_the_thread_that_drives_its_engine_is_refused():
    async with make_engine() as engine:
        executor_of(engine).hold()
        stream = await in_thread(lambda: Engine(engine).stream([2, 3], greedy(4)))
        for read in (stream.result, lambda: next(stream)):
            with pytest.raises(WrongLoop):
                read()
        executor_of(engine).release()
        assert len((await in_thread(stream.result)).token_ids) == 4
