"""The FlashInfer backend beside the torch one, both given the same random steps over the same shuffled pages.

The torch backend always computes in float32, so that only one of the two rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from asyncengine.attention.base import LayerSpec, StepView
from asyncengine.attention.flashinfer import FlashInferBackend
from asyncengine.attention.torch_paged import TorchPagedBackend
from asyncengine.device.pinned import FixedInputs

CPU = torch.device("cpu")


class Pair:
    """Rows with page tables of their own, appended to in both backends. Page 0 is nobody's."""

    def __init__(
        self,
        flashinfer: FlashInferBackend,
        layers: Sequence[LayerSpec],
        rows: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        most: int = 100,
        seed: int = 0,
    ) -> None:
        self.flashinfer = flashinfer
        self.torch = TorchPagedBackend(layers, flashinfer.num_pages, flashinfer.page_size, torch.float32, device)
        self.layers = layers
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths = [0] * rows
        pages = (torch.randperm(flashinfer.num_pages - 1, generator=self.generator) + 1).tolist()
        each = -(-most // flashinfer.page_size)
        assert each * rows <= len(pages)
        self.fixed: FixedInputs | None = None
        """What `prepare` has made of the backend's graphs."""
        self.tables = [[pages.pop() for _ in range(each)] for _ in range(rows)]

    def random(self, *shape: int, spread: float = 1.0) -> torch.Tensor:
        """On the device and in the dtype of the pair; as a view with room between heads, as models hand them over."""
        tokens, heads, dim = shape
        wide = spread * torch.randn((tokens, heads + 1, dim), generator=self.generator)
        return wide.to(self.dtype).to(self.device)[:, :heads]

    def view(self, parts: Sequence[tuple[int, int]], padded: int | None = None) -> StepView:
        """(row, count) each; `padded` rows in all, as a decode graph of that size wants them."""
        size = self.flashinfer.page_size
        extra = 0 if padded is None else padded - len(parts)
        starts = np.array([self.lengths[row] for row, _ in parts] + [0] * extra, dtype=np.int64)
        counts = np.array([count for _, count in parts] + [1] * extra, dtype=np.int64)
        width = int(-(-(starts + counts).max() // size))
        # what a row does not use is arbitrary: the pages of others, here
        tables = [(self.tables[row] * 2)[:width] for row, _ in parts] + [[0] + [7] * (width - 1)] * extra
        slots = [
            self.tables[row][at // size] * size + at % size
            for row, count in parts
            for at in range(self.lengths[row], self.lengths[row] + count)
        ]
        return StepView(
            starts,
            counts,
            np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
            np.array(tables, dtype=np.int32),
            torch.tensor(slots + [0] * extra, device=self.device),
        )

    def plan(self, parts: Sequence[tuple[int, int]], padded: int | None = None) -> StepView:
        view = self.view(parts, padded)
        if padded is None:
            self.flashinfer.plan(view)
        else:
            assert self.fixed is not None, "`prepare` comes first"
            plan_graph(self.flashinfer, self.fixed, view)
        self.torch.plan(view)
        return view

    def inputs(self, spec: LayerSpec, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kv = (tokens, spec.num_kv_heads, spec.key_dim)
        return self.random(tokens, spec.num_heads, spec.key_dim, spread=2.0), self.random(*kv), self.random(*kv)

    def expected(self, spec: LayerSpec, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        query, key, value = (part.float() for part in parts)
        self.torch.write(spec.index, key, value)
        return self.torch.attend(spec.index, query)

    def step(self, parts: Sequence[tuple[int, int]], padded: int | None = None) -> float:
        """Append `count` tokens to each row in every layer; the largest error over all real rows and layers."""
        view = self.plan(parts, padded)
        real = sum(count for _, count in parts)
        error = 0.0
        for spec in self.layers:
            inputs = self.inputs(spec, len(view.kv_slots))
            self.flashinfer.write(spec.index, inputs[1], inputs[2])
            found = self.flashinfer.attend(spec.index, inputs[0])
            assert bool(found.isfinite().all()), "padding rows too"
            wanted = self.expected(spec, inputs)
            error = max(error, float((found[:real].float() - wanted[:real].float()).abs().max()))
        self.advance(parts)
        return error

    def advance(self, parts: Sequence[tuple[int, int]]) -> None:
        for row, count in parts:
            self.lengths[row] += count


def prepare(backend: FlashInferBackend, *sizes: int) -> FixedInputs:
    """Make what graphs of these sizes read, the largest first. They must be all that there will be."""
    inputs = FixedInputs(backend.memory, backend.graph_inputs(sizes[0]))
    for size in sizes:
        backend.prepare_graph(size, inputs.sent)
    return inputs


def plan_graph(backend: FlashInferBackend, inputs: FixedInputs, view: StepView) -> None:
    """Plan for a step of as many rows as a graph has, and send what the graph reads."""
    order = np.arange(len(view.starts))[::-1].copy()
    tables = np.concatenate((view.page_tables[::-1], np.full_like(view.page_tables, 5)))
    inputs.send(backend.plan_graph(replace(view, page_tables=tables, slots=order), inputs.take()))


def make_flashinfer(layers: Sequence[LayerSpec], fake: Any, **changes: Any) -> FlashInferBackend:
    """A backend on the fake module, float32 unless said otherwise, 140 pages of 4 tokens."""
    options: dict[str, Any] = {
        "num_pages": 140, "page_size": 4, "dtype": torch.float32, "device": CPU, "max_rows": 16,
        "max_pages_per_row": 30, "flashinfer": fake, "memory": fake.memory, **changes,
    }  # fmt: skip
    return FlashInferBackend(layers, **options)
