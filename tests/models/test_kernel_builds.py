"""FlashInfer's modules are built beside the reading of weights: those a model calls, several at once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_flashinfer import FakeModules

from asyncengine.attention.base import LayerSpec
from asyncengine.config import EngineConfig
from asyncengine.layers.kernels import FlashInferKernels, TorchKernels
from asyncengine.models.kernel_builds import building, modules_of
from asyncengine.models.progress import LoadProgress

HALF = torch.bfloat16


def spec(index: int, heads: int = 8, **changes: Any) -> LayerSpec:
    return LayerSpec(index, heads, 4, 64, 64, 0.1, **changes)


def built(layers: list[LayerSpec], *activations: str, dtype: torch.dtype = HALF, **fields: Any) -> list[Any]:
    modules = FakeModules()
    kernels = FlashInferKernels(modules)
    for name in activations:
        kernels.gated(name)
    for work in modules_of(kernels, layers, EngineConfig(device="cpu", **fields), dtype):
        work()
    return modules.built


def test_those_that_the_model_calls() -> None:
    """One of each kind of layer, whatever the number of layers; decodes of 5 heads per kv head use the prefill's."""
    assert built([spec(0), spec(1), spec(2)], "silu", "silu", "relu") == [
        ("prefill", HALF, HALF, 64, False, False), ("decode", HALF, HALF, 64, False, False), ("rope",), ("page",),
        ("silu",),
    ]  # fmt: skip
    layers = [spec(0, heads=20), spec(1, heads=20, window=8, softcap=20.0)]
    eight = torch.float8_e4m3fn
    assert built(layers, "gelu_tanh", kv_cache_dtype="fp8") == [
        ("prefill", HALF, eight, 64, False, False), ("prefill", HALF, eight, 64, True, True),
        ("rope",), ("page",), ("gelu_tanh",),
    ]  # fmt: skip


def test_attention_that_runs_elsewhere_is_not_built() -> None:
    assert built([spec(0, sinks=torch.zeros(8))], "silu") == [("rope",), ("silu",)]
    assert modules_of(TorchKernels(), [spec(0)], EngineConfig(device="cpu"), HALF) == []


def test_several_at_once_beside_what_is_done_meanwhile() -> None:
    """Each waits for the other, and both for the block."""
    both, inside = threading.Barrier(2, timeout=30), threading.Event()
    done: list[str] = []

    def work(name: str) -> None:
        both.wait()
        assert inside.wait(30)
        done.append(name)

    with building([lambda: work("a"), lambda: work("b")], LoadProgress(False)):
        assert not done
        inside.set()
    assert sorted(done) == ["a", "b"], "waited for at the end"


def test_one_that_fails_is_left_to_whoever_calls_it() -> None:
    def broken() -> None:
        raise RuntimeError("Ninja build failed.")

    done: list[int] = []
    with building([broken, lambda: done.append(1)], LoadProgress(False)):
        pass
    assert done == [1]


def test_a_load_that_ends_early_waits_for_none() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go.wait(30)

    def load() -> None:
        with building([slow] * 50, LoadProgress(False)):
            assert begun.wait(30)
            raise KeyError

    with pytest.raises(KeyError):
        load()
    go.set()


def test_the_bar_says_so() -> None:
    said: list[Any] = []
    bar: Any = SimpleNamespace(stage=lambda *words: said.append(words), advance=lambda: said.append(1))
    with building([lambda: None] * 2, bar):
        assert not said
    assert said == [("compiling attention kernels", 2), 1, 1]
