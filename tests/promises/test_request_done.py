"""The event at a request's end, of a model's engine and of a fleet."""

from __future__ import annotations

import pytest
from support.engine_watches import CALLER, watch
from support.local_fleet import local_fleet

from asyncengine import AsyncEngine, SamplingParams


async def test_a_chat_is_one_also_where_there_are_no_grammars() -> None:
    async with await AsyncEngine.from_pretrained("demo", grammar_backend="none", show_progress=False) as engine:
        seen = watch(engine)
        await engine.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1))
        assert seen[0][0].is_chat


async def test_a_fleet_tells_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_fleet(monkeypatch, replicas=1) as (fleet, _):
        seen = watch(fleet)
        CALLER.set("me")
        done = await fleet.generate("hello", SamplingParams(max_tokens=5, n=2, temperature=1.0, seed=3))
        ((event, caller),) = seen
        assert caller == "me"
        assert len(event.finish_reasons) == 2
        assert event.generated_tokens == done.usage.completion_tokens
        assert event.timings.queued == done.timings.queued
        assert not event.is_chat
        await fleet.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1))
        assert seen[1][0].is_chat
