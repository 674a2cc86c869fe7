"""Decode steps as CUDA graphs: one replay instead of hundreds of kernel launches.

Graphs exist for some numbers of rows, captured largest first into one memory pool (as in vLLM and SGLang); a step is
padded to the next larger number. A graph holds the whole step: it gathers each row's last token, computes logits,
samples a token where the sampler has kernels for it, and stores that where the next step gathers it. Graphs read and
write fixed memory only: the inputs of a step are one copy from pinned memory before the replay, its result is one
array. Padding rows compute a token at position 0 of page 0, with a slot and a state slot that no request has. Steps
with prompts, with drafts, or with more rows than the largest graph run without graphs.

Graphs with adapters read each row's slot from fixed memory too (`prompt_graphs.AdaptedGraphs`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.execution.attention.base import StepView
from asyncengine.execution.attention.flashinfer import FlashInferBackend
from asyncengine.execution.device.transfer import CudaMemory, FixedInputs, Int64Array
from asyncengine.execution.layers.states import FIRST, LoneTokens
from asyncengine.execution.runner import step_buffers as steps
from asyncengine.execution.runner.prompt_graphs import AdaptedGraphs, Piece, PieceCapture
from asyncengine.execution.sampling.masks import FilledMasks, StepMasks
from asyncengine.execution.sampling.sampler import Sampler
from asyncengine.kernels.api import row_numbers
from asyncengine.lora.layers.slots import LoraLayers, StepAdapters
from asyncengine.step import Row

# Graphs that sample again for rows of a decode step whose logits are processed: penalties, biases, grammars' masks.
# The graph of the step has sampled for all rows as if no logits were processed; these replace the tokens of a few.


class ProcessedRows:
    """Graphs for 1, 2, 4 ... rows with processed logits, and the memory that they work with."""

    def __init__(
        self, memory: CudaMemory, logits: torch.Tensor, inputs: torch.Tensor,
        chosen: tuple[torch.Tensor, torch.Tensor], last_token: torch.Tensor, sampler: Any, tables: Any,
    ) -> None:  # fmt: skip
        """The arguments are the memory of a step's graph, with one spare row for padding: `logits` [most + 1, vocab],
        `inputs` int64 [most + 1], `chosen`, which is (tokens, largest logits) [most + 1], and `last_token` by slot. The
        last two are replaced for processed rows. `sampler`: a `DeviceSampler`; `tables`: `SlotTables`."""
        self._logits, self._inputs, self._chosen, self._last_token = logits, inputs, chosen, last_token
        self._sampler, self._tables = sampler, tables
        self._most, vocab = len(logits) - 1, logits.shape[1]
        self._words = -(-vocab // 32)
        self._memory = FixedInputs(memory, self._most * (2 * row_numbers.NUMBERS + self._words))
        with torch.inference_mode(False):
            self.changed = torch.empty((self._most, vocab), device=logits.device)
            """Logits of the rows of the last replay, in their order, as tokens were chosen from them."""
            self._tokens = torch.zeros(self._most, dtype=torch.int64, device=logits.device)
            self._best = torch.zeros(self._most, device=logits.device)
        self._padding = np.zeros((row_numbers.NUMBERS, 1), dtype=np.int64)
        self._padding[[row_numbers.SLOT, row_numbers.ROW, row_numbers.MASK], 0] = len(last_token) - 1, self._most, -1
        self._graphs: dict[int, Graph] = {}
        self._taken: torch.Tensor | None = None

    def capture_all(self, capture: Capture) -> None:
        """Capture graphs for 1, 2, 4 ... rows, largest first."""
        sizes = [1 << power for power in range((self._most - 1).bit_length())] + [self._most]
        for size in reversed(sizes):
            self.take(size, 0)
            self._send(size, self._padding[:, :0], 0)
            self._graphs[size] = capture(partial(self._choose, size))

    def choose(
        self, rows: Sequence[Row], numbers: Int64Array, processed: Int64Array, masks: StepMasks | None
    ) -> FilledMasks:
        """Sample again for the rows of a decode step whose indices are `processed`; `numbers` int64 [NUMBERS, rows] are
        the step's (`step_buffers`). Returns the rows' masks."""
        count, filled = 0, FilledMasks.none()
        packed = self.take(len(processed), 0 if masks is None else masks.count)
        if masks is not None:
            count, filled = masks.count, masks.wait(range(len(rows)), packed)
        chosen, numbers = [rows[index] for index in processed.tolist()], numbers[:, processed]
        processed_numbers, kept = self._tables.numbers(
            chosen, numbers[steps.SLOT], numbers[steps.NEXT], processed, self._inputs, decodes=True
        )
        processed_numbers[row_numbers.MASK, np.searchsorted(processed, filled.samples)] = filled.kept
        self.run(processed_numbers, count)
        del kept  # not before the kernels are queued
        return filled

    def take(self, rows: int, masks: int) -> NDArray[np.int32]:
        """Uninitialised memory int32 [masks, ceil(vocab / 32)], from which `run` for `rows` rows sends masks."""
        self._taken = self._memory.take()
        begin = 2 * row_numbers.NUMBERS * self._size(rows)
        filled: NDArray[np.int32] = self._taken[begin : begin + masks * self._words].numpy()
        return filled.reshape(masks, self._words)

    def run(self, numbers: Int64Array, masks: int) -> None:
        """Replay for rows of these `kernels.cuda.row_numbers` [NUMBERS, rows], with `masks` of the masks of `take`."""
        size = self._size(numbers.shape[1])
        self._send(size, numbers, masks)
        self._graphs[size].replay()

    def close(self) -> None:
        """Let go of all graphs."""
        self._graphs.clear()

    def _size(self, rows: int) -> int:
        return min(1 << (rows - 1).bit_length(), self._most) if rows else 1

    def _send(self, size: int, numbers: Int64Array, masks: int) -> None:
        assert self._taken is not None
        sent, rows = 2 * row_numbers.NUMBERS * size, numbers.shape[1]
        sent_numbers: Int64Array = self._taken[:sent].view(torch.int64).numpy().reshape(row_numbers.NUMBERS, size)
        sent_numbers[:, :rows], sent_numbers[:, rows:] = numbers, self._padding
        self._memory.send(sent + masks * self._words)

    def _choose(self, size: int) -> torch.Tensor:
        from asyncengine.kernels.api import gpu

        sent = 2 * row_numbers.NUMBERS * size
        numbers = self._memory.sent[:sent].view(torch.int64).view(row_numbers.NUMBERS, size)
        processed, tokens, best = self.changed[:size], self._tokens[:size], self._best[:size]
        masks = self._memory.sent[sent:]
        gpu.process_logits(self._logits, processed, numbers, masks, self._words, self._inputs)
        self._sampler.sample(processed, numbers[row_numbers.SLOT], numbers[row_numbers.POSITION], tokens, best)
        for into, source, where in (
            (self._chosen[0], tokens, row_numbers.ROW),
            (self._chosen[1], best, row_numbers.ROW),
            (self._last_token, tokens, row_numbers.SLOT),
        ):  # fmt: skip
            into.index_copy_(0, numbers[where], source)
        return tokens


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepAdapters, LoneTokens], torch.Tensor]
"""(input_ids [T], positions [T], logit rows [N], adapters, recurrent states to advance) -> logits [N, vocab]."""


class Graph(Protocol):
    """Captured work."""

    output: torch.Tensor
    """The same memory after every replay."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], torch.Tensor]], Graph]
"""Captures work as a graph: by CUDA, or in tests by a stand-in whose replay calls the work again."""


@dataclass(slots=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def replay(self) -> None:
        self.graph.replay()


_ONE_AT_A_TIME = threading.Lock()
"""A process can capture one graph at a time: beginning a capture synchronizes the device, which breaks a capture in
progress. This lock is all that engines of one process share."""


class CudaCapture:
    """Captures on the device that is current when it is made. All graphs share one memory pool, since only one runs at
    a time.

    It keeps one stream for all captures, since only captures on one stream can share a pool, and another one for
    warm-up runs, whose cached memory would otherwise mix with the pool's.
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
        self._warm(work, current)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may use CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = work()
        return _CudaGraph(graph, output)

    @contextmanager
    def in_pieces(self, work: Callable[[], None]) -> Iterator[PieceCapture]:
        """`prompt_graphs.Pieces`, into the same pool."""
        before = torch.cuda.current_stream()
        with _ONE_AT_A_TIME:
            try:
                self._warm(work, before)
                torch.cuda.synchronize()
                with torch.cuda.stream(self._stream):
                    pieces = _CudaPieces(self._pool)
                    yield pieces
                    pieces.end()
            finally:
                torch.cuda.set_stream(before)  # as above
        before.wait_stream(self._stream)

    def _warm(self, work: Callable[[], object], current: torch.cuda.Stream) -> None:
        """Run the work once outside of a capture: libraries allocate on their first call, which no graph may hold."""
        self._warm_up.wait_stream(current)
        with torch.cuda.stream(self._warm_up):
            work()
        current.wait_stream(self._warm_up)


class _CudaPieces:
    """A `PieceCapture` in the current stream; capturing begins at once."""

    def __init__(self, pool: Any) -> None:
        self.pieces: list[Piece] = []
        self._pool = pool
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may use CUDA meanwhile
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def cut(self) -> None:
        self.end()
        self._begin()

    def end(self) -> None:
        self._graph.capture_end()
        self.pieces.append(self._graph)


def graph_sizes(most: int) -> list[int]:
    """Rows of the graphs for steps of at most `most` rows, ascending: 1, 2, 4, 8, then every eighth up to 256."""
    largest = min(most, 256)
    return [*(size for size in (1, 2, 4, *range(8, 257, 8)) if size < largest), largest]


class DecodeGraphs:
    """The graphs of one runner. `run` is one pure decode step."""

    def __init__(
        self, forward: Forward, backend: FlashInferBackend, lora: LoraLayers | None, sizes: Sequence[int],
        max_num_seqs: int, capture: Capture, sampler: Sampler | None = None, num_states: int = 0,
    ) -> None:  # fmt: skip
        """`sampler`: graphs end with the logits where it is None or has nothing `on_device`. `num_states`: slots of
        recurrent states; those of padding rows go behind them."""
        self._forward = forward
        self.backend = backend
        self._capture = capture
        self._sampler: Any = None if sampler is None else sampler.on_device
        self._tables = None if sampler is None else sampler.tables
        self.sizes = sorted(sizes)
        most = self.sizes[-1]
        self._front = (max_num_seqs + 2) // 2 * 2
        with torch.inference_mode(False):
            words = max(2 * steps.NUMBERS * size + backend.graph_inputs(size) for size in self.sizes)
            self.inputs = FixedInputs(backend.memory, words, kept=2 * self._front)
            self._tokens = self.inputs.device[: 2 * (self._front + steps.NUMBERS * most)].view(torch.int64)
            self.last_token = self._tokens[: max_num_seqs + 1]
            """int64 [max_num_seqs + 1] on the device: the last token of each slot, and of the slot of padding rows."""
            device = self._tokens.device
            self._every = torch.arange(most, device=device)
            self.sampled = torch.zeros(most + 1 + (most + 2) // 2, dtype=torch.int64, device=device)
            """Tokens and largest logits of the last replay's rows (`split`), where graphs sample."""
            self.input_ids = torch.zeros(most + 1, dtype=torch.int64, device=device)
            """Input tokens of the last replay's rows."""
            self._logits = torch.empty(0, device=device)
        self.processed: ProcessedRows | None = None
        """Graphs that sample again for rows with processed logits; None: graphs end with the logits."""
        self._padding = np.array([[max_num_seqs, 0, 0, 1, -1, -1, max_num_seqs, FIRST, num_states, 0]]).T
        no_pages = np.zeros((max_num_seqs + 1, 1), dtype=np.int32)
        self._nothing = steps.DecodeStep(np.zeros((steps.NUMBERS, 0), dtype=np.int64), no_pages, ())
        self._shapes = {
            size: (np.ones(size, dtype=np.int64), np.arange(size + 1), self._fixed(steps.KV_SLOT, size))
            for size in self.sizes
        }
        self._last = 0, 0, np.empty(0, dtype=np.int32)
        """`order` of the step that was sent last, the rows of its graph, and the int32 elements that were sent."""
        self._inputs_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Number of rows -> slots and tokens of the last replay."""
        self._plain: dict[int, Graph] = {}
        self._adapted: AdaptedGraphs[Graph] = AdaptedGraphs(lora, "decode steps")
        self.seconds = 0.0
        """Spent capturing."""

    def capture_all(self, report: Callable[[], None] = lambda: None) -> None:
        """Capture every size, largest first, so that smaller graphs find their memory in the pool; `report` after
        each."""
        for size in reversed(self.sizes):
            self.backend.prepare_graph(size, self.inputs.sent[2 * steps.NUMBERS * size :])
        for size in reversed(self.sizes):
            self._plain[size] = self._captured(size, None)
            report()
        if self._sampler is not None:
            chosen = self.split(self.sampled, self.sizes[-1] + 1)
            fixed = self.backend.memory, self._logits, self.input_ids, chosen, self.last_token
            self.processed = ProcessedRows(*fixed, self._sampler, self._tables)
            self.processed.capture_all(self._capture)
        self._adapted.capture_all(self._captured, self.sizes, report)

    def split(self, sampled: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [rows] and largest logits float32 [rows] in `sampled` or a copy of it."""
        return sampled[:rows], sampled[self.sizes[-1] + 1 :].view(torch.float32)[:rows]

    def restore(self) -> None:
        """Undo the last run's change of `last_token`: each row's slot gets the row's input token back. It needs no
        memory, since it runs when there is none."""
        self.last_token.index_copy_(0, *self._inputs_of[self._size])

    def run(self, step: steps.DecodeStep) -> torch.Tensor | None:
        """Logits [rows, vocab] of a step of at most as many rows as the largest graph has; valid until the next run.
        None: its graph cannot be captured, and nothing was computed."""
        rows = len(step.adapters)
        size = next(size for size in self.sizes if size >= rows)
        graph = self._adapted.find(self._captured, size, step.adapters) if any(step.adapters) else self._plain[size]
        if graph is None:
            return None
        self._send(size, step)
        if self._sampler is not None:
            self._sampler.refresh()
        graph.replay()
        return graph.output[:rows]

    def close(self) -> None:
        """Let go of all graphs."""
        self._plain.clear()
        self._adapted.close()
        if self.processed is not None:
            self.processed.close()
        self._logits = torch.empty(0)

    def _send(self, size: int, step: steps.DecodeStep) -> None:
        """Plan attention, and send the inputs of a step's rows, and of padding rows, to the graph's fixed memory."""
        self._size = size
        host, sent, rows = self.inputs.take(), 2 * steps.NUMBERS * size, len(step.adapters)
        words = host.numpy()
        numbers: Int64Array = words[:sent].view(np.int64).reshape(steps.NUMBERS, size)
        *before, was_sent = self._last
        if step.follows and before == [step.order - 1, size]:
            used = len(was_sent)
            words[:used] = was_sent
            numbers[steps.GROWING, :rows] += 1
            self.backend.advance_graph(size, rows, words[sent:])
        else:
            numbers[:, :rows], numbers[:, rows:] = step.numbers, self._padding
            given = np.flatnonzero(numbers[steps.GIVEN] >= 0)
            numbers[steps.SOURCE] = numbers[steps.SLOT]
            numbers[steps.SOURCE, given] = self._front + steps.GIVEN * size + given
            ones, indptr, kv_slots = self._shapes[size]
            view = StepView(numbers[steps.POSITION], ones, indptr, step.tables, kv_slots, slots=numbers[steps.SLOT])
            used = sent + self.backend.plan_graph(view, host[sent:])
        self.inputs.send(used)
        self._last = step.order, size, words[:used]

    def _fixed(self, which: int, size: int) -> torch.Tensor:
        """One of the numbers, int64 [size], on the device."""
        begin = self._front + which * size
        return self._tokens[begin : begin + size]

    def _captured(self, size: int, lora: LoraLayers | None) -> Graph:
        """Capture a step of padding rows only: capturing runs the step, which would overwrite other slots' tokens."""
        began = time.perf_counter()
        self._send(size, self._nothing)
        named = steps.SLOT, steps.POSITION, steps.ADAPTER, steps.NEXT, steps.SOURCE
        slots, positions, adapters, following, source, *moved = (
            self._fixed(which, size) for which in (*named, steps.STATE_SOURCE, steps.STATE_TARGET)
        )
        states = LoneTokens(slice(None), *moved)
        tokens, best = self.split(self.sampled, size)
        inputs = self.input_ids[:size]
        self._inputs_of[size] = slots, inputs

        def work() -> torch.Tensor:
            loras: StepAdapters = (None, None) if lora is None else lora.begin_fixed(adapters)
            ids = torch.index_select(self._tokens, 0, source, out=inputs)
            logits = self._forward(ids, positions, self._every[:size], loras, states)
            if not self._logits.numel():
                # one buffer for all graphs: the pool cannot share outputs that each graph keeps, more than a gigabyte
                # in all for a vocabulary of 150,000
                self._logits = logits.new_zeros((size + 1, logits.shape[1]))
            kept = self._logits[:size].copy_(logits)
            if self._sampler is not None:
                self._sampler.sample(kept, slots, following, tokens, best)
                self.last_token.index_copy_(0, slots, tokens)
            return kept

        graph = self._capture(work)
        self.seconds += time.perf_counter() - began
        return graph
