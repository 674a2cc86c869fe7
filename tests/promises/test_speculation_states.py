"""Guesses of models with recurrent states are invisible, too (contract line 16): the same answers in fewer steps."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.long import LONG
from support.planted_guesses import ALWAYS, GRAMMARS, plant, some_at_a_time
from support.tiny_models import HYBRID, VOCAB, make_checkpoint
from support.worded_model import make_worded_model

from asyncengine import AsyncEngine, SamplingParams

FAMILIES = (
    "qwen3.5", "lfm2", "granite4", "nemotron-h", "mamba2", "falcon-h1", "qwen3.5moe", "kimi-linear-wide",
    "olmo-hybrid",
)  # fmt: skip
"""Gated delta rule, short convolution, Mamba-2 with experts, between other layers, alone and beside attention in one
layer, gated delta rule with experts, Kimi's delta attention beside latent pages."""
COSTS: dict[str, Any] = {**ALWAYS, "num_threads": 1}
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.2, "seed": 9},
)  # fmt: skip
STEM = [3 + (7 * place) % (VOCAB - 3) for place in range(40)]


async def answers(engine: AsyncEngine, every: int) -> list[Any]:
    """Nine prompts of two turns each, which share a beginning, `every` at a time."""
    asked = [
        ([*STEM[: 16 * (number % 3)], *(3 + (11 * number + 5 * place) % (VOCAB - 3) for place in range(9 + number))],
         SamplingParams(max_tokens=40, ignore_eos=True, **PARAMS[number // 3]))
        for number in range(9)
    ]  # fmt: skip
    made: list[Any] = []
    for _ in range(2):
        done = await some_at_a_time(asked, every, lambda each: engine.generate(*each))
        made += [(one.token_ids, one.finish_reason, one.logprobs) for one in done]
        asked = [([*prompt, *one.token_ids, 5], params) for (prompt, params), one in zip(asked, done, strict=True)]
    return made


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")]
    if LONG
    else [("qwen3.5", "float32"), ("lfm2", "bfloat16"), ("granite4", "bfloat16"), ("falcon-h1", "float32")],
)
async def test_answers_are_the_same(family: str, dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path / "model")
    settings: dict[str, Any] = {"dtype": dtype, "show_progress": False, "max_num_seqs": 16, "num_threads": 1}
    async with await AsyncEngine.from_pretrained(path, **settings, speculation="off") as engine:
        expected = await answers(engine, 1)
        steps = engine.stats().steps
    draft = make_checkpoint("llama3.1-rope", tmp_path / "draft")
    async with await AsyncEngine.from_pretrained(path, **{**settings, **COSTS}, draft_model=str(draft)) as engine:
        plant(engine, [tokens for tokens, *_ in expected])
        assert await answers(engine, 1) == expected
        counts = engine.stats()
        assert counts.speculation is not None
        assert counts.speculation.accepted > 200
        assert counts.speculation.drafted - counts.speculation.accepted > 50
        assert counts.steps < 0.6 * steps
        assert counts.states.hits > 8
        assert await answers(engine, 9) == expected, "together, from what the others left"
        plant(engine, [])
        assert await answers(engine, 3) == expected, "guessed by a model"
        later = engine.stats()
        assert later.speculation is not None
        assert later.speculation.drafted_by_model > 50
        assert later.states.free + later.states.snapshots == later.states.total
    few = engine.info.state_bytes * 10
    more = {"state_memory": few, "preempt_every": 5}
    async with await AsyncEngine.from_pretrained(path, **{**settings, **COSTS, **more}) as engine:
        plant(engine, [tokens for tokens, *_ in expected])
        assert await answers(engine, 9) == expected, "with few states, and preempted"
        counts = engine.stats()
        assert counts.preemptions > 8
        assert counts.speculation is not None
        assert counts.speculation.accepted > 10


async def test_grammars_sleep_and_restored_prefixes(tmp_path: Path) -> None:
    """A hybrid under the demo model's tokenizer."""
    path = make_worded_model(
        tmp_path / "model", 16, transformers.Qwen3_5TextConfig, layer_types=HYBRID[:2], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    grammars = [GRAMMARS[name] for name in ("regex", "object", "choice")]

    async def constrained(engine: AsyncEngine) -> list[Any]:
        params = [
            SamplingParams(max_tokens=40, temperature=0.8, seed=seed, grammar=grammar, logprobs=seed == 1)
            for seed in range(3)
            for grammar in grammars
        ]
        done = await asyncio.gather(*(engine.generate("Once upon a time there was a fox. " * 3, one) for one in params))
        return [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in done]

    settings: dict[str, Any] = {"dtype": "float32", "show_progress": False}
    async with await AsyncEngine.from_pretrained(path, **settings, speculation="off") as engine:
        expected = await constrained(engine)
    store = {"kv_cache_dir": str(tmp_path / "kept")}
    for life in range(2):
        async with await AsyncEngine.from_pretrained(path, **settings, **COSTS, **store) as engine:
            plant(engine, [tokens for tokens, *_ in expected])
            assert await constrained(engine) == expected, life
            counts = engine.stats()
            assert counts.speculation is not None
            assert counts.speculation.accepted > 40
            assert life == 0 or counts.cached_tokens > 0
            await engine.sleep()
            await engine.wake()
            assert await constrained(engine) == expected, "after sleep"
    shutil.rmtree(tmp_path / "kept")
