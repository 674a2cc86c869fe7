"""A head of the EAGLE-3 form is invisible: the same answers to the bit as without a draft model, in fewer steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from promises.test_mtp import GRAMMARS, SETTINGS, WAYS, made_by_head, save_adapter
from support.eagle_models import (
    FIRST,
    HEAD,
    KNOWN,
    LAYERS,
    MODEL,
    Tensors,
    head_tensors,
    model_tensors,
    planted,
    save,
    save_model,
)
from support.long import LONG
from support.planted_guesses import plant, some_at_a_time

from asyncengine import AsyncEngine, Engine, SamplingParams
from asyncengine.assembly.wiring import needed_memory
from asyncengine.config import EngineConfig
from asyncengine.engine import prefix_store
from asyncengine.errors import EngineError, InvalidParameter, ModelNotFound, UnsupportedModel

PROMPTS = ([8, 6, 9, 7], [11], [12, 12, 20], [FIRST + place * 7 % KNOWN for place in range(70)])


async def opened(folder: Path, head: Path | None = None, **settings: Any) -> AsyncEngine:
    draft = None if head is None else str(head)
    engine = await AsyncEngine.from_pretrained(str(folder), **{**SETTINGS, "draft_model": draft, **settings})
    plant(engine, [])
    return engine


async def asked(engine: AsyncEngine, every: int) -> list[Any]:
    """Answers to all prompts, `every` at a time: greedy, sampled, with penalties, log-probabilities and grammars."""
    ways = [SamplingParams(max_tokens=24, **WAYS[place]) for place in (1, 2, 4)]
    given = [(prompt, params) for params in (*ways, *GRAMMARS) for prompt in PROMPTS]
    found = await some_at_a_time(given, every, lambda each: engine.generate(*each))
    return [(one.token_ids, one.finish_reason, one.logprobs) for one in found]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_answers_are_the_same(dtype: str, tmp_path: Path) -> None:
    """Five and sixteen at a time, with few pages, and after a sleep without weights; the long form one by one, too."""
    folder = save_model(tmp_path / "model", model_tensors(), getattr(torch, dtype))
    head = save(tmp_path / "head", HEAD, head_tensors(), getattr(torch, dtype))
    async with await opened(folder) as engine:
        expected = await asked(engine, 5)
    async with await opened(folder, head) as engine:
        assert engine.info.no_mtp is None
        assert "eagle3 x 1" in engine.info.fused
        assert await asked(engine, 1 if LONG else 16) == expected
        await engine.sleep()
        await engine.wake()
        assert await asked(engine, 16) == expected, "awake again"
        assert made_by_head(engine)[0] > 100
    few = engine.info.kv_cache_bytes // engine.info.num_pages * 10
    async with await opened(folder, head, kv_cache_memory=few) as engine:
        assert await asked(engine, 16) == expected
        assert engine.stats().preemptions > 0
        assert made_by_head(engine)[0] > 30


@pytest.mark.parametrize("reads", ["token", "hidden"])
async def test_a_head_that_knows_is_believed(reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it given another token or another position's stream, it would be wrong; also behind a restored prefix."""
    monkeypatch.setattr(prefix_store, "WORTH", 1e9)  # tiny models compute faster than any disk reads
    monkeypatch.setattr(prefix_store, "LEAST_PATIENCE", 100.0)
    model, tensors = planted(reads)
    folder, head = save_model(tmp_path / "model", model), save(tmp_path / "head", HEAD, tensors)
    ways = [SamplingParams(max_tokens=60, **way) for way in WAYS[:4]]
    found = []
    for turn in range(2):
        async with await opened(folder, head, max_num_batched_tokens=32, kv_cache_dir=tmp_path / "kv") as engine:
            for again in range(2):  # the second finds its prompts in the cache, or all weights written anew
                if turn and again:
                    await engine.sleep()
                    await engine.wake()
                given = [engine.generate(prompt, params) for params in ways for prompt in PROMPTS]
                found.append([(one.token_ids, one.logprobs) for one in await asyncio.gather(*given)])
            drafted, accepted = made_by_head(engine)
            assert accepted > 0.95 * drafted > 500
            assert engine.stats().tokens_per_pass > 1.5
            last = await engine.generate(PROMPTS[3], ways[0])
            assert turn == 0 or engine.stats().restored_tokens >= 48, last.usage
    async with await opened(folder) as engine:
        given = [engine.generate(prompt, params) for params in ways for prompt in PROMPTS]
        found.append([(one.token_ids, one.logprobs) for one in await asyncio.gather(*given)])
    assert all(each == found[0] for each in found)


async def test_adapters_are_exact_beside_a_head(tmp_path: Path) -> None:
    """Rows with an adapter among others without, whose steps the head sees in part."""
    model, tensors = planted("token")
    folder, head = save(tmp_path / "model", MODEL, model), save(tmp_path / "head", HEAD, tensors)
    adapters = {"a": str(save_adapter(tmp_path / "adapter", LAYERS))}
    found = []
    for draft in (None, head):
        async with await opened(folder, draft, adapters=adapters) as engine:
            given = [
                engine.generate(prompt, SamplingParams(max_tokens=30, **way), adapter=name)
                for way in WAYS[1:4]
                for prompt, name in zip(PROMPTS, ("a", None, "a", None), strict=True)
            ]
            found.append([(one.token_ids, one.logprobs) for one in await asyncio.gather(*given)])
            assert draft is None or made_by_head(engine)[1] > 50
    assert found[0] == found[1]


def test_memory_of_a_head_is_counted(tmp_path: Path) -> None:
    folder, head = save(tmp_path / "model", MODEL, model_tensors()), save(tmp_path / "head", HEAD, head_tensors())
    taken, told, pages = [], [], []
    for draft in (None, str(head)):
        settings: dict[str, Any] = {"draft_model": draft, "kv_cache_memory": "1MiB", "dtype": "float32"}
        told.append(needed_memory(str(folder), EngineConfig(**settings), "cpu")[0])
        with Engine.from_pretrained(str(folder), **settings) as engine:
            taken.append(engine.info.weight_bytes)
            pages.append(engine.info.num_pages)
            assert "by a head" in engine.info.in_words or not draft
    assert taken[1] - taken[0] == pytest.approx(told[1] - told[0], rel=0.1)
    assert pages[0] == pytest.approx(pages[1] * 9 / 8, abs=1)


def lacking(tensors: Tensors, name: str) -> Tensors:
    return {known: tensor for known, tensor in tensors.items() if known != name}


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], type[EngineError], str]] = {
    "hidden_size": ({"hidden_size": 128, "head_dim": 32}, dict, InvalidParameter, "hidden_size=128 .* needs 64"),
    "target_hidden_size": ({"target_hidden_size": 96}, dict, InvalidParameter, "target_hidden_size=96 .* needs 64"),
    "vocab_size": ({"vocab_size": 3000}, dict, InvalidParameter, "vocab_size=3000 .* needs 2048"),
    "layers": ({"num_hidden_layers": 2}, dict, InvalidParameter, "num_hidden_layers=2 .* needs 1"),
    "ids": ({"eagle_aux_hidden_state_layer_ids": [1, 4, 9]}, dict, InvalidParameter, "layer_ids.*1, 4, 9.* 0 to 8"),
    "fc": ({}, lambda all: lacking(all, "fc.weight"), ModelNotFound, "it lacks fc.weight"),
    "d2t": ({}, lambda all: lacking(all, "d2t"), ModelNotFound, "it lacks d2t"),
    "shape": ({"draft_vocab_size": 1500}, dict, ModelNotFound, "its d2t is .1600., not .1500."),
    "range": ({}, lambda all: all | {"d2t": all["d2t"] + 900}, ModelNotFound, "d2t must name .* tokens below 2048"),
    "unknown": ({}, lambda all: all | {"mask_hidden": all["fc.weight"] + 1}, ModelNotFound, "EAGLE-3 head has: mask"),
    "family": ({"model_type": "qwen2_moe"}, dict, UnsupportedModel, "family 'qwen2_moe'"),
    "norm": ({"norm_before_fc": True}, dict, UnsupportedModel, "norm_before_fc=True"),
    "dflash": ({"architectures": ["DFlashDraftModel"]}, dict, UnsupportedModel, "DFlash.* EAGLE-3 form are read"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_head_of_the_model_is_refused(case: str, tmp_path: Path) -> None:
    changes, change, error, named = REFUSED[case]
    folder = save(tmp_path / "model", MODEL, model_tensors())
    head = save(tmp_path / "head", {**HEAD, **changes}, change(head_tensors()))
    with pytest.raises(error, match=f"draft_model.*{named}"):
        Engine.from_pretrained(str(folder), draft_model=str(head), kv_cache_memory="1MiB")


def test_a_head_is_no_model(tmp_path: Path) -> None:
    head = save(tmp_path / "head", HEAD, head_tensors())
    with pytest.raises(UnsupportedModel, match=r"is an EAGLE-3 head.*load that one, and the head with draft_model"):
        Engine.from_pretrained(str(head))
