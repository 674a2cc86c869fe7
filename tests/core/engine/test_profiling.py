"""Profiles: what is in the file, that nothing stays behind, and what ends one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from support.engine_watches import assert_untouched, named, read_profile
from support.fake_engine import executor_of, greedy, in_thread, make_engine, until

from asyncengine import Engine, EngineDead, InvalidParameter


async def test_a_plain_thread_may_make_one(tmp_path: Path) -> None:
    async with make_engine(hosted=True) as engine:
        executor_of(engine).hold()
        stream = engine.stream([2, 3], greedy(8))
        await stream.__aenter__()
        made = asyncio.ensure_future(in_thread(lambda: Engine(engine).profile(tmp_path, 3)))
        await until(lambda: bool(engine.core.loop.hooks))
        executor_of(engine).release()
        assert len(named(read_profile(await made), "step", "b")) >= 3
        await stream.result()
        assert_untouched(engine)


async def test_one_at_a_time_and_leaving_it_leaves_nothing(tmp_path: Path) -> None:
    async with make_engine() as engine:
        waits = asyncio.ensure_future(engine.profile(tmp_path, steps=5))
        await until(lambda: bool(engine.core.loop.hooks))
        with pytest.raises(InvalidParameter, match="profile: is being made already"):
            await engine.profile(tmp_path)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert_untouched(engine)
        assert not os.listdir(tmp_path)
        each = [await engine.profile(tmp_path, timeout=0.01) for _ in range(2)]  # and the next ones may be made
        assert [named(read_profile(path), "step", "b") for path in each] == [[], []]
        assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in each)
        for wrong in ({"steps": 0}, {"steps": 10_001}, {"steps": "3"}, {"timeout": 0}):
            with pytest.raises(InvalidParameter, match=next(iter(wrong))):
                await engine.profile(tmp_path, **wrong)  # type: ignore[arg-type]


async def test_an_engine_that_dies_ends_it(tmp_path: Path) -> None:
    async with make_engine() as engine:
        made = asyncio.ensure_future(engine.profile(tmp_path, steps=50))
        await until(lambda: bool(engine.core.loop.hooks))
        executor_of(engine).failure = RuntimeError("device lost")
        with pytest.raises(EngineDead):
            await engine.generate([2, 3], greedy(3))
        assert named(read_profile(await made), "launch")


@pytest.mark.parametrize("blocking", [False, True])
async def test_an_idle_engine_that_closes_ends_it(blocking: bool, tmp_path: Path) -> None:
    async with make_engine(hosted=True) as engine, asyncio.timeout(20):
        making = in_thread(lambda: Engine(engine).profile(tmp_path)) if blocking else engine.profile(tmp_path)
        made = asyncio.ensure_future(making)
        await until(lambda: bool(engine.core.loop.hooks))
        await engine.aclose()
        assert named(read_profile(await made), "end_all")
        assert_untouched(engine)
