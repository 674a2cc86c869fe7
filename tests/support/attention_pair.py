"""Two attention backends side by side, given the same random steps over the same shuffled pages.

One is under test, the other is the torch backend in float32, so that only one of the two rounds. Keys and values of the
reference are rounded to the type that the tested backend stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from asyncengine.execution.attention.base import AttentionBackend, LayerSpec, StepView
from asyncengine.execution.attention.flashinfer import FlashInferBackend
from asyncengine.execution.attention.torch_paged import TorchPagedBackend
from asyncengine.execution.device.transfer import FixedInputs
from asyncengine.execution.runner.graphs import Capture, Graph

CPU = torch.device("cpu")
Parts = Sequence[tuple[int, int]]
"""(row, number of new tokens) each."""
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value of a layer."""


@dataclass(slots=True)
class Captured:
    """A decode graph over all layers, and the fixed tensors it reads."""

    graph: Graph
    inputs: list[Inputs]
    """Inputs of each layer."""


class Pair:
    """Rows that grow in both backends, with page tables of their own. Page 0 is nobody's; `most` tokens at most in a
    row."""

    def __init__(
        self,
        tested: AttentionBackend,
        layers: Sequence[LayerSpec],
        rows: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        stored: torch.dtype | None = None,
        most: int = 100,
        seed: int = 0,
    ) -> None:
        """`stored`: type of the tested backend's KV memory, if it is not `dtype`."""
        self.tested = tested
        self.page_size = cast(FlashInferBackend, tested).page_size
        self.reference = TorchPagedBackend(layers, tested.num_pages, self.page_size, torch.float32, device)
        self.layers = layers
        self.lengths = [0] * rows
        self.fixed: FixedInputs | None = None
        """Inputs of the tested backend's graphs, made by `prepare`."""
        self._dtype, self._device = dtype, device
        self._stored = stored or dtype
        self._random = torch.Generator().manual_seed(seed)
        pages = (torch.randperm(tested.num_pages - 1, generator=self._random) + 1).tolist()
        each = -(-most // self.page_size)
        assert each * rows <= len(pages)
        self.tables = [pages[row * each : (row + 1) * each] for row in range(rows)]
        self._graphs: dict[int, Captured] = {}

    def step(self, parts: Parts, padded: int | None = None) -> float:
        """Append to the rows of `parts` in every layer; the largest error over all real rows and layers."""
        view = self.plan(parts, padded)
        real = sum(count for _, count in parts)
        error = 0.0
        for spec in self.layers:
            query, key, value = self.inputs(spec, len(view.kv_slots))
            self.tested.write(spec.index, key, value)
            found = self.tested.attend(spec.index, query)
            error = max(error, _difference(found, self.expected(spec, (query, key, value)), real))
        self.advance(parts)
        return error

    def capture(self, size: int, capture: Capture) -> None:
        """Capture a decode step of `size` rows, all padding; sizes in descending order."""
        tested = cast(FlashInferBackend, self.tested)
        if self.fixed is None:
            self.fixed = FixedInputs(tested.memory, tested.graph_inputs(size))
        tested.prepare_graph(size, self.fixed.sent)
        inputs = [self.inputs(spec, size) for spec in self.layers]
        self.plan([], size)

        def work() -> torch.Tensor:
            outs = []
            for spec, (query, key, value) in zip(self.layers, inputs, strict=True):
                self.tested.write(spec.index, key, value)
                outs.append(self.tested.attend(spec.index, query).flatten(1))
            return torch.cat(outs, dim=1)

        self._graphs[size] = Captured(capture(work), inputs)

    def replay(self, rows: Sequence[int], size: int) -> float:
        """One decode of `rows`, padded to the captured `size`; the largest error over the real rows."""
        captured = self._graphs[size]
        for spec, fixed in zip(self.layers, captured.inputs, strict=True):
            for tensor, fresh in zip(fixed, self.inputs(spec, size), strict=True):
                tensor.copy_(fresh)
        parts = [(row, 1) for row in rows]
        self.plan(parts, size)
        captured.graph.replay()
        widths = [spec.num_heads * spec.value_dim for spec in self.layers]
        error = 0.0
        outs = torch.split(captured.graph.output, widths, dim=1)
        for spec, inputs, out in zip(self.layers, captured.inputs, outs, strict=True):
            expected = self.expected(spec, inputs)
            error = max(error, _difference(out.view(expected.shape), expected, len(rows)))
        self.advance(parts)
        return error

    def close(self) -> None:
        self._graphs.clear()
        self.tested.close()
        self.reference.close()

    def plan(self, parts: Parts, padded: int | None = None) -> StepView:
        """Plan the next step in both backends: for a graph of `padded` rows, or without one."""
        view = self.view(parts, padded)
        if padded is None:
            self.tested.plan(view)
        else:
            assert self.fixed is not None, "a graph's memory comes first"
            plan_graph(cast(FlashInferBackend, self.tested), self.fixed, view)
        self.reference.plan(view)
        return view

    def view(self, parts: Parts, padded: int | None = None) -> StepView:
        """The step of `parts`; `padded` rows in all, as a decode graph of that size wants them."""
        size = self.page_size
        extra = 0 if padded is None else padded - len(parts)
        starts = np.array([self.lengths[row] for row, _ in parts] + [0] * extra, dtype=np.int64)
        counts = np.array([count for _, count in parts] + [1] * extra, dtype=np.int64)
        width = int((-(-(starts + counts) // size)).max())
        # what a row does not use is arbitrary: the pages of others, here
        tables = [(self.tables[row] * 2)[:width] for row, _ in parts] + [[0] + [7] * (width - 1)] * extra
        slots = [
            self.tables[row][at // size] * size + at % size
            for row, count in parts
            for at in range(self.lengths[row], self.lengths[row] + count)
        ]
        kv_slots = torch.tensor(slots + [0] * extra, dtype=torch.int64, device=self._device)
        ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        return StepView(starts, counts, ends, np.array(tables, dtype=np.int32), kv_slots)

    def inputs(self, spec: LayerSpec, tokens: int) -> Inputs:
        """Random query, key and value of `tokens` tokens."""
        heads = ((spec.num_heads, spec.key_dim, 2.0), (spec.num_kv_heads, spec.key_dim, 1.0),
                 (spec.num_kv_heads, spec.value_dim, 1.0))  # fmt: skip
        query, key, value = (self._values(tokens, count, dim, spread) for count, dim, spread in heads)
        return query, key, value

    def _values(self, tokens: int, heads: int, dim: int, spread: float) -> torch.Tensor:
        """Values in a view with room between tokens, as models hand them over."""
        wide = spread * torch.randn((tokens, heads + 1, dim), generator=self._random)
        return wide.to(self._dtype).to(self._device)[:, :heads]

    def expected(self, spec: LayerSpec, inputs: Inputs) -> torch.Tensor:
        """Results of the reference for the same query, key and value, which it writes to its own pages."""
        query, key, value = inputs
        self.reference.write(spec.index, key.to(self._stored).float(), value.to(self._stored).float())
        return self.reference.attend(spec.index, query.float())

    def advance(self, parts: Parts) -> None:
        """Count the tokens of a step as computed."""
        for row, count in parts:
            self.lengths[row] += count


def plan_graph(backend: FlashInferBackend, inputs: FixedInputs, view: StepView) -> None:
    """Plan for a step of as many rows as a graph has, whose tables lie in another order, and send what the graph
    reads."""
    order = np.arange(len(view.starts))[::-1].copy()
    tables = np.concatenate((view.page_tables[::-1], np.full_like(view.page_tables, 5)))
    inputs.send(backend.plan_graph(replace(view, page_tables=tables, slots=order), inputs.take()))


def _difference(found: torch.Tensor, expected: torch.Tensor, real: int) -> float:
    """Over the first `real` rows; the rest need only be finite."""
    if found.shape != expected.shape:
        raise AssertionError(f"attention has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not bool(found.isfinite().all()):
        raise AssertionError("attention is not finite")
    return float((found[:real].float() - expected[:real]).abs().max())


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
