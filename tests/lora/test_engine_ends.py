"""Cancelling, closing and dying while adapters are read and awaited: all callers hear of it as what it is."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.adapter_engine import PROMPT, Face, Lab, greedy
from support.fake_engine import gather_all, in_thread, until

from asyncengine import AsyncEngine, Engine
from asyncengine.engine.frontend import Frontend
from asyncengine.errors import EngineClosed, EngineDead
from asyncengine.options import RequestOptions

pytestmark = pytest.mark.usefixtures("no_thread_left")


# ---------------------------------------------------------------- cancellation


async def test_cancelling_is_a_cancellation() -> None:
    face = Face("owned", workers=1, pages=600, page_size=64)
    async with face.engine:
        await face.load("used")
        stream = await face.running("used")
        face.loader.gate.clear()
        calls = [
            asyncio.create_task(face.load_adapter("read", "read")),
            asyncio.create_task(face.load_adapter("queued", "queued")),
            asyncio.create_task(face.unload_adapter("used", wait=True)),
        ]
        await until(lambda: "read" in face.loader.reads and face.names() == [])
        for call in calls:
            call.cancel()
        assert [type(one) for one in await gather_all(calls)] == [asyncio.CancelledError] * 3
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await face.load_adapter("third", "third")
        await stream.aclose()
        face.loader.gate.set()
        await face.settled()
        assert "queued" not in face.loader.reads
        assert "third" not in face.loader.reads
        await face.load_adapter("used", "used")
        assert face.right(await face.engine.generate(PROMPT, greedy(9), adapter="used"), PROMPT, 9, "used")


async def test_who_was_cancelled_before_hears_that_the_engine_closes() -> None:
    """A task that is cleaning up after a cancellation of its own is not cancelled once more by the engine's end."""
    face = Face("owned", workers=1)
    outcomes: list[BaseException] = []

    async def clean_up(name: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await face.load_adapter(name, name)
            except BaseException as error:
                outcomes.append(error)

    async with face.engine:
        face.loader.gate.clear()
        tasks = [asyncio.create_task(clean_up(name)) for name in ("read", "queued")]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await until(lambda: face.loader.reads == ["read"])
        closing = asyncio.create_task(face.engine.aclose())
        await until(lambda: bool(outcomes))
        face.loader.gate.set()
        await asyncio.gather(closing, *tasks)
    for error in outcomes:
        if not isinstance(error, EngineClosed):
            raise error


async def test_an_engine_closed_while_it_loads_keeps_no_adapters() -> None:
    lab = Lab()
    loading, go = threading.Event(), threading.Event()

    def build() -> Frontend:
        lab.registry.load("a", "a").result()
        loading.set()
        go.wait(120)
        return lab._build()

    engine = AsyncEngine(build)
    start = asyncio.create_task(engine.start())
    await in_thread(loading.wait)
    await engine.aclose()
    go.set()
    try:
        with pytest.raises(EngineClosed, match="while it loaded"):
            await start
        assert lab.registry.counts()["nbytes"] == 0
    finally:
        lab.registry.close()


# ---------------------------------------------------------------- the engine ends meanwhile


@pytest.mark.parametrize("end", ["close", "drain", "death"])
async def test_the_engine_ends_while_callers_wait(kind: str, end: str) -> None:
    """All callers hear of it as such. One that waited for requests that the end aborts has what it waited for."""
    face = Face(kind, workers=1, pages=600)
    async with face.engine:
        await face.load("used")
        face.executor.hold(after=2)
        stream = await face.running("used", 400)
        face.loader.gate.clear()
        reading = asyncio.create_task(face.load_adapter("read", "read"))
        await until(lambda: "read" in face.loader.reads)
        queued = asyncio.create_task(face.load_adapter("queued", "queued"))
        leaving = asyncio.create_task(face.unload_adapter("used", wait=True))
        await until(lambda: face.names() == [])
        if end == "death":
            face.executor.failure = RuntimeError("device lost")
        else:
            closing = asyncio.create_task(face.engine.aclose(drain=end == "drain"))
            await until(lambda: face.engine.core.client.closing)
        face.executor.release()
        (lost,) = await gather_all([queued])
        assert type(lost) in (EngineClosed, EngineDead), lost
        assert "queued" not in face.loader.reads
        face.loader.gate.set()
        read, left = await gather_all([reading, leaving])
        assert type(read) in (EngineClosed, EngineDead), read
        assert left is None if end != "death" else type(left) in (EngineClosed, EngineDead), left
        if end == "death":
            with pytest.raises(EngineDead):
                await stream.result()
        else:
            await closing
            assert (await stream.result()).finish_reason == ("length" if end == "drain" else "abort")
        assert face.names() == []
        assert face.claims == 0
        with pytest.raises(EngineDead if end == "death" else EngineClosed):
            await face.load_adapter("late", "late")
        with pytest.raises(EngineDead if end == "death" else EngineClosed):
            await face.unload_adapter("used")


async def test_a_loop_that_ends_under_a_hosted_engine_harms_nobody() -> None:
    face = Face("hosted", pages=600, page_size=64)
    async with face.engine:
        await face.load("a")
        stream = await face.running("a")
        face.loader.gate.clear()

        def abandon() -> None:
            loop = asyncio.new_event_loop()
            tasks = [
                loop.create_task(face.engine.unload_adapter("a", wait=True)),
                loop.create_task(face.engine.load_adapter("b", "b")),
            ]
            for _ in range(3):
                loop.run_until_complete(asyncio.sleep(0))
            for task in tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            loop.close()

        await in_thread(abandon)
        assert face.names() == []
        await stream.aclose()
        face.loader.gate.set()
        await until(lambda: face.names() == ["b"])
        assert face.right(await face.engine.generate(PROMPT, greedy(9), adapter="b"), PROMPT, 9, "b")
        await face.settled()


# ---------------------------------------------------------------- requests at the end of the engine


@pytest.mark.parametrize("depth", [1, 2])
async def test_an_engine_that_dies_tells_those_who_wait_for_adapters(hosted: bool, depth: int) -> None:
    lab = Lab(hosted=hosted, room=1, max_steps_in_flight=depth, max_num_seqs=2)
    async with lab.engine:
        await lab.load("a", "b")
        lab.executor.hold()
        lab.loader.gate.clear()
        streams = [lab.engine.stream(PROMPT, greedy(9, n=1 + i % 2), adapter="ab"[i % 2]) for i in range(6)]
        for stream in streams:
            await stream.__aenter__()
        lab.executor.failure = RuntimeError("device lost")
        lab.executor.release()
        for stream in streams:
            with pytest.raises(EngineDead, match="device lost"):
                await stream.result()
        lab.loader.gate.set()
        await until(lambda: lab.claims == 0)
        assert lab.registry.counts()["nbytes"] == 0
        for call in (lab.engine.load_adapter("c", "c"), lab.engine.unload_adapter("b")):
            with pytest.raises(EngineDead):
                await call
        with pytest.raises(EngineDead):
            await lab.engine.generate(PROMPT, greedy(3), adapter="b")


@pytest.mark.parametrize("drain", [False, True])
async def test_closing_with_adapters_loading_and_running(hosted: bool, drain: bool) -> None:
    lab = Lab(hosted=hosted, room=1, pages=600)
    async with lab.engine:
        await lab.load("a", "b")
        lab.loader.gate.clear()
        running = lab.engine.stream(PROMPT, greedy(60, ignore_eos=True), adapter="b")
        await anext(running)
        loading = lab.engine.stream(PROMPT, greedy(9), adapter="a")
        await loading.__aenter__()
        closing = asyncio.create_task(lab.engine.aclose(drain=drain))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed):
            await lab.engine.load_adapter("c", "c")
        lab.loader.gate.set()
        await closing
        ends = [(await stream.result()).finish_reason for stream in (running, loading)]
        assert ends == ["length", "length"] if drain else ends[1] == "abort"
    assert (lab.claims, lab.registry.counts()["nbytes"], lab.engine.adapters()) == (0, 0, ())


def test_posted_to_an_engine_that_has_just_ended() -> None:
    """The engine closes or dies, on its own thread, between the gate and the inbox: a request is told which."""
    for failure in (None, RuntimeError("device lost")):
        lab = Lab(hosted=True)
        lab.engine.start_blocking()
        with Engine(lab.engine) as engine:
            engine.load_adapter("a", "a")
            core = lab.engine.core
            accepted = [core.prepare(PROMPT, greedy(4), RequestOptions(adapter=name)) for name in ("a", None)]
            for one in accepted:
                core.client.enter_blocking(one)
            if failure is not None:
                lab.executor.failure = failure
                with pytest.raises(EngineDead):
                    engine.generate(PROMPT, greedy(4))
            engine.close()
            for one in accepted:
                with pytest.raises(EngineClosed if failure is None else EngineDead):
                    core.post(one)
            assert lab.claims == 0
            assert not core.loop.delivery.expected
