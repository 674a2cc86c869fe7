"""Activated LoRA: from the last place of its invocation tokens on a request's adapter acts as peft has it, and what is
before is the base model's, found by all in the prefix cache."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drive import greedy_reference
from support.lora_zoo import quiet, random_prompts
from support.tiny_models import make_checkpoint, make_model

from asyncengine import AsyncEngine

from .lora_engine import assert_given_back, greedy

pytest.importorskip("peft")

WANT = 6
CALLS = {"one": [9, 4], "two": [8, 3, 5], "plain": None}
"""Adapters and their invocation tokens."""
(START,) = random_prompts([45], seed=2)
PROMPTS = {
    "at the end": [*START, 9, 4], "twice": [*START[:20], 9, 4, *START[20:], 9, 4, 6, *START[:21]],
    "first of all": [9, 4, *START], "of the other": [*START, 8, 3, 5, 7], "none": [*START, 9, 5],
}  # fmt: skip


class Activated:
    """Adapters on disk, and peft's own answers with them."""

    def __init__(self, family: str, folder: Path) -> None:
        import peft

        self.model = make_checkpoint(family, folder / "model")
        self.family = family
        self.paths = {name: folder / name for name in CALLS}
        self.wrapped: dict[str, Any] = {}
        for seed, (name, tokens) in enumerate(CALLS.items()):
            config = peft.LoraConfig(
                task_type="CAUSAL_LM", r=4, lora_alpha=8, alora_invocation_tokens=tokens,
                target_modules=r".*\.(q_proj|v_proj|o_proj|in_proj_qkv|up_proj|down_proj)",
            )  # fmt: skip
            with quiet():
                wrapped = peft.get_peft_model(make_model(family), config)
                generator = torch.Generator().manual_seed(seed)
                with torch.no_grad():
                    for part, parameter in wrapped.named_parameters():
                        if "lora_" in part:
                            size = 0.2 if "lora_B" in part else parameter.shape[-1] ** -0.5
                            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
                wrapped.save_pretrained(self.paths[name])
            self.wrapped[name] = wrapped.eval()

    def answer(self, name: str | None, prompt: list[int]) -> list[int]:
        if name is None:
            return greedy_reference(make_model(self.family), prompt, WANT)
        begin = start_of(CALLS[name], prompt)
        if CALLS[name] is None:
            return greedy_reference(self.wrapped[name].base_model.model, prompt, WANT)
        tokens = list(prompt)
        for _ in range(WANT):
            offset = None if begin is None else len(tokens) - begin
            with torch.inference_mode():
                logits = self.wrapped[name](torch.tensor([tokens]), alora_offsets=[offset], use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]


def start_of(call: list[int] | None, prompt: list[int]) -> int | None:
    places = range(len(prompt))
    return max((at for at in places if call and prompt[at : at + len(call)] == call), default=None)


@pytest.fixture(scope="module", params=["llama", "qwen3.5"])
def activated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Activated:
    """The second keeps recurrent states beside keys and values."""
    return Activated(request.param, tmp_path_factory.mktemp("alora"))


def load(activated: Activated, **settings: Any) -> Any:
    settings = {"kv_cache_memory": "4MB", "max_loras": 3, "adapters": activated.paths, **settings}
    return AsyncEngine.from_pretrained(activated.model, dtype="float32", num_threads=1, **settings)


SETTINGS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "chunks of 7, 1 slot, preempted": {"max_num_batched_tokens": 7, "max_loras": 1, "preempt_every": 5},
    "no cache": {"prefix_caching": False},
}


@pytest.mark.parametrize("title", SETTINGS)
async def test_mixed_with_others_it_answers_as_peft(title: str, activated: Activated) -> None:
    jobs = [(name, prompt) for prompt in PROMPTS.values() for name in (None, *CALLS)]
    expected = [activated.answer(name, prompt) for name, prompt in jobs]
    assert len({str(tokens) for tokens in expected}) > 12, "equality means something"
    async with await load(activated, **SETTINGS[title]) as engine:
        for _ in range(2):
            calls = (engine.generate(prompt, greedy(WANT), adapter=name) for name, prompt in jobs)
            assert [made.token_ids for made in await asyncio.gather(*calls)] == expected
        assert (engine.stats().preemptions > 0) == ("preempted" in title)
        await assert_given_back(engine)


@pytest.mark.parametrize("activated", ["llama"], indirect=True)
async def test_what_is_before_is_the_base_models_and_what_is_behind_its_own(activated: Activated) -> None:
    """The adapter finds what the base model has computed, and the other way round; pages behind the invocation are
    found by the same adapter alone."""
    prompt = [*START[:34], 9, 4, *START[:30]]
    async with await load(activated) as engine:

        async def cached(name: str | None, tokens: list[int]) -> int:
            made = await engine.generate(tokens, greedy(WANT), adapter=name)
            assert made.token_ids == activated.answer(name, tokens), name
            return made.usage.cached_tokens

        assert await cached("one", prompt) == 0
        assert await cached(None, prompt) == 32, "pages before the invocation"
        assert await cached("one", prompt) == 64
        assert await cached("two", prompt) == 64, "has no invocation here: all is the base model's"
        assert await cached("plain", prompt) == 0, "an adapter that acts everywhere shares nothing"
        assert await cached("two", [*prompt[:34], 8, 3, 5, *prompt[34:]]) == 32
        await assert_given_back(engine)


@pytest.mark.parametrize("activated", ["llama"], indirect=True)
async def test_a_pinned_prefix_is_the_part_before(activated: Activated) -> None:
    prompt = [*START[:34], 9, 4, *START[:30]]
    async with await load(activated) as engine:
        async with engine.pin(prompt, adapter="one"):
            await engine.reset_prefix_cache()
            for name, cached in ((None, 32), ("one", 32)):
                made = await engine.generate(prompt, greedy(WANT), adapter=name)
                assert (made.token_ids, made.usage.cached_tokens) == (activated.answer(name, prompt), cached)
        await engine.generate(prompt, greedy(1))  # it is unpinned by then
        await assert_given_back(engine)
