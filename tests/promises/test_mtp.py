"""A head that predicts further tokens is invisible: the same answers to the bit as without, in fewer steps."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.long import LONG
from support.mtp_models import WIDTH, planted, random_tensors, save
from support.planted_guesses import ALWAYS, plant, some_at_a_time

from asyncengine import AsyncEngine, Engine, SamplingParams
from asyncengine.assembly.wiring import needed_memory
from asyncengine.config import EngineConfig
from asyncengine.demo import MODEL_PATH
from asyncengine.grammar import Grammar

FAMILIES = ["glm4_moe", "qwen3_5_text", *(["deepseek_v3", "qwen3_5_moe_text", "qwen3_next"] if LONG else [])]
SETTINGS: dict[str, Any] = {
    **ALWAYS, "speculation_with_adapters": True, "page_size": 16, "kv_cache_memory": "4MiB",
}  # fmt: skip
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1.0, "seed": 5, "logprobs": True},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 6},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "seed": 7, "logprobs": True},
    {"temperature": 0.0, "min_tokens": 30, "logit_bias": {5: 3.0, 9: -2.0}},
)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [8], [7, 7, 7, 2], list(range(10, 55)))


async def opened(folder: Path, **settings: Any) -> AsyncEngine:
    engine = await AsyncEngine.from_pretrained(str(folder), **{**SETTINGS, **settings})
    plant(engine, [])
    return engine


async def answers(engine: AsyncEngine, every: int, more: Sequence[SamplingParams] = ()) -> list[Any]:
    """Answers to all prompts in all ways, `every` at a time."""
    ways = [*(SamplingParams(max_tokens=40, **way) for way in WAYS), *more]
    asked = [(prompt, params) for params in ways for prompt in PROMPTS]
    found = await some_at_a_time(asked, every, lambda each: engine.generate(*each))
    return [(one.token_ids, one.finish_reason, one.logprobs) for one in found]


def made_by_head(engine: AsyncEngine) -> tuple[int, int]:
    counts = engine.stats().speculation
    assert counts is not None
    assert counts.drafted == counts.drafted_by_model
    return counts.drafted, counts.accepted


GRAMMARS = [
    SamplingParams(
        max_tokens=30, temperature=0.8, seed=1, logprobs=True, grammar=Grammar.regex(r"[a-z]{3,9}( [a-z]+)+")
    ),
    SamplingParams(max_tokens=30, temperature=0.0, grammar=Grammar.choice(["yes, of course", "yes", "no, not at all"])),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_answers_are_the_same(family: str, dtype: str, tmp_path: Path) -> None:
    """Alone, three and sixteen at a time, with grammars, few pages, pauses, and prefixes found in the cache."""
    folder = save(tmp_path / "model", family, random_tensors(family, vocab=2048), getattr(torch, dtype))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_PATH / name, folder)
    async with await opened(folder, mtp=False) as engine:
        assert engine.info.no_mtp == "mtp is off"
        expected = await answers(engine, 3, GRAMMARS)
    async with await opened(folder) as engine:
        assert engine.info.no_mtp is None
        assert await answers(engine, 1, GRAMMARS) == expected
        assert await answers(engine, 16, GRAMMARS) == expected, "found in the cache"
        await engine.sleep()
        await engine.wake()
        assert await answers(engine, 16, GRAMMARS) == expected, "awake again"
        assert made_by_head(engine)[0] > 100
    few = engine.info.kv_cache_bytes // engine.info.num_pages * 11
    async with await opened(folder, kv_cache_memory=few) as engine:
        assert await answers(engine, 16, GRAMMARS) == expected
        assert engine.stats().preemptions > 0
        assert made_by_head(engine)[0] > 30
    async with await AsyncEngine.from_pretrained(str(folder), **SETTINGS) as engine:
        assert await answers(engine, 4, GRAMMARS) == expected, "beside lookups"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reads", ["token", "hidden"])
async def test_a_head_that_knows_is_believed(family: str, reads: str, tmp_path: Path) -> None:
    """Were it given another token, another hidden state, or the entries of another position, it would be wrong."""
    folder = save(tmp_path / "model", family, planted(family, reads))
    async with await opened(folder, max_num_batched_tokens=32, max_num_seqs=8) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=60)
        for turn in range(2):  # the second finds its prompts in the cache
            found = await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS))
            drafted, accepted = made_by_head(engine)
            assert accepted > 0.97 * drafted, turn
            assert drafted > 100 * (turn + 1)
        assert engine.stats().tokens_per_pass > 2
        warm = SamplingParams(temperature=1.0, seed=3, max_tokens=60)
        await asyncio.gather(*(engine.generate(prompt, warm) for prompt in PROMPTS))
        assert made_by_head(engine)[1] - accepted > 0.9 * (made_by_head(engine)[0] - drafted) > 100
    async with await opened(folder, mtp=False) as engine:
        assert await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS)) is not None
        assert [one.token_ids for one in found] == [
            (await engine.generate(prompt, params)).token_ids for prompt in PROMPTS
        ]


def test_a_head_that_is_no_head_is_not_used(tmp_path: Path) -> None:
    """It is said why, and the tensors are not read."""
    folder = save(tmp_path / "model", "glm4_moe", random_tensors("glm4_moe"))
    weights = {}
    for reason, settings in {
        "": {}, "mtp is off": {"mtp": False}, "nothing is to be guessed": {"speculation": "off"},
        "nothing can be guessed here": {"attention_backend": "torch"},
    }.items():  # fmt: skip
        with Engine.from_pretrained(str(folder), kv_cache_memory="1MiB", **settings) as engine:
            assert (engine.info.no_mtp or "") == reason
            assert ("mtp x 1" in engine.info.fused) == (not reason)
            assert ("by a head" in engine.info.in_words) == (not reason)
            weights[reason] = engine.info.weight_bytes
    assert weights[""] > weights["mtp is off"] == weights["nothing is to be guessed"]
    tensors = load_file(folder / "model.safetensors")
    lacking = {name: tensor for name, tensor in tensors.items() if "eh_proj" not in name}
    without = {name: tensor for name, tensor in tensors.items() if "layers.2." not in name}
    for held, reason in (
        (lacking, "is of another form: it lacks model.layers.2.eh_proj.weight"),
        (without, "has none"),
    ):
        save_file(held, folder / "model.safetensors")
        with Engine.from_pretrained(str(folder), kv_cache_memory="1MiB") as engine:
            assert str(engine.info.no_mtp).endswith(reason)
            assert engine.info.weight_bytes == weights["mtp is off"]
            assert len(engine.generate([1, 2], SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4


async def test_weights_without_a_head_update_a_model_that_has_one(tmp_path: Path) -> None:
    """Trainers have no head: what is read of the checkpoint stays."""
    tensors = random_tensors("glm4_moe")
    folder = save(tmp_path / "model", "glm4_moe", tensors)
    other = {name: tensor for name, tensor in random_tensors("glm4_moe", 1).items() if "layers.2." not in name}
    async with await opened(save(tmp_path / "other", "glm4_moe", other)) as engine:
        assert engine.info.no_mtp == "the checkpoint has none"
        expected = await answers(engine, 8)
    async with await opened(folder) as engine:
        before = await answers(engine, 8)
        await engine.update_weights(other)
        assert await answers(engine, 8) == expected != before
        await engine.update_weights(str(folder))
        assert await answers(engine, 8) == before
        assert made_by_head(engine)[0] > 100


def save_adapter(folder: Path, layers: int = 2) -> Path:
    """A LoRA adapter of the tiny models' queries and outputs of attention."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for layer in range(layers):
        for name in ("q_proj", "o_proj"):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(4, WIDTH, generator=generator) / 8
            tensors[f"{path}.lora_B.weight"] = torch.randn(WIDTH, 4, generator=generator) / 2
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


async def test_adapters_are_exact_beside_a_head(tmp_path: Path) -> None:
    """Rows with an adapter among others without, whose steps the head sees in part."""
    folder = save(tmp_path / "model", "glm4_moe", planted("glm4_moe", "token"))
    adapters = {"a": str(save_adapter(tmp_path / "adapter"))}

    async def asked(engine: AsyncEngine) -> list[Any]:
        names = ("a", None, "a", None)
        given = [(prompt, name, SamplingParams(max_tokens=40, temperature=heat, seed=2, logprobs=True))
                 for heat in (0.0, 0.9) for prompt, name in zip(PROMPTS, names, strict=True)]  # fmt: skip
        found = await asyncio.gather(*(engine.generate(prompt, one, adapter=name) for prompt, name, one in given))
        return [(one.token_ids, one.logprobs) for one in found]

    async with await opened(folder, mtp=False, adapters=adapters) as engine:
        expected = await asked(engine)
    async with await opened(folder, adapters=adapters) as engine:
        assert await asked(engine) == expected
        assert made_by_head(engine)[1] > 50


def test_memory_of_a_head_is_counted(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "glm4_moe", random_tensors("glm4_moe"))
    taken, told = [], []
    for mtp in (False, True):
        config = EngineConfig(mtp=mtp, kv_cache_memory="1MiB", dtype="float32")
        told.append(needed_memory(str(folder), config, "cpu")[0])
        with Engine.from_pretrained(str(folder), mtp=mtp, kv_cache_memory="1MiB", dtype="float32") as engine:
            taken.append(engine.info.weight_bytes)
            assert engine.info.num_pages == 2**20 // (
                16 * 2 * 2 * 16 * 4 * (2 + mtp)
            )  # tokens, keys and values, heads, sizes
    assert taken[1] - taken[0] == pytest.approx(told[1] - told[0], rel=0.1)
