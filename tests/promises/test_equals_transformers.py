"""The whole engine against transformers' `generate`: same tokens, whatever the schedule (contract lines 4 and 5)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data import cases_of
from support.drive import greedy_reference
from support.forwards import transformers_logits
from support.long import LONG
from support.tiny_models import FAMILIES, VOCAB, make_checkpoint

from asyncengine import AsyncEngine, SamplingParams

NEW_TOKENS = 12
EOS = 2

SETTINGS: dict[str, dict[str, Any]] = cases_of(__file__)


ONE_OF_EACH = ("llama", "gemma3", "gpt-oss", "llama4", "mixtral", "qwen3.5", "mamba2", "kimi-linear", "deepseek-v3")
"""Families whose schedules differ: dense, with windows, sinks, chunks, experts, states beside attention and alone,
and latent pages. Each goes through two of the settings. What else families differ in is compared by
tests/execution/runner/test_families.py, for all chunk sizes; the long form runs them through whole engines as well,
preempted."""
OTHERS = "chunks of 16, cache on, preempted"


def prompts() -> list[list[int]]:
    """Different lengths over page borders and windows; two share their first two pages."""
    rng = random.Random(4)
    made = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 15, 16, 37)]
    made.append(made[3][:33] + [rng.randrange(3, VOCAB) for _ in range(4)])
    return made


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("families")

    @cache
    def checkpoint(family: str) -> Path:
        return make_checkpoint(family, root / family, sharded=family in ("llama", "qwen3"))

    return checkpoint


@pytest.fixture(scope="session")
def references(checkpoints: Any) -> Any:
    """Greedy continuations by `generate`, each prompt alone."""

    @cache
    def reference(family: str) -> list[list[int]]:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints(family), dtype=torch.float32).eval()
        return [greedy_reference(model, prompt, NEW_TOKENS, EOS) for prompt in prompts()]

    return reference


async def answers(engine: AsyncEngine, params: SamplingParams, alone: bool = False) -> list[list[int]]:
    if alone:
        return [(await engine.generate(prompt, params)).token_ids for prompt in prompts()]
    made = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts()))
    return [completion.token_ids for completion in made]


def engine(path: Path, **settings: Any) -> Any:
    return AsyncEngine.from_pretrained(path, dtype="float32", kv_cache_memory="8MB", num_threads=1, **settings)


@pytest.mark.parametrize("family", FAMILIES if LONG else ONE_OF_EACH)
async def test_greedy_equals_generate(family: str, checkpoints: Any, references: Any) -> None:
    """Prompts run alone and batched; in chunks of 1, 7, 16 and unlimited; with cache on and off; preempted; with two
    steps in flight. Families that bring nothing of their own to the schedule run once, preempted."""
    expected = references(family)
    assert len({tuple(tokens) for tokens in expected}) > 1
    assert max(len(set(tokens)) for tokens in expected) > 4  # they wander: equality means something
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    names = [*SETTINGS] if LONG else [*SETTINGS, *SETTINGS][ONE_OF_EACH.index(family) % 4 :][:2]
    for name in names if family in ONE_OF_EACH else [OTHERS]:
        async with await engine(checkpoints(family), **SETTINGS[name]) as running:
            assert await answers(running, greedy) == expected, name
            if name.startswith("unlimited"):
                assert await answers(running, greedy, alone=True) == expected, "alone"
            stats = running.stats()
            assert stats.preemptions > 0 or "preempted" not in name
            assert stats.cached_tokens > 0 or "cache on" not in name


@pytest.mark.parametrize("family", ["gemma2", "mixtral"] if LONG else ["mixtral"])
async def test_a_seed_gives_the_same_sample_in_any_batch(family: str, checkpoints: Any) -> None:
    """20 trials in batches of 1 to 64, chunked, cached, preempted: one distinct output (contract line 5)."""
    params = SamplingParams(
        max_tokens=12, temperature=0.9, top_p=0.95, top_k=40, seed=1234, repetition_penalty=1.1, ignore_eos=True
    )
    prompt = prompts()[3]
    outputs: list[Sequence[int]] = []
    crowd = [[5 + index % 90, *prompt[index % 7 : 20]] for index in range(63)]
    for settings in ({}, {"max_num_batched_tokens": 9, "preempt_every": 6}):
        async with await engine(checkpoints(family), max_num_seqs=64 if not settings else 8, **settings) as running:
            for size in (0, 1, 2, 5, 15, 31, 63, 0, 1, 7):
                others = [
                    running.generate(other, SamplingParams(max_tokens=9, temperature=1.0, seed=index))
                    for index, other in enumerate(crowd[: size if not settings else min(size, 15)])
                ]
                made, *_ = await asyncio.gather(running.generate(prompt, params), *others)
                outputs.append(tuple(made.token_ids))
    assert len(outputs) == 20
    assert len(set(outputs)) == 1
    assert len(set(outputs[0])) > 3


async def test_preemption_changes_no_logprob(checkpoints: Any) -> None:
    """Tokens and log-probabilities with and without preemption (contract line 4)."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, top_logprobs=3)
    found = []
    for preempt_every in (None, 4):
        async with await engine(checkpoints("qwen3"), preempt_every=preempt_every) as running:
            made = await asyncio.gather(*(running.generate(prompt, params) for prompt in prompts()))
            assert (running.stats().preemptions > 0) == (preempt_every is not None)
        found.append(made)
    for one, two in zip(*found, strict=True):
        assert one.token_ids == two.token_ids
        assert [e.logprob for e in one.logprobs] == pytest.approx([e.logprob for e in two.logprobs], abs=2e-5)
        assert [[t.token_id for t in e.top] for e in one.logprobs] == [
            [t.token_id for t in e.top] for e in two.logprobs
        ]


async def test_prompt_logprobs_equal_the_models(checkpoints: Any) -> None:
    """Chunked and preempted, against a plain forward of the prompt."""
    import transformers

    path = checkpoints("llama")
    prompt = prompts()[3]
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected = transformers_logits(model, prompt).log_softmax(-1)
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=True)
    async with await engine(path, max_num_batched_tokens=7, preempt_every=3) as running:
        await running.generate(prompt, SamplingParams(max_tokens=1))  # cached now: must not matter
        made = await running.generate(prompt, params)
    assert made.prompt_logprobs is not None
    assert made.prompt_logprobs[0] is None
    for position, entry in enumerate(made.prompt_logprobs[1:], 1):
        assert entry is not None
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=2e-5)
