"""Models that keep states, have experts or attend to chunks, on a real GPU: as CUDA graphs they answer as without.

Skipped without an NVIDIA GPU or without `asyncengine[cuda]`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpu.engines import runner_of
from gpu.families import NEEDS_FLASHINFER
from support import tiny_models
from support.drive import Driver, Job, prompts
from support.tiny_models import VOCAB, make_checkpoint

from asyncengine.execution.runner.graphs import CudaCapture
from asyncengine.sampling_params import SamplingParams

pytestmark = NEEDS_FLASHINFER

SCORED = SamplingParams(temperature=0.0, logprobs=True)
FAMILIES = ["qwen3next", "lfm2", "granite4", "falcon-h1", "qwen3moe", "llama4"]


def widened(make: Any) -> Any:
    """The tiny model with heads of 128 dimensions."""
    config = make()
    if hasattr(config, "num_attention_heads"):
        config.head_dim = 128
    if hasattr(config, "attention_chunk_size"):
        config.attention_chunk_size = 32
    return config


def answers(path: Path, *, graphs: bool) -> list[Job]:
    memory = {"kv_cache_memory": "64MB", "state_memory": "64MB"}
    runner = runner_of(path, page_size=16, max_model_len=256, cuda_graphs=False, **memory)
    if graphs:
        runner.use_graphs([1, 2, 4, 8], CudaCapture())
    driver = Driver(runner)
    jobs = [driver.job(prompt, 24 - 2 * place, SCORED) for place, prompt in enumerate(prompts([3, 9, 40, 1, 6], VOCAB))]
    driver.run(jobs, 16)
    runner.close()
    return jobs


@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_answer_as_steps_without(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are equal up to rounding: padded to other numbers of rows, products may be summed in another order."""
    monkeypatch.setitem(tiny_models.FAMILIES, name, partial(widened, tiny_models.FAMILIES[name]))
    path = make_checkpoint(name, tmp_path / name)
    for plain, replayed in zip(answers(path, graphs=False), answers(path, graphs=True), strict=True):
        pairs = list(zip(plain.logprobs, replayed.logprobs, strict=True))
        same = next((at for at, (one, other) in enumerate(pairs) if one.token_id != other.token_id), len(pairs))
        assert same >= 5, "states or pages went wrong"
        for one, other in pairs[:same]:
            assert one.logprob == pytest.approx(other.logprob, abs=0.05)
