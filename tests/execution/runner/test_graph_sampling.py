"""Graphs that hold a whole step, sampling included, on stand-ins: outputs are those of steps without graphs.

Requests of all kinds share the steps (greedy, sampled, penalized, constrained, scored, with adapters), with steps
launched ahead, so that tokens are carried on the device. Float32, so that batch neighbours cannot change a token.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from promises.test_overlap import LateReadback
from support import fake_gpu as fakes
from support.fake_engine import idle
from support.fake_gpu import fake_gpu
from support.peft_checkpoints import make_peft
from support.worded_model import VOCAB, make_worded_model

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.execution.runner import model_runner
from asyncengine.grammar import Grammar
from asyncengine.testing.leaks import assert_nothing_held

from .step_sampler import sample_in_graphs

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.7, "logit_bias": {7: 3.0}, "min_tokens": 6},
    {"temperature": 0.8, "logprobs": True},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs_of": "sampled", "top_logprobs": 3},
    {"temperature": 0.9, "grammar": Grammar.regex(r"[a-z]+( [a-z]+){2,}\."), "logprobs_of": "sampled"},
    {"temperature": 0.9, "grammar": Grammar.regex(r"[a-z]+( [a-z]+){2,}\."), "max_tokens": 30},
    {
        "temperature": 0.0,
        "grammar": Grammar.regex(r"(one|two|three)( (four|five))+"),
        "logprobs": True,
        "max_tokens": 30,
    },
]
Answer = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_worded_model(tmp_path_factory.mktemp("graphs") / "model", head_dim=64)
    base = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    make_peft(base, 1, target_modules="all-linear").save_pretrained(made.parent / "one")
    return made


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[Answer]:
    """The answers of steps without graphs, one at a time."""
    return asyncio.run(answers(folder, max_steps_in_flight=1))


async def answers(folder: Path, **settings: Any) -> list[Answer]:
    rng = random.Random(5)

    async def ask(engine: AsyncEngine, index: int) -> Answer:
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))]
        params = SamplingParams(**{"max_tokens": rng.randrange(6, 24), "seed": index, **KINDS[index % len(KINDS)]})
        made = await engine.generate(prompt, params, adapter="one" if index % 4 == 3 else None)
        return [(each.token_ids, [entry.logprob for entry in each.logprobs or ()]) for each in made.samples]

    async with await AsyncEngine.from_pretrained(
        folder, dtype="float32", num_threads=1, kv_cache_memory="24MB", max_num_seqs=12, max_lora_rank=8,
        adapters={"one": folder.parent / "one"}, **settings,
    ) as engine:  # fmt: skip
        made = await asyncio.gather(*(ask(engine, index) for index in range(26)))
        await idle(engine)
        assert_nothing_held(engine.core)
        return made


async def test_answers_are_those_without_graphs(
    folder: Path, wanted: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "why_not", lambda *_: None)  # float32 on fake kernels
    monkeypatch.setattr(model_runner, "Readback", LateReadback)
    samplers = sample_in_graphs(monkeypatch)
    calls = fake_gpu(monkeypatch)
    found = await answers(folder, max_steps_in_flight=3, preempt_every=7)
    assert calls["graphs"] > 25
    assert samplers[0].refreshed == calls["graphs"]
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other], f"request {index}"
        for (_, scores), (_, expected) in zip(one, other, strict=True):
            assert scores == pytest.approx(expected, abs=1e-4)
