"""Runners on the FlashInfer backend, fake kernels beneath, against those on the torch backend. Padded steps and
engines: tests/execution/runner/test_graphs.py and test_graph_sampling.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drive import Driver, prompts
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.long import LONG
from support.tiny_models import VOCAB
from support.wide_models import WIDE, wide_folders

from asyncengine import SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.attention.factory import make_backend
from asyncengine.execution.attention.flashinfer import FlashInferBackend
from asyncengine.execution.layers import rotary
from asyncengine.execution.layers.kernels import CudaKernels, layer_kernels
from asyncengine.execution.models import loading
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner

WANT = 14
LENGTHS = [1, 22, 33, 6, 4]
SCORED = SamplingParams(temperature=0.0, ignore_eos=True, top_logprobs=1)
Answers = tuple[list[list[int]], list[float]]
"""Tokens of each prompt's output, and the log-probabilities of all of them."""


folder = pytest.fixture(wide_folders, scope="module")


@pytest.fixture
def fake() -> FakeFlashInfer:
    return FakeFlashInfer(FakeMemory())


@pytest.fixture
def on_flashinfer(fake: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners built in this test use the FlashInfer backend and FlashInfer's other kernels, whatever the type
    of the model. It has one pool and needs no window pages, which an engine on a CPU names besides."""

    def make(
        config: EngineConfig, layers: Sequence[LayerSpec], num_pages: int, dtype: torch.dtype, device: torch.device,
        max_model_len: int | None = None, **_: object,
    ) -> FlashInferBackend:  # fmt: skip
        backend = FlashInferBackend(
            layers, num_pages, config.page_size, dtype, device, max_rows=64, max_pages_per_row=256 // config.page_size,
            flashinfer=fake, memory=fake.memory,
        )  # fmt: skip
        backend.warm_up()
        return backend

    monkeypatch.setattr("asyncengine.execution.runner.building.make_backend", make)
    monkeypatch.setattr(loading, "layer_kernels", lambda *_: CudaKernels(fake, torch.device("cpu")))
    monkeypatch.setattr(rotary, "compiler_missing", lambda *_: "a GPU has new angles in each step")


@pytest.fixture(scope="module")
def expected(folder: Callable[[str], Path]) -> Callable[[str], Answers]:
    """The torch backend's answers, by the name of a checkpoint."""

    @cache
    def get(name: str) -> Answers:
        with torch_backend():
            runner = make_runner(folder(name), attention_backend="torch")
        assert runner.attention_backend == "torch"
        try:
            return answers(Driver(runner))
        finally:
            runner.close()

    return get


@contextmanager
def torch_backend() -> Iterator[None]:
    """Runners that are built here run on torch, whatever `on_flashinfer` has set up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncengine.execution.runner.building.make_backend", make_backend)
        patch.setattr(loading, "layer_kernels", layer_kernels)
        yield


def answers(driver: Driver, chunk: int | None = None, preempt_every: int | None = None) -> Answers:
    jobs = [driver.job(prompt, WANT, SCORED) for prompt in prompts(LENGTHS, VOCAB)]
    outputs = driver.run(jobs, chunk, preempt_every)
    return outputs, [entry.logprob for job in jobs for entry in job.logprobs]


def make_runner(path: Path, **fields: Any) -> ModelRunner:
    config = EngineConfig(**{"page_size": 4, "max_num_seqs": 64, "kv_cache_memory": "24MiB", "device": "cpu", **fields})
    return build_runner(load_model(str(path), config), config)


@pytest.mark.parametrize("name", WIDE if LONG else ["qwen3", "qwen2", "gemma2", "llama4"])
@pytest.mark.usefixtures("on_flashinfer")
def test_runner_answers_as_on_torch(
    name: str, folder: Callable[[str], Path], expected: Callable[[str], Answers], fake: FakeFlashInfer
) -> None:
    """All at once, in chunks, preempted: over page boundaries and windows, mixed steps and steps of decodes."""
    wanted, scores = expected(name)
    assert fake.calls == {}
    assert len({token for output in wanted for token in output}) >= 5
    runner = make_runner(folder(name))
    assert runner.attention_backend == "flashinfer"
    driver = Driver(runner)
    fake.calls.clear()
    for chunk, preempt_every in ((None, None), (7, 5)):
        found, found_scores = answers(driver, chunk, preempt_every)
        assert found == wanted, f"chunk {chunk}"
        assert found_scores == pytest.approx(scores, abs=1e-4), f"chunk {chunk}"
    assert fake.calls["prefill"] > 10
    assert fake.calls["decode"] > 10
    runner.close()
