"""FlashInfer backends on the stand-in for its module, and what graphs of them read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.attention.flashinfer import FlashInferBackend
from asyncengine.execution.device.pinned import FixedInputs
from tools.gpucheck.pairs import CPU, Pair, plan_graph

__all__ = ["CPU", "Pair", "make_flashinfer", "plan_graph", "prepare"]


def prepare(backend: FlashInferBackend, *sizes: int) -> FixedInputs:
    """Make what graphs of these sizes read, the largest first. They must be all that there will be."""
    inputs = FixedInputs(backend.memory, backend.graph_inputs(sizes[0]))
    for size in sizes:
        backend.prepare_graph(size, inputs.sent)
    return inputs


def make_flashinfer(layers: Sequence[LayerSpec], fake: Any, **changes: Any) -> FlashInferBackend:
    """A backend on the fake module, float32 unless said otherwise, 140 pages of 4 tokens."""
    options: dict[str, Any] = {
        "num_pages": 140, "page_size": 4, "dtype": torch.float32, "device": CPU, "max_rows": 16,
        "max_pages_per_row": 30, "flashinfer": fake, "memory": fake.memory, **changes,
    }  # fmt: skip
    return FlashInferBackend(layers, **options)
