"""A runner on fake kernels, and a stand-in for CUDA graphs.

The stand-in calls the captured work again at each replay and copies the result to where it was, so whatever the work
reads from fixed memory is current and whatever it closed over is what it was at capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.fake_flashinfer import FakeFlashInfer, FakeMemory

from asyncengine.config import EngineConfig
from asyncengine.execution.attention.flashinfer import FlashInferBackend
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.lora.layers.slots import LoraLayers


@dataclass
class Recalled:
    """A `Graph`."""

    work: Callable[[], torch.Tensor]
    output: torch.Tensor
    capture: Recall

    def replay(self) -> None:
        self.capture.replays.append(self.output.shape[0])
        self.output.copy_(self.work())


class Recall:
    """A `Capture`."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replays: list[int] = []

    def __call__(self, work: Callable[[], torch.Tensor]) -> Recalled:
        output = work().clone()
        self.captured.append(output.shape[0])
        return Recalled(work, output, self)


def on_fakes(
    path: Path, lora: Callable[[Any], LoraLayers | None] = lambda module: None, *, num_states: int = 0,
    attention: Callable[[FlashInferBackend], object] = lambda backend: None,
) -> ModelRunner:  # fmt: skip
    """A runner with pages of 4 tokens, and states if the model keeps any; `attention` is called with its backend."""
    config = EngineConfig(page_size=4, max_num_seqs=64, num_threads=1)
    model = load_model(str(path), config)
    fake = FakeFlashInfer(FakeMemory())
    backend = FlashInferBackend(
        model.layers, 600, 4, model.dtype, model.device, max_rows=64, max_pages_per_row=64, flashinfer=fake,
        memory=fake.memory,
    )  # fmt: skip
    attention(backend)
    return ModelRunner(model, backend, 64, lora=lora(model.model), num_states=num_states if model.states else 0)
