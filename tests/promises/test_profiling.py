"""A profile of a model's steps, and none of a fleet's."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.engine_watches import assert_untouched, named, read_profile
from support.fake_engine import posted, until
from support.held_steps import HeldSteps
from support.local_fleet import local_fleet

from asyncengine import AsyncEngine, InvalidParameter, SamplingParams

ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True)


def within(inner: dict[str, Any], outers: list[dict[str, Any]]) -> bool:
    begin, end = inner["ts"], inner["ts"] + inner["dur"]
    return any(
        outer["tid"] == inner["tid"] and outer["ts"] <= begin and end <= outer["ts"] + outer["dur"] for outer in outers
    )


@pytest.mark.parametrize("hosted", [pytest.param(False, id="owned"), pytest.param(True, id="hosted")])
async def test_loop_steps_parts_and_operators_lie_on_one_clock(tmp_path: Path, hosted: bool) -> None:
    async with (
        # a step of a new size is recorded operator by operator, after its launch: without guesses all are of one size
        await AsyncEngine.from_pretrained("demo", show_progress=False, hosted=hosted, speculation="off") as engine
    ):
        steps = HeldSteps(engine, after=8)
        async with engine.stream("hello", ENDLESS), engine.stream("good day", ENDLESS):
            await until(steps.reached.is_set, "some steps, the first of two rows among them")
            pausing = asyncio.create_task(engine.pause(mode="keep"))
            await until(lambda: bool(posted(engine)), "a pause from the next step on")
            steps.release()
            del engine.core.loop.runner.executor.launch
            await pausing
            made = asyncio.create_task(engine.profile(tmp_path / "new" / "folder", steps=6))
            await until(lambda: bool(engine.core.loop.hooks), "the beginning of a profile")
            await engine.resume()
            events = read_profile(await made)
        assert_untouched(engine)
    begins, ends = named(events, "step", "b"), named(events, "step", "e")
    assert len(begins) == len(ends) >= 6
    assert {event["args"]["rows"] for event in begins} == {2}
    numbers = [event["id"] for event in begins]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    counted = Counter(event["name"] for event in events if event["cat" if "cat" in event else "ph"] == "engine")
    for part in ("schedule", "deliver", "commit", "apply_inbox", "launch", "forward", "sample"):
        assert counted[part] >= 5, part
    launches = named(events, "launch")
    assert all(within(part, launches) for name in ("forward", "sample") for part in named(events, name)[1:-1])
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    assert operators
    assert sum(within(each, launches) for each in operators) > len(operators) / 2
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "asyncengine" in threads[named(events, "schedule")[0]["tid"]] or not hosted
    assert all(isinstance(event.get("ts", 0), (int, float)) for event in events)


async def test_a_fleet_has_several(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with local_fleet(monkeypatch, replicas=1) as (fleet, _):
        with pytest.raises(InvalidParameter, match="profile: is of one engine"):
            await fleet.profile(tmp_path)
