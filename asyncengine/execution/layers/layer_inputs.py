"""Embeddings for each layer (Gemma 3n, Gemma 4): every token has a small vector of its own at every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from asyncengine.execution.layers.embedding import Embedding
from asyncengine.execution.layers.kernels import ACTIVATIONS
from asyncengine.execution.layers.linear import Linear, Part
from asyncengine.execution.layers.norm import Norm, NormConfig
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.slots import TensorSlot
from asyncengine.execution.layers.step import RowAdapters


@dataclass(frozen=True, slots=True)
class LayerInputConfig:
    """The checkpoint's names of the parts of layer inputs, and their sizes."""

    vocab_size: int
    """Rows of the table: token ids are below it."""
    width: int
    """Numbers of a token's vector at one layer."""
    activation: str
    """A name in `ACTIVATIONS`."""
    table: str = "model.embed_tokens_per_layer"
    projection: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"
    out_norm: str = "post_per_layer_input_norm"


class LayerInputs:
    """The vectors of all layers, [T, layers, width]: a token's own, plus a projection of its embedding."""

    def __init__(
        self, options: LayerOptions, config: LayerInputConfig, norm: NormConfig, layers: int, width: int
    ) -> None:
        self._shape = (layers, config.width)
        self.table = Embedding(options, config.table, config.vocab_size, layers * config.width, config.width**0.5)
        self.projection = Linear(options, [Part(config.projection, layers * config.width)], width)
        self.norm = Norm(options, norm, config.norm, config.width)
        self._scale = width**-0.5

    def __call__(self, ids: torch.Tensor, h: torch.Tensor, adapters: RowAdapters | None) -> torch.Tensor:
        """Vectors [T, layers, numbers of one] of int64 ids [T] and their embeddings h [T, width]."""
        shape = (len(ids), *self._shape)
        projected = self.norm((self.projection(h, adapters) * self._scale).view(shape))
        return (projected + self.table(ids).view(shape)) * 2.0**-0.5

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        for part in (self.table, self.projection, self.norm):
            yield from part.slots()

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.projection.nbytes + self.norm.nbytes


class LayerInput:
    """A layer's use of its vectors: norm(out(act(gate(h)) * vector)), to be added to the stream h."""

    def __init__(
        self, options: LayerOptions, config: LayerInputConfig, norm: NormConfig, prefix: str, width: int
    ) -> None:
        self._activation, self._kernels = ACTIVATIONS[config.activation], options.kernels
        self.gated = options.kernels.gated(config.activation)
        self.gate = Linear(options, [Part(prefix + config.gate, config.width)], width)
        self.out = Linear(options, [Part(prefix + config.out, width)], config.width)
        self.norm = Norm(options, norm, prefix + config.out_norm, width)

    def __call__(self, h: torch.Tensor, vectors: torch.Tensor, adapters: RowAdapters | None) -> torch.Tensor:
        """h [rows, width], vectors [rows, width of a vector] -> [rows, width]."""
        gate = self.gate(h, adapters)
        if self.gated is None:
            return self.norm(self.out(self._activation(gate) * vectors, adapters))
        return self.norm(self.out(self.gated(self._kernels.joined(gate, vectors)), adapters))

    def linears(self) -> list[Linear]:
        return [self.gate, self.out]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        for part in (self.gate, self.out, self.norm):
            yield from part.slots()
