"""Samples and forks that begin with a copy of a prompt's last page are, to the bit, those that compute it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import make_checkpoint

from asyncengine import AsyncEngine, SamplingParams

PARAMS = SamplingParams(n=5, max_tokens=20, temperature=1.0, seed=3, ignore_eos=True, logprobs=True, top_logprobs=3)
WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {}, "float32": {"dtype": "float32"},
    "int4": {"quantization": "int4"}, "no cache": {"prefix_caching": False}, "chunks": {"max_num_batched_tokens": 32},
    "int8 pages": {"kv_cache_dtype": "int8", "dtype": "float32"},
    "mistral": {"dtype": "float32"}, "gemma3": {"dtype": "float32"},  # windows in all layers, and in some
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
async def test_samples_and_forks_are_requests_alone(way: str, tmp_path: Path) -> None:
    settings = {"max_num_seqs": 8, "speculation": "off", "show_progress": False, **WAYS[way]}
    model = make_checkpoint(way, tmp_path) if way in ("mistral", "gemma3") else "demo"
    async with await AsyncEngine.from_pretrained(model, **settings) as engine:
        for length in (61, 64, 65, 71):
            prompt = [5 + (7919 * place + length) % 50 for place in range(length)]
            before = engine.stats().computed_tokens
            whole = await engine.generate(prompt, PARAMS)
            decoded = whole.usage.completion_tokens - 5
            assert engine.stats().computed_tokens - before - decoded == length + 4
            alone = [await each.result() for each in engine.fork(prompt, 5, PARAMS.replace(n=1))]  # one after the other
            await engine.reset_prefix_cache()
            before = engine.stats().computed_tokens
            forks = await asyncio.gather(*(each.result() for each in engine.fork(prompt, 5, PARAMS.replace(n=1))))
            if way != "no cache":  # and each fork alone
                assert engine.stats().computed_tokens - before - decoded == length + 4
            for sample, one, fork in zip(whole.samples, alone, forks, strict=True):
                assert sample.token_ids == one.token_ids == fork.token_ids
                assert sample.logprobs == one.logprobs == fork.logprobs
