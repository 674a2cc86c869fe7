"""The clock around an engine's own functions: all parts are seen, and nothing of it stays."""

from __future__ import annotations

import time
from typing import Any

from asyncengine import AsyncEngine
from tools.gpucheck.greedy import GREEDY
from tools.gpucheck.steps import PARTS, StepClock
from tools.gpucheck.workloads import burst


async def test_parts_of_a_step() -> None:
    async with await AsyncEngine.from_pretrained("demo", device="cpu", kv_cache_memory="16MiB") as engine:
        loop: Any = engine.core.loop
        schedule = loop._schedule

        def slow() -> Any:
            time.sleep(0.003)
            return schedule()

        loop._schedule = slow
        clock = StepClock(engine)
        await burst(engine, [(5, 30)] * 3, 1)
        found = clock.medians(3)
        assert set(found) == {*PARTS, "total"}
        assert all(found[part] > 0 for part in PARTS)
        assert found["schedule"] >= 0.003
        assert found["total"] >= max(found[part] for part in PARTS)
        assert clock.medians(4) == {}, "no step had four rows"
        first, last = clock.steps[0], clock.steps[-1]
        assert (first.rows, first.prompts, first.prompt_tokens) == (3, 3, 15)
        assert (last.prompts, last.running) == (0, 0)
        assert sum(taken.gap for taken in clock.steps) <= last.retired + 1e-9
        assert "3 rows, 3 of them prompts of 15 tokens" in str(first)
        clock.close()
        assert not {"_apply_inbox", "_deliver", "_commit"} & set(vars(loop))
        assert "launch" not in vars(loop.runner.executor)
        steps = len(clock.steps)
        await engine.generate([5, 6], GREEDY.replace(max_tokens=3))
        assert len(clock.steps) == steps


async def test_an_engine_without_one_of_the_parts_is_timed_too(monkeypatch: Any) -> None:
    """The loop's functions are its own business."""
    monkeypatch.setitem(StepClock.__init__.__globals__["_METHODS"], "deliver", "_renamed")
    async with await AsyncEngine.from_pretrained("demo", device="cpu", kv_cache_memory="16MiB") as engine:
        clock = StepClock(engine)
        await burst(engine, [(5, 8)], 1)
        clock.close()
    assert clock.medians(1)["deliver"] == 0
    assert clock.medians(1)["commit"] > 0
