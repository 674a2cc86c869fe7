"""Whole decode steps as CUDA graphs on a real GPU: launched ahead, sampled inside, nothing waited for.

Skipped without an NVIDIA GPU or without `asyncengine[cuda]`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_models import runner_without_graphs, write_small_qwen3

from asyncengine.device.pinned import CudaMemory, FixedInputs
from asyncengine.request_spec import RequestSpec
from asyncengine.runner.graphs import CudaCapture
from asyncengine.runner.model_runner import ModelRunner
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Batch, Row, StepHandle

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None,
    reason="needs an NVIDIA GPU and asyncengine[cuda]",
)

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
LENGTHS = [3, 17, 40, 15, 64]
STEPS = 40


def test_what_is_sent_arrives_though_the_device_is_far_behind() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = FixedInputs(CudaMemory(device), 1000, kept=8)
    busy = torch.randn(4096, 4096, device=device)
    seen = []
    for turn in range(12):
        for _ in range(4):
            busy = (busy @ busy).clamp_(-1, 1)
        host = inputs.take()
        host.fill_(turn)
        inputs.send(900)
        seen.append(inputs.device.clone())
    for turn, values in enumerate(seen):
        assert not bool(values[:8].any())
        assert bool((values[8:908] == turn).all())


class Largest:
    """A `StepSampler` that takes the largest logit."""

    def refresh(self) -> None:
        pass

    def sample(self, logits: Any, slots: Any, positions: Any, tokens: torch.Tensor, best: torch.Tensor) -> None:
        largest, ids = logits.max(dim=-1)
        tokens.copy_(ids)
        best.copy_(largest)

    def choose(self, logits: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        largest, ids = logits.max(dim=-1)
        return ids, largest.float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_qwen3(tmp_path_factory.mktemp("graphs"))


def make_runner(folder: Path, sampler: Any) -> ModelRunner:
    runner = runner_without_graphs(folder)
    if sampler is not None:
        runner._sampler.on_device = sampler if sampler != "none" else None
    runner.use_graphs([1, 2, 4, 8], CudaCapture())
    return runner


def generate(runner: ModelRunner, params: list[SamplingParams], ahead: int) -> list[list[int]]:
    """Tokens of `LENGTHS` prompts over `STEPS` steps, `ahead` of which are launched before the first is waited for."""
    outputs: list[list[int]] = [[] for _ in LENGTHS]
    tokens = [[(7 * place + 13 * slot) % 4000 + 5 for place in range(length)] for slot, length in enumerate(LENGTHS)]
    specs = [
        RequestSpec(slot + 1, tuple(known), params[slot], 512, seed=slot) for slot, known in enumerate(tokens)
    ]  # fmt: skip
    pages = [list(range(1 + 16 * slot, 17 + 16 * slot)) for slot in range(len(LENGTHS))]
    waiting: list[StepHandle] = []

    def deliver() -> None:
        for slot, token in enumerate(waiting.pop(0).wait().tokens):
            outputs[slot].append(token)
            tokens[slot].append(token)

    for step in range(STEPS):
        rows = []
        for slot, length in enumerate(LENGTHS):
            start, count = (0, length) if step == 0 else (length + step - 1, 1)
            in_flight = len(tokens[slot]) < start + count
            rows.append(Row(specs[slot], slot, start, count, tokens[slot], in_flight, pages[slot], True))
        waiting.append(runner.launch(Batch(step + 1, tuple(rows))))
        if len(waiting) > ahead:
            deliver()
    while waiting:
        deliver()
    return outputs


@pytest.fixture
def syncs_are_errors() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("syncs_are_errors")
def test_tokens_are_carried_on_the_device(folder: Path) -> None:
    """Sampled behind the graph and inside, one step at a time and three ahead: the kernels are the same, and so are
    the answers."""
    greedy = [GREEDY] * len(LENGTHS)
    found = []
    for sampler in ("none", Largest()):
        runner = make_runner(folder, sampler)
        generate(runner, greedy, 0)
        torch.cuda.set_sync_debug_mode("error")
        for ahead in (0, 1, 3):
            found.append(generate(runner, greedy, ahead))
        torch.cuda.set_sync_debug_mode("default")
        runner.close()
    assert all(each == found[0] for each in found)
    assert len({token for output in found[0] for token in output}) > 5


@pytest.mark.usefixtures("syncs_are_errors")
def test_rows_of_all_kinds_with_the_engines_own_sampler(folder: Path) -> None:
    """Rows whose logits are processed are sampled again behind the graph, for which nothing waits either."""
    kinds = [
        GREEDY,
        GREEDY.replace(temperature=0.8, top_p=0.9),
        GREEDY.replace(temperature=0.9, repetition_penalty=1.3),
        GREEDY.replace(logprobs=True, top_logprobs=3),
        GREEDY.replace(temperature=1.0, top_k=20),
    ]
    runner = make_runner(folder, None)
    generate(runner, kinds, 0)
    torch.cuda.set_sync_debug_mode("error")
    found = [generate(runner, kinds, ahead) for ahead in (0, 1, 3)]
    torch.cuda.set_sync_debug_mode("default")
    assert found[0] == found[1] == found[2]
    alone = generate(runner, [kinds[0], kinds[1], kinds[1], kinds[3], kinds[4]], 1)
    assert [alone[slot] for slot in (0, 1, 3, 4)] == [found[0][slot] for slot in (0, 1, 3, 4)]
    assert alone[2] != found[0][2]
    runner.close()
