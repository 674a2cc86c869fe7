"""The requests and the prefix cache of an engine that works, as it lists them."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_engine import executor_of, greedy, idle, make_engine, until

from asyncengine import stream
from asyncengine.engine.snapshot import prefix_runs
from asyncengine.stats import PrefixRun


async def test_every_request_is_listed_with_what_it_waits_for() -> None:
    async with make_engine(max_num_seqs=2) as engine:
        assert engine.requests() == ()
        executor_of(engine).hold()
        params = greedy(50, ignore_eos=True)
        tasks = [asyncio.create_task(engine.generate([2, 3, 4 + i], params, request_id=f"r{i}")) for i in range(3)]
        await until(lambda: len(engine.requests()) == 3 and engine.stats().requests["running"] == 2)
        first, second, third = engine.requests()
        assert [each.request_id for each in (first, second, third)] == ["r0", "r1", "r2"]
        assert (first.state, first.waits_for, second.state) == ("running", "", "running")
        assert (third.state, third.waits_for) == ("waiting", "a place: 2 requests run")
        assert (first.prompt_tokens, first.max_tokens, first.output_tokens, first.preemptions) == (3, 50, 0, 0)
        assert first.age >= second.age >= third.age >= 0
        executor_of(engine).release()
        await asyncio.gather(*tasks)
        assert engine.requests() == ()


async def test_pages_a_pause_and_a_reader_are_told_as_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "UNREAD", 8)
    async with make_engine(pages=8, page_size=4) as engine:
        slow = engine.stream([2, 3], greedy(12, ignore_eos=True))
        await anext(slow)
        await until(lambda: [each.state for each in engine.requests()] == ["suspended"])
        assert engine.requests()[0].waits_for.startswith("its reader")
        executor_of(engine).hold()
        prompts = list(range(2, 14)), list(range(3, 23))
        big, small = (asyncio.create_task(engine.generate(each, greedy(8, ignore_eos=True))) for each in prompts)
        await until(lambda: len(engine.requests()) == 3 and engine.stats().requests["running"] == 1)
        assert engine.requests()[2].waits_for == "pages: it needs up to 5 of 7"
        executor_of(engine).release()
        await asyncio.gather(big, small)
        await engine.pause(mode="keep")
        held = asyncio.create_task(engine.generate([2, 3], greedy(2)))
        await until(lambda: len(engine.requests()) == 2)
        assert engine.requests()[1].waits_for == "the end of a pause, or other weights"
        slow.abort()
        await engine.resume()
        await held


async def test_the_prefix_cache_is_told_as_a_tree_of_runs() -> None:
    async with make_engine(pages=64, page_size=4) as engine:
        assert engine.prefix_tree() == ()
        trunk = list(range(2, 14))  # three pages
        for end in ([20] * 8, [21] * 12):
            await engine.generate([*trunk, *end, 30], greedy(1))
        await idle(engine)
        root, shared, *ends = engine.prefix_tree()
        assert (root.parent, root.pages) == (-1, 0)
        assert (shared.parent, shared.pages, shared.users) == (0, 3, 0)
        assert shared.hits >= 1
        assert sorted((each.parent, each.pages) for each in ends) == [(1, 2), (1, 3)]
        assert sum(run.pages for run in engine.prefix_tree()) == engine.stats().pages.cached
        assert prefix_runs(engine.core.loop, 2) == (root, shared)
        assert all(isinstance(run, PrefixRun) for run in engine.prefix_tree(1))
