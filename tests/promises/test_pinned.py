"""Pinned prefixes: they outlive what others compute, are bounded, and go where they would be in somebody's way."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import VOCAB, make_checkpoint

from asyncengine import AsyncEngine, InvalidParameter, SamplingParams

PAGE = 16
PARAMS = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "show_progress": False, "page_size": PAGE, "kv_cache_memory": "512KiB",
    "max_num_seqs": 2, "check_every": 1,
}  # fmt: skip


def prompt(seed: int, length: int) -> list[int]:
    return [3 + (seed * 31 + (7 + seed) * place) % (VOCAB - 3) for place in range(length)]


async def load(path: Path, **settings: Any) -> AsyncEngine:
    return await AsyncEngine.from_pretrained(path, **{**SETTINGS, **settings})


def capacity(engine: AsyncEngine) -> int:
    """Tokens that the cache holds."""
    return engine.stats().pages.total * PAGE


async def crowd(engine: AsyncEngine) -> None:
    """Compute more other tokens than the cache holds."""
    length = min(engine.info.max_model_len - 4, capacity(engine) // 3)
    for seed in range(1, 3 + capacity(engine) // length * 2):
        await engine.generate(prompt(seed, length), PARAMS)


async def cached(engine: AsyncEngine, tokens: list[int]) -> int:
    return (await engine.generate([*tokens, 5, 6], PARAMS)).usage.cached_tokens


def check(engine: AsyncEngine) -> None:
    engine.core.loop.scheduler.check()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-oss", "qwen3.5", "falcon-h1"])
async def test_a_pinned_prefix_outlives_what_others_compute(family: str, tmp_path: Path) -> None:
    async with await load(make_checkpoint(family, tmp_path)) as engine:
        mine = prompt(0, 5 * PAGE)
        async with engine.pin(mine) as tokens:
            assert tokens == len(mine)
            await crowd(engine)
            check(engine)
            assert await cached(engine, mine) >= 4 * PAGE
        await crowd(engine)
        assert await cached(engine, mine) == 0
        assert engine.stats().pages.shared == 0
        check(engine)


async def test_more_than_half_of_the_cache_is_refused_by_name(tmp_path: Path) -> None:
    async with await load(make_checkpoint("qwen3", tmp_path)) as engine:
        half = engine.stats().pages.total // 2 * PAGE
        with pytest.raises(InvalidParameter, match=f"prefix: has .* at most half of the KV cache: {half} tokens"):
            async with engine.pin(prompt(0, half + PAGE)):
                pass
        async with engine.pin(prompt(0, half - 2 * PAGE)), engine.pin(prompt(1, 2 * PAGE)):
            with pytest.raises(InvalidParameter, match=f"of which {half} are taken"):
                async with engine.pin(prompt(2, PAGE)):
                    pass
        async with engine.pin(prompt(2, PAGE)):
            pass
    async with await load(tmp_path, prefix_caching=False) as engine:
        with pytest.raises(InvalidParameter, match="pin: needs prefix_caching"):
            async with engine.pin(prompt(0, PAGE)):
                pass


async def test_a_request_that_needs_the_room_gets_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with await load(make_checkpoint("qwen3", tmp_path)) as engine:
        half = engine.stats().pages.total // 2 * PAGE
        longest = min(capacity(engine), engine.info.max_model_len)
        assert longest > capacity(engine) - half, "the test needs a request that does not fit beside the pin"
        async with engine.pin(prompt(0, half)):
            await engine.generate(prompt(1, longest - 4), PARAMS)
            assert "a request needs their pages" in caplog.text
            # One that grows beyond what is left, too.
        async with engine.pin(prompt(0, half)):
            answer = await engine.generate(
                prompt(2, PAGE), SamplingParams(max_tokens=longest - 2 * PAGE, temperature=0, ignore_eos=True)
            )
            assert answer.finish_reason == "length"
        check(engine)


async def test_other_weights_drop_what_is_pinned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    async with await load(path) as engine:
        mine = prompt(0, 4 * PAGE)
        async with engine.pin(mine):
            with caplog.at_level(logging.WARNING, "asyncengine"):
                await engine.update_weights(path)
            assert "1 pinned prefixes are not pinned any more: the cache was emptied" in caplog.text
            assert engine.stats().pages.shared == 0
        assert await cached(engine, mine) == 0
        check(engine)


async def test_closing_ends_a_pin(tmp_path: Path) -> None:
    engine = await load(make_checkpoint("qwen3", tmp_path))
    async with engine.pin(prompt(0, 4 * PAGE)):
        await engine.aclose(drain=True)
    assert not engine.alive


async def test_a_chat_is_pinned_up_to_where_it_may_go_on() -> None:
    system = [{"role": "system", "content": "You answer in one word. " * 12}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
        async with engine.pin(system, tools=tools) as tokens:
            answer = await engine.chat([*system, {"role": "user", "content": "Hi"}], PARAMS, tools=tools)
            assert answer.usage.cached_tokens == tokens // 16 * 16 > 0
        with pytest.raises(InvalidParameter, match="tools"):
            async with engine.pin("a text", tools=tools):
                pass
