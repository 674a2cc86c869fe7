"""`reset_prefix_cache`: what goes, what stays, and that no token changes."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_engine import CACHE_KINDS, Steps, executor_of, greedy, idle, make_engine, oracle, until

from asyncengine import AsyncEngine, EngineClosed, EngineGroup, InvalidParameter, PrefixCacheReset
from asyncengine.scheduler.messages import ResetPrefixCache
from asyncengine.testing import assert_nothing_held

PROMPT = list(range(2, 30))


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_all_goes_but_what_a_request_uses(kind: str):
    """Between steps with a request in the midst of its answer; the next one of each prompt computes what has gone."""
    steps = Steps(max_steps_in_flight=2, **CACHE_KINDS[kind])
    steps.add(PROMPT, 4)
    steps.run()
    cached = steps.kv.counts([]).cached
    assert cached > 5
    other = steps.add([50, *PROMPT], 30)
    for _ in range(9):
        steps.step()
    used = steps.kv.counts([steps.request(other).table]).shared
    steps.apply(ResetPrefixCache(1))
    assert steps.scheduler.last_reset.dropped >= cached
    assert steps.scheduler.last_reset.in_use == used > 0
    assert steps.kv.counts([steps.request(other).table]).cached == 0
    assert steps.kv.peek(("", ""), PROMPT, len(PROMPT)) == 0
    steps.add(PROMPT, 4)
    steps.add([50, *PROMPT], 9)
    steps.run()
    steps.assert_right()
    steps.assert_empty()
    assert steps.kv.peek(("", ""), [50, *PROMPT], len(PROMPT)) > 0, "what ran on is cached"
    steps.apply(ResetPrefixCache(2))
    counts, states = steps.kv.counts([]), steps.kv.state_counts([])
    assert (counts.free, states.free) == (counts.total, states.total)
    assert steps.kv.window_counts([]).cached == 0
    assert not any(group.tree.roots for group in steps.kv.groups)


def test_one_salt_of_every_adapter():
    steps = Steps()
    for namespace in (("", ""), ("", "tenant"), ("A", ""), ("A", "tenant")):
        table = steps.kv.open(namespace, PROMPT, len(PROMPT) - 1)
        assert steps.kv.grow(table, len(PROMPT))
        steps.kv.publish(table, PROMPT, len(PROMPT), 0)
        steps.kv.close(table, 0)
    steps.apply(ResetPrefixCache(1, "tenant"))
    assert sorted(steps.kv.tree.roots) == [("", ""), ("A", "")]
    steps.apply(ResetPrefixCache(2, ""))
    assert not steps.kv.tree.roots
    steps.apply(ResetPrefixCache(3, "unknown"))
    assert steps.scheduler.last_reset == (0, 0)


async def test_an_engine_runs_on_and_computes_again():
    async with make_engine() as engine:
        async with engine.pin(PROMPT):
            pinned = await engine.reset_prefix_cache()
            assert pinned == PrefixCacheReset(0, len(PROMPT) // 4)
        executor_of(engine).hold(after=5)
        running = asyncio.create_task(engine.generate(PROMPT, greedy(40)))
        await until(executor_of(engine).entered.is_set)
        asked = asyncio.create_task(engine.reset_prefix_cache("other"))
        executor_of(engine).release()
        assert await asked == (0, 0)
        assert (await running).token_ids == oracle(engine, PROMPT, 40)
        await idle(engine)
        dropped = await engine.reset_prefix_cache()
        assert dropped.dropped >= len(PROMPT) // 4
        assert not dropped.in_use
        again = await engine.generate(PROMPT, greedy(40))
        assert (again.token_ids, again.usage.cached_tokens) == (oracle(engine, PROMPT, 40), 0)
        await idle(engine)
        assert_nothing_held(engine.core)


async def test_every_way_out():
    engine = make_engine()
    await engine.start()
    with pytest.raises(InvalidParameter, match="namespace"):
        await engine.reset_prefix_cache(7)  # type: ignore[arg-type]
    await engine.pause()
    assert await engine.reset_prefix_cache() == (0, 0)  # asleep, too
    await engine.resume()
    executor_of(engine).hold()
    left = asyncio.create_task(engine.generate(PROMPT, greedy(40)))
    await until(executor_of(engine).entered.is_set)
    waiting = [asyncio.create_task(engine.reset_prefix_cache()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)
    executor_of(engine).release()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(ends[0], asyncio.CancelledError)
    assert isinstance(ends[1], PrefixCacheReset | EngineClosed)
    await closing
    await asyncio.gather(left, return_exceptions=True)
    with pytest.raises(EngineClosed):
        await engine.reset_prefix_cache()


async def test_a_group_says_it_of_each():
    engines: dict[str, AsyncEngine] = {}
    for name in ("one", "two"):
        engines[name] = make_engine()
        await engines[name].start()
        await engines[name].generate(PROMPT, greedy(4))
    async with EngineGroup(engines) as group:
        some = await group.reset_prefix_cache(model="one")
        assert list(some) == ["one"]
        assert some["one"].dropped
        assert (await group.reset_prefix_cache()) == {"one": (0, 0), "two": some["one"]}
