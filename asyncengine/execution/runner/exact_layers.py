"""The engine's decoder for a trainer: it computes whole sequences from their first token on, and keeps every layer's
input for the backward pass.

Nothing is cached between calls. The trainer's weights, and its adapter's factors, are taken in the same way as by
`update_weights` and `load_adapter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.execution.attention.base import StepView
from asyncengine.execution.attention.cpu import CompiledBackend
from asyncengine.execution.device.arena import Arena
from asyncengine.execution.device.cores import Cores
from asyncengine.execution.device.transfer import Int64Array
from asyncengine.execution.layers.states import StatePools, StateSegments, StateStep
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.runner.model_memory import prepare_update
from asyncengine.lora.layers.slots import LoraLayers, StepAdapters
from asyncengine.seams import ModuleDims


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Sequences of a padded batch [B, S], concatenated: T tokens in R rows. A row of the batch that is all padding is
    left out."""

    ids: torch.Tensor
    """int64 [T]."""
    counts: Int64Array
    """[R] tokens of each, >= 1."""
    indices: torch.Tensor
    """int64 [T]: index of each token in the flattened batch."""
    rows: torch.Tensor
    """int64 [T]: the row of each token."""
    positions: torch.Tensor
    """int64 [T]: the token's position in its row."""

    def aligned(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[R, longest, ...] of values [T, ...]: rows padded with zeros at their ends. A causal model needs no mask for
        them, as no token sees later ones."""
        shape = (len(self.counts), int(self.counts.max()), *values.shape[1:])
        return torch.zeros(shape, dtype=dtype or values.dtype).index_put(
            (self.rows, self.positions), values.to(dtype or values.dtype)
        )

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """[T, ...] of values [R, longest, ...]."""
        return values[self.rows, self.positions]


def read_sequences(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, vocab: int, most: int) -> Sequences:
    """The sequences of int64 input_ids [B, S], whose tokens `attention_mask` [B, S] marks; None: there is no padding.

    Raises `InvalidParameter` for other shapes, an empty batch, an id that is not below `vocab`, a sequence of more than
    `most` tokens, and for a mask with a hole: tokens that are not side by side are no sequence.
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise InvalidParameter("input_ids", "must be integers [batch, length]", tuple(input_ids.shape))
    taken = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    if taken.shape != input_ids.shape:
        raise InvalidParameter("attention_mask", "must have the shape of input_ids", tuple(taken.shape))
    if bool(((taken[:, 1:] & ~taken[:, :-1]).sum(1) + taken[:, 0] > 1).any()):
        raise InvalidParameter("attention_mask", "must mark the tokens of each row side by side, without a hole")
    lengths = taken.sum(1)
    counts = lengths[lengths > 0].numpy().astype(np.int64)
    indices = taken.flatten().nonzero()[:, 0]
    ids = input_ids.flatten()[indices].to(torch.int64)
    if not counts.size or counts.max() > most:
        raise InvalidParameter("input_ids", f"must be sequences of 1 to {most} tokens", int(counts.max(initial=0)))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise InvalidParameter("input_ids", f"must be from 0 to {vocab - 1}", (int(ids.min()), int(ids.max())))
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Sequences(ids, counts, indices, torch.from_numpy(rows), torch.from_numpy(positions))


_SLOT = 1
"""The only adapter slot."""


def why_not_exact(model: Any, variance: str | None = None) -> str | None:
    """Why a trainer cannot reproduce the bits of a `CausalLM`; None: it can. `variance`: the engine's own reason for
    answers that vary (`ModelInfo.batch_variance`)."""
    if not isinstance(model, Decoder):
        return "the engine runs it through transformers' modules"
    if model.device.type != "cpu":
        return "on a GPU, sums depend on what is computed together"
    options = model.options
    if options.bits is not None or options.forms:
        return "the engine rounds its weights, and the trainer does not"
    if any(getattr(layer.attention, "keys_of", None) is not None for layer in model.config.layers):
        return "some layers attend to the keys of others, which is no function of their own input"
    return model.unsteady or variance


class ExactLayers:
    """A second `Decoder` for one trainer; not thread-safe."""

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        """`config`: that of the engine that samples. Its page size matters: attention adds up page by page."""
        self.decoder, self._config = decoder, config
        self._cores = Cores(config.num_threads)
        self._backend: CompiledBackend | None = None
        self._lora: LoraLayers | None = None

    @staticmethod
    def like(decoder: Decoder, config: EngineConfig) -> ExactLayers:
        """The same layers with memory of their own, and without weights."""
        options = replace(decoder.options, memory=Arena())
        return ExactLayers(Decoder(decoder.config, options, decoder.max_model_len), config)

    def update(self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take all weights by their checkpoint's names. Raises as `prepare_update`."""
        write = prepare_update(self.decoder, weights, self._config)
        with self._cores.loading():
            write()

    def take_adapter(self, read: Callable[[Mapping[str, ModuleDims]], Any], rank: int) -> None:
        """Use an adapter of at most `rank` from now on, which `read` makes for the given modules. Raises
        `AdapterError`."""
        if self._lora is None or self._lora.max_rank < rank:
            self._lora = LoraLayers(self.decoder, 1, rank)
        self._lora.write(_SLOT, read(self._lora.modules))

    def forward(
        self, sequences: Sequences, adapted: bool, kept: list[torch.Tensor] | None = None,
        routes: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Hidden states [T, width] after the final norm. `kept` receives the residual stream [T, width] before each
        layer and after the last, `routes` the experts of each token, int64 [T, experts of a token], of each mixture.

        `adapted`: with the adapter.
        """
        decoder, counts = self.decoder, sequences.counts
        with torch.no_grad(), self._step():
            adapters, _ = self._adapters(adapted, counts)
            context = StepContext(
                sequences.positions, self._planned(counts), adapters, adapters, states=self._states(counts),
                routes=routes,
            )  # fmt: skip
            return decoder.hidden_states(sequences.ids, context, kept=kept)

    def logits(self, hidden: torch.Tensor, adapted: bool) -> torch.Tensor:
        """Logits float32 [N, vocab] of some rows [N, width] of the result of `forward`."""
        with torch.no_grad(), self._step():
            _, adapters = self._adapters(adapted, np.array([len(hidden)], dtype=np.int64))
            backend: Any = self._backend
            return self.decoder.logits(hidden, StepContext(torch.empty(0), backend, None, adapters)).float()

    def _step(self) -> Any:
        return self._cores.step(torch_alone=self.decoder.compiled)

    def _adapters(self, adapted: bool, counts: Any) -> StepAdapters:
        if not adapted:
            return None, None
        assert self._lora is not None
        return self._lora.begin([_SLOT] * len(counts), counts, torch.arange(int(counts.sum())))

    def _planned(self, counts: Any) -> CompiledBackend:
        """Plan the backend for rows of these lengths, over a pool that holds the keys and values of one layer at a
        time."""
        size, decoder = self._config.page_size, self.decoder
        pages = -(-counts // size)
        ends = np.cumsum(pages)
        if self._backend is None or self._backend.num_pages < ends[-1]:
            self._backend = CompiledBackend(decoder.specs, int(ends[-1]), size, decoder.dtype, one_pool=True)
        tables = (ends - pages)[:, None] + np.arange(pages.max())
        bounds = np.concatenate(([0], np.cumsum(counts)))
        slots = np.arange(bounds[-1]) + np.repeat((ends - pages) * size - bounds[:-1], counts)
        self._backend.plan(
            StepView(np.zeros_like(counts), counts, bounds, tables.astype(np.int32), torch.from_numpy(slots))
        )
        return self._backend

    def _states(self, counts: Any) -> StateStep | None:
        """Fresh states: each row starts from the empty state, and ends in a slot of its own. None: there are none."""
        decoder, rows = self.decoder, len(counts)
        if not decoder.states:
            return None
        ends, slots = np.cumsum(counts), np.arange(1, rows + 1, dtype=np.int64)
        segments = StateSegments(np.arange(rows + 1), ends - counts, ends, np.zeros_like(slots), slots)
        return StateStep(StatePools(decoder.states, rows + 1, decoder.dtype, decoder.device), segments)

    def close(self) -> None:
        """End its threads. Idempotent."""
        self._cores.close()
