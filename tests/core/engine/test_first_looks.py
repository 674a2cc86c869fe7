"""First looks at an engine: its `repr`, its statistics as text, both names of closing, and the progress of a load."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.fake_engine import executor_of, greedy, in_thread, make_core, make_engine

from asyncengine import AsyncEngine, Engine, EngineGroup
from asyncengine.errors import EngineClosed, EngineDead, InvalidParameter


async def test_repr_tells_model_state_and_dtype() -> None:
    release = threading.Event()

    def build():
        release.wait(30)
        return make_core()

    engine = AsyncEngine(build, hosted=True)
    assert repr(engine) == "<AsyncEngine '': not loaded>"
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    assert repr(engine) == "<AsyncEngine '': loading>"
    release.set()
    await starting
    assert repr(engine) == "<AsyncEngine 'fake': awake, int on cpu>"
    assert repr(Engine(engine)) == "<Engine of <AsyncEngine 'fake': awake, int on cpu>>"
    assert repr(EngineGroup({"a": engine})) == "<EngineGroup a=<AsyncEngine 'fake': awake, int on cpu>>"
    for wrong in ({}, {"a": "demo"}, {"a": Engine(engine)}):
        with pytest.raises(InvalidParameter, match="engines: must map names to AsyncEngines"):
            EngineGroup(wrong)  # type: ignore[arg-type]
    await engine.pause()
    assert "paused" in repr(engine)
    await engine.aclose()
    assert repr(engine) == "<AsyncEngine 'fake': closed, int on cpu>"


async def test_repr_of_one_that_died() -> None:
    engine = make_engine()
    await engine.start()
    executor_of(engine).execute = None  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineDead):
        await engine.generate([2, 3], greedy(4))
    assert repr(engine) == "<AsyncEngine 'fake': dead, int on cpu>"
    await engine.aclose()


async def test_statistics_are_a_few_lines_to_read() -> None:
    async with make_engine() as engine:
        await engine.generate([2, 3, 4], greedy(5, ignore_eos=True))
        lines = str(engine.stats()).splitlines()
        assert len(lines) == 5
        assert max(map(len, lines)) < 120
        assert lines[0].startswith("awake, up ")
        assert lines[1] == "requests: none; ended: 1 length"
        assert lines[2].startswith("tokens: 3 of prompts (0% cached), 5 generated in ")
        assert repr(engine.stats()).startswith("EngineStats(requests={")


async def test_both_names_of_closing_on_every_facade() -> None:
    """`close` and `aclose` close an AsyncEngine, an Engine and a group; each once, and again."""
    engines = [make_engine(hosted=True) for _ in range(5)]
    for engine in engines:
        await engine.start()
    first, second, third, fourth, fifth = engines
    await first.close()
    await Engine(second).aclose()
    await in_thread(Engine(third).close)
    await EngineGroup({"a": fourth}).close()
    await EngineGroup({"a": fifth}).aclose(drain=True, timeout=1)
    for engine in engines:
        await engine.close()
        with pytest.raises(EngineClosed):
            await engine.generate([2], greedy(1))
