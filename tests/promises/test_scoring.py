"""`max_tokens=0` with `prompt_logprobs`: a prompt is scored, as evaluation harnesses need, and nothing is generated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worded_model import Reference, make_worded_model

from asyncengine import AsyncEngine, Completion, Engine, SamplingParams
from asyncengine.errors import ContextLengthExceeded, InvalidParameter

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=True, top_logprobs=2)
CONTEXT = 64
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 12], [400], list(range(100, 100 + CONTEXT))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_worded_model(tmp_path_factory.mktemp("scoring") / "model")


@pytest.fixture(scope="module", params=[1, 2], ids=["one step in flight", "two"])
def engine(folder: Path, request: Any) -> Iterator[AsyncEngine]:
    settings = {"kv_cache_memory": "8MiB", "page_size": 4, "max_model_len": CONTEXT, "max_num_batched_tokens": 16}
    with Engine.from_pretrained(folder, fuse=False, max_steps_in_flight=request.param, **settings) as engine:
        yield engine.aengine


async def test_scores_are_the_models_own_and_nothing_is_generated(engine: AsyncEngine, folder: Path) -> None:
    """Requests that generate run beside, twice: the second time the prompts are in the prefix cache."""
    reference, before = Reference(folder), engine.stats().generated_tokens
    wanted = [torch.log_softmax(reference.logits(prompt), dim=-1) for prompt in PROMPTS]
    for _ in range(2):
        others = [engine.generate([5, 6, 7], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))]
        found = await asyncio.gather(*(engine.generate(prompt, SCORE) for prompt in PROMPTS), *others)
        assert len(found[-1].token_ids) == 9
        for prompt, scores, done in zip(PROMPTS, wanted, found, strict=False):
            assert (done.finish_reason, done.token_ids, done.text) == ("length", [], "")
            assert done.usage.completion_tokens == 0
            assert done.prompt_logprobs is not None
            assert len(done.prompt_logprobs) == len(prompt)
            assert done.prompt_logprobs[0] is None
            for position, entry in enumerate(done.prompt_logprobs[1:], 1):
                assert entry is not None
                assert entry.token_id == prompt[position]
                assert entry.logprob == pytest.approx(float(scores[position - 1, prompt[position]]), abs=1e-3)
                assert len(entry.top) == 2
    assert engine.stats().generated_tokens - before == 18


@pytest.mark.parametrize("start", [1, 2, 4, 5, 7])
async def test_scores_from_a_position_on_use_the_cached_prefix(engine: AsyncEngine, start: int) -> None:
    """The same scores, in chunks too; what lies before them is not computed again."""

    def values(done: Completion) -> list[tuple[int, Any] | None]:
        return [
            None if entry is None else (entry.token_id, pytest.approx(entry.logprob, abs=1e-3))
            for entry in done.prompt_logprobs or ()
        ]

    prompt = PROMPTS[3] if start > 5 else PROMPTS[0]
    start = len(prompt) - start if prompt is PROMPTS[3] else start
    whole = values(await engine.generate(prompt, SCORE))
    done = await engine.generate(prompt, SCORE.replace(prompt_logprobs_start=start))
    assert values(done) == [None] * start + whole[start:]
    assert done.usage.cached_tokens == (start - 1) // 4 * 4
    fresh = await engine.generate(prompt, SCORE.replace(prompt_logprobs_start=start), cache_salt=f"{start}")
    assert fresh.usage.cached_tokens == 0
    assert values(fresh) == values(done)
    nothing = await engine.generate(prompt, SamplingParams(prompt_logprobs_start=len(prompt), max_tokens=0))
    assert nothing.prompt_logprobs == [None] * len(prompt)
    several = await engine.generate(
        prompt[:6], SamplingParams(prompt_logprobs_start=2, n=3, max_tokens=2, temperature=1.0)
    )
    assert several.prompt_logprobs is not None
    assert [entry is None for entry in several.prompt_logprobs] == [True, True, False, False, False, False]
    with pytest.raises(InvalidParameter) as refused:
        await engine.generate(prompt, SCORE.replace(prompt_logprobs_start=len(prompt) + 1))
    assert refused.value.field == "prompt_logprobs_start"


async def test_a_stream_of_a_score_is_one_chunk(engine: AsyncEngine) -> None:
    async with engine.stream(PROMPTS[0], SCORE) as stream:
        chunks = [chunk async for chunk in stream]
    assert [chunk.finish_reason for chunk in chunks] == ["length"]
    assert not chunks[0].token_ids


async def test_limits(engine: AsyncEngine) -> None:
    for values, field in (
        ({}, "max_tokens"),
        ({"prompt_logprobs": True, "n": 2}, "n"),
        ({"prompt_logprobs": True, "min_tokens": 1}, "min_tokens"),
        ({"prompt_logprobs": True, "grammar": "x"}, "grammar"),
    ):  # fmt: skip
        with pytest.raises(InvalidParameter) as refused:
            SamplingParams(max_tokens=0, **values)
        assert refused.value.field == field
    with pytest.raises(ContextLengthExceeded):
        await engine.generate([5] * (CONTEXT + 1), SCORE)
