"""THE forward of encoders: embeddings, the decoder's layers without a causal mask, heads of classifiers.

A layer is the decoder's own; whole sequences attend in both directions (`attention.whole`). What varies between
families is declared in an `EncoderConfig`, which `families.encoders` makes of config.json. Sequences lie one behind the
other without padding, and what a token becomes follows from its own sequence alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from asyncengine.execution.attention.whole import SequenceAttention, TorchSequences
from asyncengine.execution.layers.distance_bias import DistanceBias
from asyncengine.execution.layers.embedding import Embedding
from asyncengine.execution.layers.norm import Norm, NormConfig
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.recorded import RecordedLayers
from asyncengine.execution.layers.rotary import Angles, Rotary
from asyncengine.execution.layers.sequence_head import SequenceHead, SequenceHeadConfig
from asyncengine.execution.layers.slots import TensorSlot
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.decoder_layer import DecoderLayer

DISTANCES = 32
"""Buckets of distances, of every model that has any."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder: what a decoder has, and what stands before and behind its layers."""

    stack: DecoderConfig
    """Embeddings, positions, layers and the norm behind them; nothing of it is an output layer."""
    max_model_len: int
    """Positions of a sequence."""
    segments: str | None = None
    """Embeddings of token types; None: there are none."""
    num_segments: int = 0
    embedding_norm: str | None = None
    """On the sum of all embeddings."""
    padding: int | None = None
    """Learned positions count from behind this token id, and over no token that is it (RoBERTa). None: from 0."""
    distance_bias: str | None = None
    """Added to all layers' scores, by how far apart a query and a key are (MPNet); None: nothing is."""
    head: SequenceHeadConfig | None = None
    """The head of a classifier."""


class Encoder:
    """A bidirectional model. Its weights are whatever its memory held before `slots` are filled."""

    def __init__(self, config: EncoderConfig, options: LayerOptions) -> None:
        stack = config.stack
        self.config, self.options = config, options
        self.dtype, self.device = options.dtype, options.device
        self.hidden_size, self.vocab_size = stack.width, stack.vocab_size
        self.max_model_len = config.max_model_len
        self.embedding = Embedding(options, stack.embedding, stack.vocab_size, stack.width, stack.embedding_scale)
        self.positions, self.segments = (
            None if path is None else Embedding(options, path, rows, stack.width)
            for path, rows in ((stack.positions, stack.max_positions), (config.segments, config.num_segments))
        )
        self.embedding_norm = _norm(options, stack, config.embedding_norm)
        self.layers = [DecoderLayer(options, stack, each, index, index, 0) for index, each in enumerate(stack.layers)]
        self.norm = _norm(options, stack, stack.final_norm)
        self.rotary = [Rotary(each, config.max_model_len, options.dtype, options.device) for each in stack.rotary]
        self._unrotated = Angles(options.zeros(1, 0), options.zeros(1, 0), "halves")
        self.head: SequenceHead | None = None
        self.distance_bias: DistanceBias | None = None
        if config.distance_bias is not None:
            heads = next(each.attention.num_heads for each in stack.layers if each.attention is not None)
            self.distance_bias = DistanceBias(options, config.distance_bias, DISTANCES, heads)
        self.num_labels = 0
        if config.head is not None:
            self.num_labels = config.head.num_labels
            self.head = SequenceHead(replace(options, bits=None), config.head, stack.norm, stack.width)
        self._attention = self._make_attention()
        self.recorded: RecordedLayers | None = None
        """Steps of a few tokens in one call, where compiled kernels make all products."""
        if not isinstance(self._attention, TorchSequences) and all(layer.compiled for layer in self.layers):
            self.recorded = RecordedLayers(self._through_layers, keeps_states=False, paths=())

    def forward(
        self, ids: torch.Tensor, counts: Sequence[int], segments: torch.Tensor | None = None, *, recorded: bool = True
    ) -> torch.Tensor:
        """Hidden states [T, width] of ids int64 [T]: sequences of `counts` tokens each, >= 1, one behind the other.

        `segments` int64 [T]: token types; None: all 0. Not `recorded`: layers are called one by one. Raises
        `IndexError` for an id out of range, on a CPU.
        """
        places = np.concatenate([np.arange(count) for count in counts])
        if len(places) != len(ids):
            raise ValueError(f"counts add up to {len(places)}, but there are {len(ids)} ids")
        positions = torch.from_numpy(places).to(self.device)
        step = StepContext(positions, self._attention.plan(counts))
        h = self._embed(ids, positions, counts, segments)
        angles = [*(rotary(positions) for rotary in self.rotary), self._unrotated]
        x = self.recorded(h, step, angles) if recorded and self.recorded is not None else None
        return self._through_layers(h, step, angles) if x is None else x

    def _through_layers(self, h: torch.Tensor, step: StepContext, angles: Sequence[Angles]) -> torch.Tensor:
        first = self.layers[0].before_attention
        x = h if first is None else first(h)
        for place, layer in enumerate(self.layers):
            following = self.norm if place + 1 == len(self.layers) else self.layers[place + 1].before_attention
            rotary = None if layer.config.attention is None else layer.config.attention.rotary
            h, x = layer(h, x, step, angles[-1 if rotary is None else rotary], following)
        return x

    def classify(self, hidden: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Logits [sequences, num_labels] of what `forward` gave for `counts`, before any activation.

        Raises `ValueError` for a model without such a head.
        """
        if self.head is None:
            raise ValueError("the model has no classification head")
        return self.head(hidden, counts)

    def _embed(
        self, ids: torch.Tensor, positions: torch.Tensor, counts: Sequence[int], segments: torch.Tensor | None
    ) -> torch.Tensor:
        h = self.embedding(ids)
        if self.segments is not None:
            h = h + self.segments(ids.new_zeros(1) if segments is None else segments)
        if self.positions is not None:
            padding = self.config.padding
            learned = positions if padding is None else padded_positions(ids, counts, padding)
            h = h + self.positions(learned)
        return h if self.embedding_norm is None else self.embedding_norm(h)

    def _make_attention(self) -> SequenceAttention:
        specs = [layer.attention.spec for layer in self.layers if layer.attention is not None]
        if self.options.kernels.name != "compiled" or self.distance_bias is not None:
            return TorchSequences(specs, self.distance_bias)
        from asyncengine.execution.attention.cpu import CompiledSequences

        return CompiledSequences(specs, self.dtype)

    def slots(self) -> dict[str, TensorSlot]:
        """The place of every tensor that a checkpoint has to hold, by its name there."""
        return {name: slot for part in self._parts() for name, slot in part.slots()}

    def _parts(self) -> list[Any]:
        outer = (self.embedding, self.positions, self.segments, self.embedding_norm)
        return [part for part in (*outer, *self.layers, self.norm, self.distance_bias, self.head) if part is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(part.nbytes for part in self._parts())

    @property
    def unsteady(self) -> str | None:
        """Why a token's numbers may depend on the sequences that are computed beside its own; None: they do not."""
        linears = [linear for layer in self.layers for linear in layer.linears()]
        weights = [linear.weight for linear in (*linears, *([] if self.head is None else self.head.linears()))]
        if self.options.kernels.name != "compiled" or not all(weight.compiled for weight in weights):
            return self.options.why_torch()
        return None

    def describe(self) -> list[str]:
        """Parts of the model by the way in which they run, e.g. ["encoder x 1", "packed x 24"]."""
        counts = Counter(linear.weight.name for layer in self.layers for linear in layer.linears())
        if self.recorded is not None and self.recorded.obstacle is None:
            counts["recorded_layers"] = len(self.layers)
        return ["encoder x 1", *(f"{name} x {count}" for name, count in sorted(counts.items()))]


def padded_positions(ids: torch.Tensor, counts: Sequence[int], padding: int) -> torch.Tensor:
    """int64 [T]: `padding` + 1 and so on, over a sequence's tokens that are not `padding`; of that one, itself.

    As fairseq counts them; with a padding token inside a text, too.
    """
    shown = ids != padding
    total = torch.cumsum(shown, 0)
    lengths = torch.tensor(list(counts), device=ids.device)
    ends = torch.cumsum(lengths, 0)
    before = torch.zeros_like(ends)
    before[1:] = total[ends[:-1] - 1]
    return (total - before.repeat_interleave(lengths)) * shown + padding


def _norm(options: LayerOptions, stack: DecoderConfig, path: str | None) -> Norm | None:
    config: NormConfig = stack.norm
    return None if path is None else Norm(options, config, path, stack.width)
