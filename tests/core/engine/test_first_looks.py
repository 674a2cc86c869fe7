"""First looks at an engine: its `repr`, its statistics as text, both names of closing, and the progress of a load."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import executor_of, greedy, in_thread, make_core, make_engine

from asyncengine import AsyncEngine, Engine, EngineGroup, progress
from asyncengine.errors import EngineClosed, EngineDead, InvalidParameter
from asyncengine.execution.models.progress import LoadProgress


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
    await engine.pause()
    assert "paused" in repr(engine)
    await engine.aclose()
    assert repr(engine) == "<AsyncEngine 'fake': closed, int on cpu>"


async def test_repr_of_one_that_died_or_could_not_be_loaded(tmp_path: Path) -> None:
    engine = make_engine()
    await engine.start()
    executor_of(engine).execute = None  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineDead):
        await engine.generate([2, 3], greedy(4))
    assert repr(engine) == "<AsyncEngine 'fake': dead, int on cpu>"
    await engine.aclose()
    failed = AsyncEngine._unstarted(tmp_path, None, {}, hosted=False)
    with pytest.raises(Exception, match=r"config\.json|no model"):
        await failed.start()
    assert repr(failed) == f"<AsyncEngine {str(tmp_path)!r}: not loaded>"


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


def test_a_long_load_tells_of_itself_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line in so many seconds, the first after as many; none of a quick load, nor where none are wanted."""
    times = iter([0.0, 3.0, 9.9, 10.1, 15.0, 20.2])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with LoadProgress(True) as load:
        load.stage("reading weights", 4)
        for _ in range(4):
            load.advance()
    assert capsys.readouterr().err.splitlines() == [
        "asyncengine: loading: reading weights (2 of 4)", "asyncengine: loading: reading weights (4 of 4)",
    ]  # fmt: skip
    times = iter([0.0, 50.0, 100.0])
    with progress.counted("embedding", 7) as advance:
        advance(3)
    assert capsys.readouterr().err == "asyncengine: embedding: 3 of 7\n"
    with LoadProgress(False) as load:
        load.stage("reading weights", 4)
    assert capsys.readouterr().err == ""


async def test_a_callback_hears_of_a_load_and_may_end_it() -> None:
    told: list[tuple[str, int, int | None]] = []
    small: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "show_progress": False}
    async with await AsyncEngine.from_pretrained("demo", on_progress=lambda *now: told.append(now), **small):
        stages = list(dict.fromkeys(stage for stage, _, _ in told))
        assert {"looking for the model", "reading weights", "running a first step"} <= set(stages)
        reading = [(done, total) for stage, done, total in told if stage == "reading weights"]
        assert reading[-1][0] == reading[-1][1]

    def give_up(stage: str, done: int, total: int | None) -> None:
        if stage == "reading weights":
            raise KeyError("enough")

    with pytest.raises(EngineClosed, match=r"on_progress gave the load up: KeyError\('enough'\)"):
        await AsyncEngine.from_pretrained("demo", on_progress=give_up, **small)
    with pytest.raises(InvalidParameter, match="on_progress: must be callable"):
        await AsyncEngine.from_pretrained("demo", on_progress=True, **small)  # type: ignore[arg-type]
