"""Whole runners and engines on the FlashInfer backend, fake kernels beneath, against the same on the torch backend."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.attention_pair import plan_graph, prepare
from support.drive import Driver, prompts
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.threads import no_new_engine_thread
from support.tiny_models import VOCAB
from support.wide_models import WIDE, make_wide
from torch.nn.functional import pad

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.attention.base import LayerSpec, StepView
from asyncengine.attention.factory import make_backend
from asyncengine.attention.flashinfer import FlashInferBackend
from asyncengine.config import EngineConfig
from asyncengine.device.pinned import FixedInputs
from asyncengine.layers import rotary
from asyncengine.layers.kernels import CudaKernels, layer_kernels
from asyncengine.models import loading
from asyncengine.models.loading import load_model
from asyncengine.runner.building import build_runner
from asyncengine.runner.model_runner import ModelRunner

WANT = 14
LENGTHS = [1, 22, 33, 6, 4]
MakeBackend = Callable[..., FlashInferBackend]
SCORED = SamplingParams(temperature=0.0, ignore_eos=True, top_logprobs=1)
Answers = tuple[list[list[int]], list[float]]
"""Tokens of each prompt's output, and the log-probabilities of all of them."""


class PaddedBackend(FlashInferBackend):
    """Pads each step of decodes to the next power of two and takes it through the wrappers with fixed buffers."""

    _inputs: FixedInputs | None = None

    def plan(self, step: StepView) -> None:
        if step.counts.max() > 1:
            super().plan(step)
            return
        if self._inputs is None:
            self._inputs = prepare(self, 64, 32, 16, 8, 4, 2, 1)
        plan_graph(self, self._inputs, padded_to(step, 1 << (len(step.counts) - 1).bit_length()))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write(layer, self._padded(key), self._padded(value))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return super().attend(layer, self._padded(query))[: query.shape[0]]

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        assert self._arrays is not None
        return pad(values, (0, 0, 0, 0, 0, len(self._arrays.positions) - values.shape[0]), value=3.0)


def padded_to(step: StepView, size: int) -> StepView:
    extra = size - len(step.counts)
    counts = np.append(step.counts, np.ones(extra, dtype=np.int64))
    return replace(
        step,
        starts=np.append(step.starts, np.zeros(extra, dtype=np.int64)),
        counts=counts,
        qo_indptr=np.concatenate(([0], np.cumsum(counts))),
        page_tables=np.pad(step.page_tables, ((0, extra), (0, 0))),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def get(name: str) -> Path:
        return make_wide(name, tmp_path_factory.mktemp("wide") / name)

    return get


@pytest.fixture
def fake() -> FakeFlashInfer:
    return FakeFlashInfer(FakeMemory())


@pytest.fixture
def on_flashinfer(request: pytest.FixtureRequest, fake: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners built in this test use this kind of FlashInfer backend and FlashInfer's other kernels, whatever the type
    of the model. It has one pool and needs no window pages, which an engine on a CPU names besides."""
    kind: MakeBackend = request.param

    def make(
        config: EngineConfig, layers: Sequence[LayerSpec], num_pages: int, dtype: torch.dtype, device: torch.device,
        max_model_len: int | None = None, **_: object,
    ) -> FlashInferBackend:  # fmt: skip
        backend: FlashInferBackend = kind(
            layers, num_pages, config.page_size, dtype, device, max_rows=64, max_pages_per_row=256 // config.page_size,
            flashinfer=fake, memory=fake.memory,
        )  # fmt: skip
        backend.warm_up()
        return backend

    monkeypatch.setattr("asyncengine.runner.building.make_backend", make)
    monkeypatch.setattr(loading, "layer_kernels", lambda *_: CudaKernels(fake, torch.device("cpu")))
    monkeypatch.setattr(rotary, "compiler_missing", lambda *_: "a GPU has new angles in each step")


@pytest.fixture(scope="module")
def expected(folder: Callable[[str], Path]) -> Callable[[str], Answers]:
    """What the torch backend answers."""

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
    """What is built here runs on torch, whatever `on_flashinfer` has set up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncengine.runner.building.make_backend", make_backend)
        patch.setattr(loading, "layer_kernels", layer_kernels)
        yield


def answers(driver: Driver, chunk: int | None = None, preempt_every: int | None = None) -> Answers:
    jobs = [driver.job(prompt, WANT, SCORED) for prompt in prompts(LENGTHS, VOCAB)]
    outputs = driver.run(jobs, chunk, preempt_every)
    return outputs, [entry.logprob for job in jobs for entry in job.logprobs]


def make_runner(path: Path, **fields: Any) -> ModelRunner:
    config = EngineConfig(**{"page_size": 4, "max_num_seqs": 64, "kv_cache_memory": "24MiB", "device": "cpu", **fields})
    return build_runner(load_model(str(path), config), config)


CASES = [(name, FlashInferBackend) for name in WIDE] + [
    ("qwen2", PaddedBackend),
    ("gemma2", PaddedBackend),
    ("llama4", PaddedBackend),
]


@pytest.mark.parametrize(("name", "on_flashinfer"), CASES, indirect=["on_flashinfer"])
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


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 7, preempted": {"max_num_batched_tokens": 7, "preempt_every": 5},
    "two steps in flight": {"max_steps_in_flight": 2},
}


@pytest.mark.parametrize(
    ("name", "on_flashinfer"), [("gemma2", FlashInferBackend), ("qwen2", PaddedBackend)], indirect=["on_flashinfer"]
)
@pytest.mark.usefixtures("on_flashinfer")
async def test_engine_answers_as_on_torch(name: str, folder: Callable[[str], Path], fake: FakeFlashInfer) -> None:
    """Through the scheduler: shared prefixes, chunks, preemption, a second step launched while one runs."""
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    asked = shared_prompts()
    with torch_backend():
        wanted, _ = await ask(folder(name), asked, params)
    assert fake.calls == {}
    assert len({tuple(tokens) for tokens in wanted}) > 2
    for label, settings in SETTINGS.items():
        found, stats = await ask(folder(name), asked, params, **settings)
        assert found == wanted, label
        assert stats.cached_tokens > 0
        assert stats.preemptions > 0 or "preempted" not in label
    assert fake.memory.waits > 20


def shared_prompts() -> list[list[int]]:
    """Different lengths over page borders and windows; two share two pages."""
    rng = random.Random(4)
    made = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 15, 16, 37)]
    made.append(made[3][:33] + [rng.randrange(3, VOCAB) for _ in range(4)])
    return made


async def ask(path: Path, asked: list[list[int]], params: SamplingParams, **settings: Any) -> tuple[Any, Any]:
    with no_new_engine_thread():
        async with await AsyncEngine.from_pretrained(
            path, dtype="float32", device="cpu", kv_cache_memory="12MB", num_threads=1, **settings
        ) as engine:
            first = await engine.generate(asked[-1], params)
            made = await asyncio.gather(*(engine.generate(prompt, params) for prompt in asked))
            assert made[-1].token_ids == first.token_ids
            return [completion.token_ids for completion in made], engine.stats()
