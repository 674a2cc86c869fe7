"""Models with windows in all layers or in some, through the whole engine: pages are given back, and nobody can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drive import greedy_reference
from support.tiny_models import VOCAB, WINDOW, make_checkpoint

from asyncengine import AsyncEngine, SamplingParams

NEW = 200
PROMPT = [3 + (7 * place) % (VOCAB - 3) for place in range(90)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make_checkpoint(family, tmp_path_factory.mktemp(family)))


@cache
def longer_answer(path: Path, length: int = len(PROMPT), most: int = NEW) -> list[int]:
    """Tokens that transformers writes behind the first `length` of `PROMPT`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return greedy_reference(model, PROMPT[:length], most, model.config.eos_token_id)


@pytest.mark.parametrize(("family", "backend"), [("mistral", "compiled"), ("starcoder2", "torch")])
async def test_an_answer_longer_than_the_pool_equals_transformers(
    family: str, backend: str, checkpoint: Callable[[str], Path]
) -> None:
    path = checkpoint(family)
    settings: dict[str, Any] = {"kv_cache_memory": "110KB", "max_num_batched_tokens": 40, "num_threads": 1}
    async with await AsyncEngine.from_pretrained(
        path, dtype="float32", attention_backend=backend, **settings
    ) as engine:
        info = engine.info
        assert info.window == WINDOW
        assert (info.num_pages - 1) * info.page_size < len(PROMPT) + NEW / 2
        tokens, most = [], 0
        async for token in engine.stream(PROMPT, SamplingParams(max_tokens=NEW, temperature=0)):
            tokens += token.token_ids
            pages = engine.stats().pages
            most = max(most, pages.held + pages.shared + pages.retiring)
        assert tokens == longer_answer(path)
        assert most <= 5
        assert engine.stats().preemptions == 0


async def greedy(engine: AsyncEngine, prompt: list[int], most: int) -> list[int]:
    return list((await engine.generate(prompt, SamplingParams(max_tokens=most, temperature=0))).token_ids)


@pytest.mark.parametrize(
    ("family", "backend", "chunk", "settings"),
    [
        ("gemma3", "compiled", 1, {"prefix_caching": False}),
        ("gpt-oss", "compiled", 7, {"preempt_every": 17}),
        ("gemma3", "torch", 96, {}),
        ("llama4", "compiled", 96, {"max_steps_in_flight": 2, "preempt_every": 17, "prefix_caching": False}),
    ],
)
async def test_layers_with_windows_beside_others_have_pages_of_their_own(
    family: str, backend: str, chunk: int, settings: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    """Window pages for a request or two suffice: alone, from the cache, in a batch, in any chunks, preempted."""
    path = checkpoint(family)
    settings = {"max_num_batched_tokens": chunk, "max_num_seqs": 4, "kv_cache_memory": "400KB", **settings}
    right = {length: longer_answer(path, length, 28) for length in (len(PROMPT), 73)}
    async with await AsyncEngine.from_pretrained(
        path, dtype="float32", attention_backend=backend, num_threads=1, **settings
    ) as engine:
        info, most = engine.info, 0
        assert (info.one_pool, info.window) == (None, None)
        assert info.num_window_pages < info.num_pages
        assert await greedy(engine, PROMPT, 28) == right[len(PROMPT)]
        assert await greedy(engine, PROMPT, 28) == right[len(PROMPT)]
        prompts = [PROMPT, PROMPT[:73]] * 3
        answers = await asyncio.gather(*(greedy(engine, each, 28) for each in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == right[len(prompt)]
        async for _ in engine.stream(PROMPT, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)):
            near, pages = engine.stats().window_pages, engine.stats().pages
            most = max(most, near.held + near.shared) if pages.held + pages.shared > 8 else most
        stats = engine.stats()
        if "preempt_every" not in settings:  # whose tokens are computed again at once
            # the window of 24 tokens begins and ends anywhere, and one page is written; all of the prompt's at first
            assert 0 < most <= 4 + 6 * (chunk > 90)
        assert stats.hit_rate > 0 or not settings.get("prefix_caching", True)
        assert stats.preemptions or "preempt_every" not in settings


async def test_one_pool_says_why(checkpoint: Callable[[str], Path]) -> None:
    async with await AsyncEngine.from_pretrained(
        checkpoint("gemma3"), dtype="float32", kv_cache_memory="8MB", num_threads=1, max_num_seqs=2
    ) as engine:
        assert engine.info.window is None
        assert engine.info.num_window_pages == 0
        assert engine.info.one_pool == "the KV cache holds no more in two pools"
        most = 0
        async for _ in engine.stream(PROMPT, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)):
            pages = engine.stats().pages
            most = max(most, pages.held + pages.shared)
        assert most == -(-(len(PROMPT) + 40 - 1) // 16)
        assert engine.stats().window_pages.total == 0
