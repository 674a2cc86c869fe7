"""Closing refuses, finishes or aborts, and leaves no task, thread or file descriptor (contract 11)."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from support.fake_engine import executor_of, greedy, in_thread, make_core, make_engine, until
from support.plug_points import Compiler

from asyncengine import AsyncEngine, Engine, TokenStream
from asyncengine.engine.frontend import Frontend
from asyncengine.errors import EngineClosed, WrongLoop

HOSTINGS = [pytest.param(False, id="owned"), pytest.param(True, id="hosted")]
LONG = greedy(400, ignore_eos=True)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("hosted", HOSTINGS)
async def test_a_closed_engine_leaves_nothing_behind(hosted: bool):
    async with make_engine(hosted=hosted) as warm:
        await warm.generate([2, 3], greedy(2))
    gc.collect()  # other tests' loops close theirs when they are collected
    tasks, fds, before = len(asyncio.all_tasks()), descriptors(), set(threading.enumerate())
    for _ in range(3):
        async with make_engine(hosted=hosted) as engine:
            await asyncio.gather(*(engine.generate([2 + i, 3], greedy(4)) for i in range(10)))
            streams = [engine.stream([2 + i], LONG) for i in range(5)]
            for stream in streams:
                await anext(stream)
        for stream in streams:
            assert (await stream.result()).finish_reason in ("abort", "length")
        assert executor_of(engine).closed
    assert len(asyncio.all_tasks()) == tasks
    assert descriptors() == fds
    assert not {t for t in threading.enumerate() if t.name.startswith("asyncengine")} - before


@pytest.mark.parametrize("hosted", HOSTINGS)
async def test_draining_finishes_what_there_is_and_refuses_the_rest(hosted: bool):
    engine = make_engine(hosted=hosted)
    await engine.start()
    executor_of(engine).hold()
    streams = [engine.stream([2 + i, 3], greedy(5)) for i in range(5)]
    for stream in streams:
        await stream.__aenter__()
    closing = asyncio.create_task(engine.aclose(drain=True))
    await asyncio.sleep(0)
    assert not engine.alive
    with pytest.raises(EngineClosed):
        await engine.generate([2, 3], greedy(2))
    executor_of(engine).release()
    await closing
    for stream in streams:
        assert (await stream.result()).finish_reason in ("length", "stop")


async def started_with_one_that_never_ends(hosted: bool = False) -> tuple[AsyncEngine, TokenStream]:
    """An engine, and a stream whose grammar nobody compiles."""
    engine = make_engine(hosted=hosted, wiring={"grammars": Compiler()})
    await engine.start()
    never = engine.stream([2, 3], greedy(5, grammar="x"))
    await never.__aenter__()
    return engine, never


@pytest.mark.parametrize("hosted", HOSTINGS)
async def test_draining_aborts_the_rest_after_its_time(hosted: bool):
    engine, never = await started_with_one_that_never_ends(hosted)
    await engine.aclose(drain=True, timeout=0.05)
    assert (await never.result()).finish_reason == "abort"


async def test_closing_at_once_ends_a_drain():
    engine, never = await started_with_one_that_never_ends()
    draining = asyncio.create_task(engine.aclose(drain=True))
    await asyncio.sleep(0.01)
    assert not draining.done()
    await engine.aclose()
    await draining
    assert (await never.result()).finish_reason == "abort"


async def test_a_later_drain_does_not_take_an_abort_back():
    engine, _ = await started_with_one_that_never_ends()
    await asyncio.wait_for(asyncio.gather(engine.aclose(), engine.aclose(drain=True)), 120)


async def test_a_cancelled_drain_stays_cancelled():
    """The caller's cancellation is its own, not the engine task's."""
    engine, _ = await started_with_one_that_never_ends()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await engine.aclose(drain=True)
    await engine.aclose()


@pytest.mark.parametrize("hosted", HOSTINGS)
async def test_closing_twice_and_using_a_closed_engine(hosted: bool):
    engine = make_engine(hosted=hosted)
    with pytest.raises(EngineClosed, match="not been started"):
        engine.stream([2, 3])
    await engine.start()
    await engine.start()
    await engine.aclose()
    await engine.aclose()
    await asyncio.gather(engine.aclose(), engine.aclose(drain=True))
    with pytest.raises(EngineClosed):
        await engine.generate([2, 3])
    with pytest.raises(EngineClosed, match="make a new one"):
        await engine.start()
    assert not engine.abort("x")
    assert engine.stats().requests["running"] == 0


@pytest.mark.parametrize("hosted", HOSTINGS)
async def test_starting_at_the_same_time_loads_once(hosted: bool):
    made = []

    def build() -> Frontend:
        made.append(make_core())
        return made[-1]

    engine = AsyncEngine(build, hosted=hosted)
    await asyncio.gather(*(engine.start() for _ in range(5)))
    assert made == [engine.core]
    await engine.aclose()


async def test_closing_before_starting():
    engine = make_engine()
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await engine.start()
    hosted = make_engine(hosted=True)
    hosted.close_blocking()
    with pytest.raises(EngineClosed):
        hosted.start_blocking()


async def test_a_blocking_close_of_an_owned_engine_is_refused_and_names_what_closes_it():
    async with make_engine() as engine:
        for close in (engine.close_blocking, Engine(engine).close):
            with pytest.raises(WrongLoop, match="aclose"):
                close()
            with pytest.raises(WrongLoop, match="aclose"):
                await in_thread(close)
        assert engine.alive
        assert (await engine.generate([2, 3], greedy(2))).token_ids


async def test_a_hosted_engine_cannot_wait_for_its_own_end():
    """A hook is called on the engine's thread: joining that thread there would raise bare, or never end."""
    refused: list[BaseException] = []
    async with make_engine(hosted=True) as engine:

        def hook(event: object) -> None:
            try:
                engine.close_blocking()
            except WrongLoop as error:
                refused.append(error)

        engine.on_event(hook)
        await engine.generate([2, 3], greedy(2))
        await until(lambda: bool(refused))
        assert engine.alive


async def test_leaving_the_engine_inside_a_cancelled_scope_closes_it():
    with anyio.CancelScope() as scope:
        async with make_engine() as engine:
            stream = engine.stream([2, 3], LONG)
            await anext(stream)
            scope.cancel()
            await stream.result()
    assert executor_of(engine).closed


class HeldBuild:
    """A loader of an engine's parts that waits for `go`."""

    def __init__(self) -> None:
        self.loading, self.go = threading.Event(), threading.Event()

    def __call__(self) -> Frontend:
        self.loading.set()
        self.go.wait(120)
        return make_core()


async def test_an_engine_closed_while_it_loads_never_serves():
    build = HeldBuild()
    engine = AsyncEngine(build)
    start = asyncio.create_task(engine.start())
    await in_thread(build.loading.wait)
    await engine.aclose()
    build.go.set()
    with pytest.raises(EngineClosed, match="while it loaded"):
        await start


def test_a_start_that_is_cancelled_while_loading_leaves_no_thread():
    build = HeldBuild()

    async def main() -> None:
        start = asyncio.create_task(AsyncEngine(build).start())
        await in_thread(build.loading.wait)
        start.cancel()
        with suppress(asyncio.CancelledError):
            await start
        build.go.set()

    asyncio.run(main())


async def test_a_blocking_call_on_the_thread_of_an_owned_engine_raises_and_never_hangs():
    async with make_engine() as engine:
        blocking = Engine(engine)
        for call in (blocking.generate, blocking.stream):
            with pytest.raises(WrongLoop):
                call([2, 3], greedy(2))
        with pytest.raises(WrongLoop):
            blocking.generate_many([[2, 3]], greedy(2))
        done = await in_thread(lambda: blocking.generate([2, 3], greedy(2)))
        assert len(done.token_ids) == 2


LIBRARY = """
import weakref
class Part: pass
def forget(): _parts.clear()
_parts, part = ["a part"], Part()
weakref.finalize(part, forget)
"""
PROGRAM = """
import threading, time
from asyncengine.engine.process import PROCESS

def load():
    while not PROCESS.is_ending:
        time.sleep(0.001)
    import library
    threading.library = library  # something that outlives the program's modules refers to it

thread = threading.Thread(target=load, daemon=True)
PROCESS.waits_at_exit_for(thread)
thread.start()
"""


def test_what_is_imported_while_the_program_ends_is_finalized_before_its_modules_are_gone(tmp_path: Path):
    """A library like torch, which is being imported when Ctrl-C ends a program that loads a model."""
    (tmp_path / "library.py").write_text(LIBRARY, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
