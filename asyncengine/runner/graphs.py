"""Decode steps as CUDA graphs: one replay instead of hundreds of kernel launches.

There is a graph for some numbers of rows, captured largest first into one memory pool (vLLM, SGLang); a step is padded
to the next larger one. A graph reads and writes fixed memory only: the step's arrays are copied into it before each
replay, and the logits come out of it. Padding rows compute a token at position 0 of page 0, which belongs to nobody.
Steps with prompts, with scored prompts, or with more rows than the largest graph run without.

Graphs with adapters read each row's slot from fixed memory too. They are captured with the others where memory of
adapters was allocated by then, else when first needed; those of an allocation that has changed since are thrown away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from asyncengine.attention.base import AttentionBackend, StepView
from asyncengine.device.memory import is_out_of_memory
from asyncengine.lora.layers.slots import LoraLayers, StepAdapters
from asyncengine.runner.step_buffers import Step

logger = logging.getLogger("asyncengine")

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepAdapters], torch.Tensor]
"""(input_ids [T], positions [T], logit rows [N], adapters) -> logits [N, vocab]."""


class Graph(Protocol):
    """Captured work."""

    output: torch.Tensor
    """The same memory after every replay."""

    def replay(self) -> None: ...


class Capture(Protocol):
    """What makes graphs: CUDA, or in tests a stand-in that calls the work again."""

    def __call__(self, work: Callable[[], torch.Tensor]) -> Graph: ...


@dataclass(slots=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def replay(self) -> None:
        self.graph.replay()


_ONE_AT_A_TIME = threading.Lock()
"""No state of anybody's: CUDA lets a process capture one graph at a time, because whoever begins waits for the whole
device, and that breaks a capture that goes on there. Engines share nothing else."""


class CudaCapture:
    """Captures on the device that is current when it is made; all graphs share one pool, for only one runs at a time.

    It keeps a stream for capturing, as a pool can be shared only between captures on one stream, and another one for
    what comes before: memory that is cached for a stream is not seen by others.
    """

    def __init__(self) -> None:
        make: Any = torch.cuda.Stream  # untyped in torch
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._warm_up, self._stream = make(), make()
        while self._stream == self._warm_up:  # torch hands out the same streams in turns
            self._stream = make()

    def __call__(self, work: Callable[[], torch.Tensor]) -> Graph:
        before = torch.cuda.current_stream()
        with _ONE_AT_A_TIME:
            try:
                return self._captured(work, before)
            except BaseException:
                # a failed capture cannot be ended either, and then torch leaves the thread on the capture's stream
                torch.cuda.set_stream(before)
                raise

    def _captured(self, work: Callable[[], torch.Tensor], current: torch.cuda.Stream) -> Graph:
        self._warm_up.wait_stream(current)
        with torch.cuda.stream(self._warm_up):  # libraries allocate on their first call, which no graph may hold
            work()
        current.wait_stream(self._warm_up)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may use CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = work()
        return _CudaGraph(graph, output)


def graph_sizes(most: int) -> list[int]:
    """Rows of the graphs for steps of at most `most` rows, ascending: 1, 2, 4, 8, then every eighth up to 256."""
    largest = min(most, 256)
    return [*(size for size in (1, 2, 4, *range(8, 257, 8)) if size < largest), largest]


class DecodeGraphs:
    """The graphs of one runner. `run` is one forward of a pure decode step."""

    def __init__(
        self,
        forward: Forward,
        backend: AttentionBackend,
        lora: LoraLayers | None,
        sizes: Sequence[int],
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._lora = lora
        self._capture = capture
        self.sizes = sorted(sizes)
        most = self.sizes[-1]
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self._input_ids = torch.zeros(most, **whole)
        self._positions = torch.zeros(most, **whole)
        self._kv_slots = torch.zeros(most, **whole)
        self._adapters = torch.full((most,), -1, **whole)
        self._every = torch.arange(most, **whole)
        self._logits = torch.empty(0, device=device)
        self._plain: dict[int, Graph] = {}
        self._adapted: dict[int, Graph] = {}
        self._version = -1
        self._plain_only = lora is None
        self.seconds = 0.0
        """Spent capturing."""

    def capture_all(self, told: Callable[[], None] = lambda: None) -> None:
        """Capture every size, largest first, so that smaller graphs find their memory in the pool; `told` after each.

        With adapters too, where there is memory of adapters already: nobody has to wait for that later.
        """
        for size in reversed(self.sizes):
            self._backend.prepare_graph(size)
        self._make_logits()
        for size in reversed(self.sizes):
            self._plain[size] = self._captured(size, None)
            told()
        if self._lora is None or not self._lora.nbytes:
            return
        self._version = self._lora.version
        try:
            for size in reversed(self.sizes):
                self._backend.plan(_padding(size, self._kv_slots[:size]))
                self._adapted[size] = self._captured(size, self._lora)
                told()
        except Exception as error:
            self._without_adapted(error)

    def size_for(self, step: Step, adapters: Sequence[int]) -> int | None:
        """The graph that `step` fits into, if it does. `adapters`: each row's slot or 0."""
        rows = len(step.view.counts)
        if self._plain_only and any(adapters):
            return None
        if (
            step.prompt_spans
            or rows > self.sizes[-1]
            or len(step.sampling) != rows
            or bool((step.view.counts > 1).any())
        ):
            return None
        return next(size for size in self.sizes if size >= rows)

    def run(self, step: Step, size: int, adapters: Sequence[int]) -> torch.Tensor | None:
        """Logits [rows, vocab] of a step that fits; valid until the next run. None: its graph cannot be captured, and
        nothing was computed."""
        rows = len(step.view.counts)
        for fixed, new in (
            (self._input_ids, step.input_ids),
            (self._positions, step.positions),
            (self._kv_slots, step.view.kv_slots),
        ):
            fixed[:rows].copy_(new)
            fixed[rows:size].zero_()
        self._backend.plan(_padded(step.view, size, self._kv_slots[:size]))
        if not any(adapters):
            graph = self._plain[size]
        else:
            try:
                graph = self._adapted_graph(size, adapters)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._without_adapted(error)
                return None
        graph.replay()
        return graph.output[:rows]

    def close(self) -> None:
        """Let go of all graphs."""
        self._plain.clear()
        self._adapted.clear()
        self._logits = torch.empty(0)

    def _without_adapted(self, error: Exception) -> None:
        logger.warning("decode steps with adapters run without CUDA graphs: %s", error)
        self._adapted.clear()
        self._plain_only = True

    def _adapted_graph(self, size: int, adapters: Sequence[int]) -> Graph:
        assert self._lora is not None
        self._lora.check_slots(adapters)
        if self._lora.version != self._version:  # its memory lies elsewhere now
            self._adapted.clear()
            self._version = self._lora.version
        self._lora.put_slots(self._adapters[:size], adapters)
        if size not in self._adapted:
            self._adapted[size] = self._captured(size, self._lora)
        return self._adapted[size]

    def _make_logits(self) -> None:
        """One memory for the logits of all graphs. Were each to keep its own, the pool could share none of it: more
        than a gigabyte for a vocabulary of 150,000."""
        if self._lora is not None:
            self._lora.begin_none()
        least = self.sizes[0]
        self._backend.plan(_padding(least, self._kv_slots[:least]))
        some = self._forward(self._input_ids[:least], self._positions[:least], self._every[:least], (None, None))
        self._logits = some.new_empty(self.sizes[-1], some.shape[-1])

    def _captured(self, size: int, lora: LoraLayers | None) -> Graph:
        began = time.perf_counter()
        every = self._every[:size]
        if lora is None:  # of padding rows only: what the graph reads must be planned before it is captured
            if self._lora is not None:
                self._lora.begin_none()
            self._backend.plan(_padding(size, self._kv_slots[:size]))

        def work() -> torch.Tensor:
            adapters: StepAdapters = (None, None) if lora is None else lora.begin_fixed(self._adapters[:size])
            logits = self._forward(self._input_ids[:size], self._positions[:size], every, adapters)
            return self._logits[:size].copy_(logits)

        graph = self._capture(work)
        self.seconds += time.perf_counter() - began
        return graph


def _padding(size: int, kv_slots: torch.Tensor) -> StepView:
    """`size` padding rows."""
    starts, counts = np.zeros(size, dtype=np.int64), np.ones(size, dtype=np.int64)
    indptr, tables = np.arange(size + 1, dtype=np.int64), np.zeros((size, 1), dtype=np.int32)
    return StepView(starts, counts, indptr, tables, kv_slots, size)


def _padded(view: StepView, size: int, kv_slots: torch.Tensor) -> StepView:
    """`view` with padding rows up to `size`."""
    rows = len(view.counts)
    padded = _padding(size, kv_slots)
    tables = np.zeros((size, view.page_tables.shape[1]), dtype=np.int32)
    tables[:rows] = view.page_tables
    padded.starts[:rows] = view.starts
    return replace(padded, page_tables=tables)
