"""Engines whose layers are shared or divided, for each norm and attention backend: tokens and log-probabilities of one
process. The other ranks are threads here; `test_processes.py` has processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.drive import prompts
from support.rank_threads import start_as_thread
from support.tiny_models import VOCAB

pytest.importorskip("numba")

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.execution.device import shared_gather
from asyncengine.execution.runner import ranks

pytestmark = pytest.mark.skipif(shared_gather.missing() is not None, reason=str(shared_gather.missing()))
NORMS = {
    "RMS": "qwen3", "RMS of heads": "olmo2", "layer": "gpt2", "layer, of two branches": "cohere",
    "layer, of heads": "stablelm, norms of heads", "layer, behind": "opt-350m",
    "layer, two beside each other": "falcon-40b", "layer, of embeddings": "bloom",
}  # fmt: skip
BACKENDS = [
    ("compiled", "float32", ("tensor_parallel", "pipeline_parallel")),
    ("torch", "float32", ("tensor_parallel", "pipeline_parallel")),
    ("torch", "float16", ("pipeline_parallel",)),
]
"""Attention backends, types, and the settings that divide a model there: float16 cannot be split by heads."""
PROMPTS = prompts([3, 30, 21, 40], VOCAB)
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=True)


async def scores(path: str, **settings: Any) -> list[Any]:
    """Tokens and log-probabilities of some requests, and of the same ones again in pages that others have left: at once
    where company changes no bit, or one by one."""
    given = {"num_threads": 2, "page_size": 4, "max_num_batched_tokens": 24, "kv_cache_memory": "1MiB", **settings}
    async with await AsyncEngine.from_pretrained(path, show_progress=False, **given) as engine:
        at_once = asyncio.Semaphore(1 if engine.info.batch_variance else len(PROMPTS))

        async def ask(prompt: list[int], salt: str) -> Any:
            async with at_once:
                answer = await engine.generate(prompt, PARAMS, cache_salt=salt)
            return answer.token_ids, answer.logprobs

        return [await asyncio.gather(*(ask(prompt, salt) for prompt in PROMPTS)) for salt in ("a", "b")]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("backend", "dtype", "splits"), BACKENDS)
async def test_answers_are_those_of_one_process(
    norm: str, backend: str, dtype: str, splits: Any, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_start", start_as_thread)
    path, settings = str(checkpoint(NORMS[norm])), {"attention_backend": backend, "dtype": dtype}
    expected = await scores(path, **settings)
    for split in splits:
        assert await scores(path, **settings, **{split: 2}) == expected, split
