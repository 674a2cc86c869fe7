"""Steps with prompts as CUDA graphs in pieces: the work between two attentions is captured, attention is launched.

Launching the kernels of a step of 28 layers one by one from Python takes the host 14 to 25 ms, whatever the size of the
step, and the GPU needs a tenth of that: when requests arrive all the time, nearly every step has a prompt, and the host
limits the throughput. Attention depends on the lengths of the rows, which differ from step to step, so it stays outside
of the graphs (vLLM's piecewise graphs). Everything else depends on the number of tokens only: there are graphs for some
numbers, and a step is padded to the next one. The forward is not written a second time: it runs under capture, and
wherever it attends, one graph ends and the next begins.

Padding tokens stand at position 0 of page 0, which no request owns, and are not attended to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from asyncengine.execution.attention.base import AttentionBackend
from asyncengine.execution.attention.flashinfer import FlashInferBackend
from asyncengine.execution.device.memory import is_out_of_memory
from asyncengine.execution.device.transfer import FixedInputs, Int64Array
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.runner.step_buffers import FlatStep
from asyncengine.lora.layers.slots import LoraLayers
from asyncengine.step import Batch

LARGEST = 2048
"""Tokens of the largest graphs. A larger step keeps the GPU busy for longer than the host needs to launch it."""


class Piece(Protocol):
    """Captured work without a result: it writes where it was captured to write."""

    def replay(self) -> None: ...


class PieceCapture(Protocol):
    """A capture that goes on, in pieces."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """All of them, once the capture has ended."""
        ...

    def cut(self) -> None:
        """End one piece and begin the next."""
        ...


Pieces = Callable[[Callable[[], None]], AbstractContextManager[PieceCapture]]
"""Runs the work once outside of any graph. Within the context the caller runs it again, and that run is captured."""


class _Cut(NamedTuple):
    """One attention between two pieces."""

    layer: int
    heads: int
    head_dim: int


class _Size(NamedTuple):
    """The graphs of one number of tokens: a piece before each cut, and one after the last."""

    tokens: int
    pieces: Sequence[Piece]
    cuts: Sequence[_Cut]


def prompt_graph_sizes(most: int) -> list[int]:
    """Tokens of the graphs for steps of at most `most` tokens, ascending: padding is at most half of a small step, or a
    fifth of a large one."""
    largest = min(most, LARGEST)
    sizes = (32, 64, *range(128, 1024, 128), *range(1024, LARGEST + 1, 256))
    return [*(size for size in sizes if size < largest), largest]


def may_be_cut(model: object, backend: AttentionBackend) -> bool:
    """Whether the work between two attentions is independent of the lengths of the rows: each token's key and value are
    written by its KV slot (`attend_merged`), and no layer keeps a state."""
    if not isinstance(model, Decoder) or model.states or getattr(backend, "attend_merged", None) is None:
        return False
    attentions = [layer.attention for layer in model.layers if layer.attention is not None]
    return bool(attentions) and all(
        layer.merged is not None or getattr(layer.config, "keys_of", None) is not None for layer in attentions
    )


_GIVEN, _SLOT, _POSITION, _KV_SLOT, _ADAPTER = range(5)
"""Rows of a graph's inputs, int64 for each token: its id if the host knows it; its slot if the id is still on the
device, else -1; its position; its KV slot; its adapter's slot counted from 0, or -1."""
_NUMBERS = 5


class PromptGraphs:
    """The graphs of one runner. `run` is one step up to its hidden states."""

    def __init__(
        self, model: Decoder, backend: FlashInferBackend, last_token: torch.Tensor, sizes: Sequence[int],
        capture: Pieces, lora: LoraLayers | None,
    ) -> None:  # fmt: skip
        """`last_token`: int64 [slots], the tokens in flight, always at the same address."""
        self._model, self._backend, self._capture = model, backend, capture
        self._last_token = last_token
        self.sizes = sorted(sizes)
        self._inputs = FixedInputs(backend.memory, 2 * _NUMBERS * self.sizes[-1])
        self._graphs: dict[int, _Size] = {}
        self._adapted: AdaptedGraphs[_Size] = AdaptedGraphs(lora, "steps with prompts")
        with torch.inference_mode(False):
            widest = max(spec.num_heads * spec.key_dim for spec in model.specs)
            memory = torch.zeros(2, self.sizes[-1] * widest, dtype=model.dtype, device=last_token.device)
        self._query, self._attended = memory
        """Queries and results of attention, of one layer at a time: layers attend one after the other."""
        self._out = torch.empty(0)

    def capture_all(self, report: Callable[[], None] = lambda: None) -> None:
        """Capture every size, largest first, so that smaller ones find memory in the pool; `report` after each."""
        for size in reversed(self.sizes):
            self._graphs[size] = self._captured(size, None)
            report()
        self._adapted.capture_all(self._captured, self.sizes, report)

    def hold(self, batch: Batch) -> bool:
        """Whether `run` takes this step."""
        if not 0 < batch.num_tokens <= self.sizes[-1]:
            return False
        return self._find(batch.num_tokens, [row.adapter_slot for row in batch.rows]) is not None

    def run(self, step: FlatStep) -> torch.Tensor:
        """Hidden states [T, width] of a step of at most as many tokens as the largest graphs have; they are valid until
        the next run."""
        count = len(step.tokens)
        graphs = self._find(count, step.adapters)
        assert graphs is not None
        size, pieces, cuts = graphs
        self._send(size, step)
        self._backend.plan(step.view(self._number(size, _KV_SLOT)[:count]))
        shapes: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for piece, (layer, heads, dim) in zip(pieces, cuts, strict=False):
            piece.replay()
            views = shapes.get((heads, dim))
            if views is None:
                views = shapes[heads, dim] = self._views(count, heads, dim)
            self._backend.attend_into(layer, *views)
        pieces[-1].replay()
        return self._out[:count]

    def close(self) -> None:
        """Let go of all graphs."""
        self._graphs.clear()
        self._adapted.close()
        self._query = self._attended = self._out = torch.empty(0)

    def _find(self, count: int, adapters: Sequence[int]) -> _Size | None:
        size = next(size for size in self.sizes if size >= count)
        return self._adapted.find(self._captured, size, adapters) if any(adapters) else self._graphs[size]

    def _send(self, size: int, step: FlatStep | None) -> None:
        """Send the inputs of a step's tokens to the graphs' fixed memory; None: all tokens are padding."""
        host = self._inputs.take()[: 2 * _NUMBERS * size]
        numbers: Int64Array = host.view(torch.int64).numpy().reshape(_NUMBERS, size)
        numbers[:] = 0
        numbers[_SLOT] = numbers[_ADAPTER] = -1
        if step is not None:
            count = len(step.tokens)
            numbers[_GIVEN, :count] = step.tokens
            numbers[_POSITION, :count] = step.positions
            numbers[_KV_SLOT, :count] = step.kv_slots
            numbers[_ADAPTER, :count] = np.repeat(step.adapters, step.counts) - 1
            tokens, slots = step.in_flight
            numbers[_SLOT, tokens] = slots
        self._inputs.send(2 * _NUMBERS * size)

    def _number(self, size: int, which: int) -> torch.Tensor:
        """One of the numbers, int64 [size], on the device."""
        words = self._inputs.sent[2 * which * size : 2 * (which + 1) * size]
        return words.view(torch.int64)

    def _views(self, count: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and what they attend to, both [count, heads, dim], in the memory that all layers share."""
        numbers = count * heads * dim
        return self._query[:numbers].view(count, heads, dim), self._attended[:numbers].view(count, heads, dim)

    def _captured(self, size: int, lora: LoraLayers | None) -> _Size:
        self._send(size, None)
        cuts: list[_Cut] = []
        captures: list[PieceCapture] = []
        kv_slots = self._number(size, _KV_SLOT)

        def cut(layer: int, query: torch.Tensor) -> torch.Tensor:
            """Stand in for attention: copy the queries to where it will read them, and return the memory that it will
            write."""
            queries, attended = self._views(*query.shape)
            queries.copy_(query)
            for capture in captures:  # empty during the warm-up run
                cuts.append(_Cut(layer, *query.shape[1:]))
                capture.cut()
            return attended

        def work() -> None:
            adapters = None if lora is None else lora.begin_fixed(self._number(size, _ADAPTER))[0]
            given, slots = self._number(size, _GIVEN), self._number(size, _SLOT)
            flying = self._last_token.index_select(0, slots.clamp(min=0))
            ids = torch.where(slots >= 0, flying, given)
            with self._backend.cut_at(cut, kv_slots):
                step = StepContext(self._number(size, _POSITION), self._backend, adapters)
                hidden = self._model.hidden_states(ids, step)
            if not self._out.numel():
                self._out = torch.zeros_like(hidden)
            self._out[:size].copy_(hidden)

        with self._capture(work) as capture:
            captures.append(capture)
            work()
        return _Size(size, capture.pieces, tuple(cuts))


# Graphs of steps with adapters. Steps without adapters have graphs of their own, which skip the adapters' products.

logger = logging.getLogger("asyncengine")

G = TypeVar("G")


class AdaptedGraphs(Generic[G]):
    """Graphs with adapters, by size. They are captured with the others if adapters' memory is allocated by then, else
    when first needed. Graphs hold that memory's address, so they are thrown away when it is allocated anew."""

    def __init__(self, lora: LoraLayers | None, steps: str) -> None:
        """`steps`: words for the steps in log messages."""
        self._lora, self._steps = lora, steps
        self._graphs: dict[int, G] = {}
        self._version = -1

    def capture_all(
        self, capture: Callable[[int, LoraLayers], G], sizes: Sequence[int], report: Callable[[], None]
    ) -> None:
        """Capture every size, largest first, if adapters' memory is allocated: no request has to wait for it then."""
        if self._lora is None or not self._lora.nbytes:
            return
        self._version = self._lora.version
        try:
            for size in reversed(sizes):
                self._graphs[size] = capture(size, self._lora)
                report()
        except Exception as error:
            self._give_up(error)

    def find(self, capture: Callable[[int, LoraLayers], G], size: int, slots: Sequence[int]) -> G | None:
        """The graph of this size for a step whose rows use `slots`, 0 for none. None: it cannot be captured.

        `capture` is a method of this object's owner: it is an argument so that the two do not refer to each other.

        Raises `InvariantViolation` for an empty slot, and out-of-memory errors of the capture.
        """
        if self._lora is None:
            return None
        self._lora.check_slots(slots)
        if self._lora.version != self._version:  # adapters' memory has moved
            self._graphs.clear()
            self._version = self._lora.version
        if size not in self._graphs:
            try:
                self._graphs[size] = capture(size, self._lora)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._give_up(error)
                return None
        return self._graphs[size]

    def close(self) -> None:
        """Let go of all graphs."""
        self._graphs.clear()

    def _give_up(self, error: Exception) -> None:
        logger.warning("%s with adapters run without CUDA graphs: %s", self._steps, error)
        self._graphs.clear()
        self._lora = None
