"""Models all of whose layers have windows, through the whole engine: pages are given back, and nobody can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import VOCAB, WINDOW, make_checkpoint

from asyncengine import AsyncEngine, SamplingParams

NEW = 200
PROMPT = [3 + (7 * place) % (VOCAB - 3) for place in range(90)]


def longer_answer(path: Path) -> list[int]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("backend", ["compiled", "torch"])
@pytest.mark.parametrize("family", ["mistral", "starcoder2"])
async def test_an_answer_longer_than_the_pool_equals_transformers(family: str, backend: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path / family)
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


async def test_one_layer_that_sees_everything_keeps_the_pages(tmp_path: Path) -> None:
    path = make_checkpoint("gemma3", tmp_path / "gemma3")
    async with await AsyncEngine.from_pretrained(path, dtype="float32", kv_cache_memory="1MB", num_threads=1) as engine:
        assert engine.info.window is None
        most = 0
        async for _ in engine.stream(PROMPT, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)):
            pages = engine.stats().pages
            most = max(most, pages.held + pages.shared)
        assert most == -(-(len(PROMPT) + 40 - 1) // 16)
