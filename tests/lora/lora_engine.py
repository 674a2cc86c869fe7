"""Engines on a tiny model with adapters from a `Zoo`, and what must be given back in the end."""

from __future__ import annotations

from typing import Any

from support.adapter_engine import slots_of
from support.fake_engine import idle, until
from support.lora_zoo import MAX_RANK, Zoo

from asyncengine import AdapterInfo, AsyncEngine, SamplingParams
from asyncengine.testing.leaks import assert_nothing_held


def load(zoo: Zoo, **settings: Any) -> Any:
    """`AsyncEngine.from_pretrained`, small, exact and on one thread."""
    settings = {"kv_cache_memory": "4MB", "max_lora_rank": MAX_RANK, **settings}
    return AsyncEngine.from_pretrained(zoo.model, dtype="float32", num_threads=1, **settings)


def greedy(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **changes)


async def ask(engine: AsyncEngine, name: str | None, prompt: list[int]) -> tuple[list[int], int]:
    """Eight tokens, and how many prompt tokens came from the cache."""
    made = await engine.generate(prompt, greedy(), adapter=name)
    return made.token_ids, made.usage.cached_tokens


def info_of(engine: AsyncEngine, name: str) -> AdapterInfo:
    (found,) = [info for info in engine.adapters() if info.name == name]
    return found


async def assert_given_back(engine: AsyncEngine) -> None:
    """No claim, no slot in use, and memory is what is said to be in it."""
    await idle(engine)
    core = engine.core
    registry, slots = core.loop.adapters, slots_of(core)
    assert registry is not None
    await until(lambda: not any(info.requests for info in engine.adapters()))
    assert_nothing_held(core)
    registry.check()
    slots.check()
    assert not slots.in_use
    in_memory = {info.digest: info.nbytes for info in engine.adapters() if info.in_memory}
    assert engine.stats().adapters["nbytes"] == sum(in_memory.values()) <= core.config.adapter_memory
