"""Greedy outputs of several families on a GPU, and of prompts longer than a step, against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.compare import Ask, compare
from gpu.engines import DEVICE, LENGTHS, ON_GPU, SEED, WANT, generating, prompts, scores, small_engine
from gpu.families import FAMILIES, Family, family_called, make_checkpoint
from gpu.reference import Reference
from support.tiny_configs import VOCAB

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CASES = [
    *((family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")),
    (FAMILIES[0], "float16"),  # each further kind of layer would compile kernels of its own
]
LENGTH = 300
"""Tokens of a long prompt, in chunks of 64."""


async def check_family(family: Family, dtype: str, folder: Path, **changes: Any) -> None:
    """float32 through the torch backend, 16 bits through FlashInfer: the same but for near ties. `changes`: settings of
    the engine."""
    exact = dtype == "float32"
    make_checkpoint(family.make(not exact), folder, DTYPES[dtype], SEED)
    reference = Reference(folder, DTYPES[dtype], torch.device(DEVICE))
    asks = [Ask(tuple(prompt), WANT) for prompt in prompts(LENGTHS, VOCAB, SEED)]
    expected = reference.generate([ask.prompt for ask in asks], WANT)
    if exact:
        changes["attention_backend"] = "torch"
    async with small_engine(folder, dtype=dtype, **changes) as engine:
        judge = reference.exact_gap if exact else reference.gap
        (await compare(generating(engine), asks, expected, judge)).verdict()
        if not exact:
            await scores(engine, asks, reference)


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=lambda given: getattr(given, "name", given))
async def test_outputs_are_those_of_transformers(family: Family, dtype: str, tmp_path: Path) -> None:
    await check_family(family, dtype, tmp_path / "model")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
async def test_two_gpus_answer_as_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    family = family_called(name)
    await check_family(family, dtype, tmp_path / "model", tensor_parallel=2)


@pytest.mark.parametrize("count", [1, 3])
async def test_prompts_longer_than_a_step(count: int, tmp_path: Path) -> None:
    """Steps that compute only the inner part of one want no logits at all: alone, so that no decode shares its steps,
    and several."""
    qwen3 = family_called("qwen3")
    folder = make_checkpoint(qwen3.make(True), tmp_path, torch.bfloat16, SEED)
    reference = Reference(folder, torch.bfloat16, torch.device(DEVICE))
    asks = [Ask(tuple(prompt), 8) for prompt in prompts([LENGTH] * count, VOCAB, SEED)]
    expected = reference.generate([ask.prompt for ask in asks], 8)
    async with small_engine(folder, dtype="bfloat16") as engine:
        executor: Any = engine.core.loop.runner.executor
        launch, inner = executor.launch, list[int]()

        def watched(batch: Any) -> Any:
            if not any(row.samples for row in batch.rows):
                inner.append(batch.step)
            return launch(batch)

        executor.launch = watched
        (await compare(generating(engine), asks, expected, reference.gap)).verdict()
    assert inner, "every step wanted logits: nothing was shown"
