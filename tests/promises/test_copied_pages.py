"""Samples of a prompt that begin with a copy of its last page are, to the bit, those that compute it themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncengine import AsyncEngine, SamplingParams

PARAMS = SamplingParams(n=5, max_tokens=20, temperature=1.0, seed=3, ignore_eos=True, logprobs=True, top_logprobs=3)
WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {}, "float32": {"dtype": "float32"},
    "int4": {"quantization": "int4"}, "no cache": {"prefix_caching": False}, "chunks": {"max_num_batched_tokens": 32},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [61, 64, 65, 71])
async def test_samples_are_those_of_forks(way: str, length: int) -> None:
    """Forks are requests of their own, each of which computes what its pages lack."""
    prompt = [5 + (7919 * place + length) % 900 for place in range(length)]
    settings = {"max_num_seqs": 8, "speculation": "off", "show_progress": False, **WAYS[way]}
    async with await AsyncEngine.from_pretrained("demo", **settings) as engine:
        whole = await engine.generate(prompt, PARAMS)
        decoded = whole.usage.completion_tokens - 5
        assert engine.stats().computed_tokens - decoded == length + 4
        forks = await asyncio.gather(*(each.result() for each in engine.fork(prompt, 5, PARAMS.replace(n=1))))
    assert [sample.token_ids for sample in whole.samples] == [fork.token_ids for fork in forks]
    assert [sample.logprobs for sample in whole.samples] == [fork.logprobs for fork in forks]
