"""Engines as on a GPU, on CPU: the FlashInfer backend on fake kernels, decode steps as stand-ins for CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fake_flashinfer import FakeFlashInfer, FakeMemory

from asyncengine.execution import api
from asyncengine.execution.attention.base import AttentionBackend
from asyncengine.execution.attention.factory import kv_dtype
from asyncengine.execution.attention.flashinfer import FlashInferBackend
from asyncengine.execution.attention.flashinfer_plan import why_not
from asyncengine.execution.layers.kernels import LayerKernels
from asyncengine.execution.models import loading
from asyncengine.execution.runner import building
from asyncengine.execution.runner.graphs import DecodeGraphs, graph_sizes
from asyncengine.lora.layers import slots


class Again:
    """A captured graph: its replay does the work anew."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self.work = work
        self.output = work()

    def replay(self) -> None:
        self.output = self.work()


def refusing(make: Callable[..., LayerKernels]) -> Callable[..., LayerKernels]:
    """`layer_kernels` whose kernels refuse tensors without rows, as all of a GPU's do."""

    def guarded(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor, *arguments: Any) -> Any:
            FakeFlashInfer.refuse_empty(kernel.__name__, x)
            return kernel(x, *arguments)

        return run

    def layer_kernels(*arguments: Any) -> LayerKernels:
        made = make(*arguments)
        for name in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"):
            setattr(made, name, guarded(getattr(made, name)))
        return made

    return layer_kernels


def fake_gpu(monkeypatch: pytest.MonkeyPatch, capture: Any = Again) -> Counter[str]:
    """Every engine built from now on; counts what ran. What cannot run on FlashInfer stays on torch."""
    calls: Counter[str] = Counter()
    make, build, install, run = (
        building.make_backend, building.build_runner, slots.LoraLayers, DecodeGraphs.run,
    )  # fmt: skip

    def make_backend(
        config: Any, layers: Any, pages: int, dtype: torch.dtype, device: torch.device,
        max_model_len: int | None = None, **more: Any,
    ) -> AttentionBackend:  # fmt: skip
        if config.attention_backend == "torch" or why_not(layers, dtype, config.page_size):
            return make(config, layers, pages, dtype, device, max_model_len, **more)
        calls["flashinfer"] += 1
        memory = FakeMemory()
        longest = min(pages, -(-(max_model_len or pages) // config.page_size))
        return FlashInferBackend(
            layers, pages, config.page_size, dtype, device, max_rows=config.max_num_seqs, max_pages_per_row=longest,
            kv_dtype=kv_dtype(config.kv_cache_dtype, dtype), flashinfer=FakeFlashInfer(memory), memory=memory,
        )  # fmt: skip

    def build_runner(model: Any, config: Any, **options: Any) -> Any:
        built = build(model, config, **options)
        if config.cuda_graphs and built.runner.attention_backend == "flashinfer" and not model.states:
            built.runner.use_graphs(graph_sizes(min(config.max_num_seqs, config.max_num_batched_tokens)), capture)
        return built

    def counted(self: DecodeGraphs, step: Any) -> Any:
        calls["graphs"] += 1
        return run(self, step)

    monkeypatch.setattr(loading, "layer_kernels", refusing(loading.layer_kernels))
    monkeypatch.setattr(building, "make_backend", make_backend)
    monkeypatch.setattr(api, "build_runner", build_runner)
    monkeypatch.setattr(api, "LoraLayers", lambda *arguments: install(*arguments, masked=True))
    monkeypatch.setattr(DecodeGraphs, "run", counted)
    return calls
