"""A closed runner, adapters or not, keeps nothing of the model and nothing on the device, even if it is referred to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.families import family_called, make_checkpoint
from support.fake_gpu import fake_gpu
from support.reachable import tensors_in

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner import model_runner
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    llama = family_called("llama").make(True)
    return make_checkpoint(llama, tmp_path_factory.mktemp("closing") / "llama", torch.bfloat16, 1)


@contextmanager
def no_collection() -> Iterator[None]:
    """Objects that only a collection of garbage would free stay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tensors_of(runner: ModelRunner) -> list[weakref.ref[torch.Tensor]]:
    """The model's weights in whatever form, and what the runner has of its own."""
    return [weakref.ref(value) for value in (*tensors_in(runner.model), runner.last_token)]


@pytest.mark.parametrize("graphs", [False, True])
async def test_nothing_is_kept_after_closing(graphs: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are installed, as they always are, and graphs are captured or not."""
    fake_gpu(monkeypatch)
    engine = await AsyncEngine.from_pretrained(
        folder, dtype="bfloat16", kv_cache_memory="8MiB", cuda_graphs=graphs, max_num_seqs=4, show_progress=False,
        attention_backend="flashinfer" if graphs else "torch",
    )  # fmt: skip
    await engine.generate([3, 4, 5], SamplingParams(max_tokens=4, repetition_penalty=1.2, ignore_eos=True))
    runner: Any = engine.core.loop.runner.executor  # type: ignore[attr-defined]
    assert (runner.graphs is not None) == graphs
    (penalized,) = runner.sampler.tables.penalties.states.values()
    held = [*tensors_of(runner), weakref.ref(penalized.output_counts)]
    del penalized
    assert len(held) > 12
    await engine.aclose()
    gc.collect()  # the GPU's stand-in leaves this to Python
    alive = [kept for kept in held if kept() is not None]
    assert not alive, f"{len(alive)} of {len(held)} tensors are kept by a closed engine"
    assert runner.weights_bytes > 0
    runner.close()
    del engine


@pytest.mark.parametrize("model", ["demo", "demo-embed"])
async def test_closing_frees_the_weights_by_itself(model: str) -> None:
    """Layers are recorded. A collection of garbage may be long in coming: many models are loaded and closed by then."""
    engine = await AsyncEngine.from_pretrained(model, kv_cache_memory="8MiB", num_threads=1, show_progress=False)
    runner: Any = engine.core.loop.runner.executor  # type: ignore[attr-defined]
    if model == "demo":
        await engine.generate([3, 4], SamplingParams(max_tokens=4))
    else:
        await engine.embed("a text")
    layers = runner.model if model == "demo" else runner._model
    assert layers.recorded.records
    held = [weakref.ref(value) for value in tensors_in(layers)]
    del layers
    assert len(held) > 12
    with no_collection():
        await engine.aclose()
        assert not [kept for kept in held if kept() is not None]


def test_where_only_a_collection_frees_it_is_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is not the CPU: nobody sees there that memory is short, and so Python does not collect."""
    config = EngineConfig(kv_cache_memory="8MiB", max_num_seqs=4, show_progress=False, attention_backend="torch")
    runner = build_runner(load_model(str(folder), config), config).runner
    held = tensors_of(runner)
    released: list[torch.device] = []
    monkeypatch.setattr(model_runner, "release_cached", released.append)
    with no_collection():
        runner.device = GPU
        runner.close()
        assert not [kept for kept in held if kept() is not None]
    assert released == [GPU]
