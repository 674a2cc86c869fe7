"""Steps with prompts as CUDA graphs in pieces on a real GPU: hidden states as without, and nothing waits.

Skipped without an NVIDIA GPU or without `asyncengine[cuda]`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.engines import runner_of
from gpu.families import NEEDS_FLASHINFER
from gpu.ladder.shapes import Shape

from asyncengine.execution.runner.graphs import CudaCapture
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Batch, Row

pytestmark = NEEDS_FLASHINFER

SMALL = Shape("small", "Qwen3Config", {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 1024, "tie_word_embeddings": True,
})  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
STEPS = [[(0, 60), (0, 1)], [(0, 33), (60, 1), (1, 90)], [(33, 7), (61, 1), (91, 5)], [(40, 128), (62, 64), (96, 30)]]
"""(start, tokens) of three rows in steps that follow each other; of the first step, the second row is the third's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALL.write(tmp_path_factory.mktemp("graphs"))


def make_runner(folder: Path, *, pieces: bool) -> ModelRunner:
    options = {"load_format": "dummy", "kv_cache_memory": "200MB", "max_model_len": 512}
    runner = runner_of(folder, max_num_seqs=16, cuda_graphs=False, **options)
    if pieces:
        capture = CudaCapture()
        runner.use_graphs([1, 2, 4], capture)
        runner.use_prompt_graphs([32, 64, 128, 256], capture.in_pieces)
    return runner


def logits_of(runner: ModelRunner) -> list[torch.Tensor]:
    """Logits of each step's last tokens, taken where the sampler gets them."""
    found: list[torch.Tensor] = []
    choose = runner.sampler.sample

    def kept(rows, logits, masks, last):  # type: ignore[no-untyped-def]
        found.append(logits.float().clone())
        return choose(rows, logits, masks, last)

    runner.sampler.sample = kept  # type: ignore[method-assign]
    tokens = [[(7 * place + 13 * slot) % 4000 + 5 for place in range(400)] for slot in range(3)]
    specs = [RequestSpec(slot + 1, tuple(known), GREEDY, 512, seed=slot) for slot, known in enumerate(tokens)]
    pages = [list(range(1 + 32 * slot, 33 + 32 * slot)) for slot in range(3)]
    for number, step in enumerate(STEPS):
        slots = (1, 2) if number == 0 else (0, 1, 2)
        rows = tuple(
            Row(specs[slot], slot, start, count, tokens[slot], False, pages[slot], True)
            for slot, (start, count) in zip(slots, step, strict=True)
        )
        runner.launch(Batch(number + 1, rows)).wait()
    return found


def test_logits_are_near_those_without(folder: Path) -> None:
    found = []
    for pieces in (False, True):
        runner = make_runner(folder, pieces=pieces)
        logits_of(runner)
        torch.cuda.set_sync_debug_mode("error")
        found.append(logits_of(runner))
        torch.cuda.set_sync_debug_mode("default")
        runner.close()
    for plain, captured in zip(*found, strict=True):
        assert plain.shape == captured.shape
        assert float((plain - captured).norm() / plain.norm()) < 0.02
        assert bool(plain.std() > 0)
