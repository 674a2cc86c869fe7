"""The head of a checkpoint that predicts the token after the next one (multi-token prediction, Gloeckle et al. 2024).

Of DeepSeek V3's form (2024): the hidden state of a position and the embedding of the token behind it are normed and
made one, then a layer or two, a norm and the model's own output layer give the token behind that. Here an entry of its
keys and values belongs to the position of its token: it follows from the text up to there, as all else on that page.
The first position has none, as no hidden state is before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from asyncengine.execution.device.arena import OutputBufferPool
from asyncengine.execution.layers.attention import Attention, AttentionConfig
from asyncengine.execution.layers.basic import Linear, Norm, Part
from asyncengine.execution.layers.embedding import LMHead
from asyncengine.execution.layers.options import LayerOptions, rounded_weight
from asyncengine.execution.layers.rotary import Angles
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.layers.stored import StoredMatrix, TensorSlot
from asyncengine.execution.layers.weight_forms import PackedWeight, WeightForm
from asyncengine.execution.models.decoder_layer import DecoderLayer

if TYPE_CHECKING:
    from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig

HEAD_BITS = 4
"""Bits of the copy of the output layer by which tokens are guessed: it would be most of what a guess costs."""


@dataclass(frozen=True, slots=True)
class MTPConfig:
    """The layers of the head, with the checkpoint's names."""

    layers: tuple[LayerConfig, ...]
    """The first of them attends."""
    layer: str
    """The beginning of the names of a layer's tensors, as `DecoderConfig.layer`."""
    token_norm: str
    hidden_norm: str
    projection: str
    """The matrix that makes one of the normed embedding and the normed hidden state, in this order."""
    final_norm: str
    chains_normed: bool = False
    """Whether the hidden state that is fed back for a further guess is the one behind `final_norm`."""

    def renamed(self, named: Callable[[str], str]) -> MTPConfig:
        """The same under other names."""
        every = {part.name: getattr(self, part.name) for part in fields(self)}
        names: dict[str, Any] = {part: named(name) for part, name in every.items() if isinstance(name, str)}
        return replace(self, **names)


def head_layers(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """The same layers, whose attention leaves out the first position."""

    def one(layer: LayerConfig) -> LayerConfig:
        own = layer.attention
        return replace(layer, attention=replace(own, first=1)) if isinstance(own, AttentionConfig) else layer

    return tuple(one(layer) for layer in layers)


class MTPHead:
    """The head of a decoder. `pool` is the place of its keys and values in the attention backend."""

    def __init__(
        self, options: LayerOptions, model: DecoderConfig, config: MTPConfig, pool: int, output: WeightForm
    ) -> None:
        """`output`: the model's output layer."""
        self.config, width = config, model.width
        own = replace(model, layer=config.layer, layer_inputs=None)
        self.layers = [DecoderLayer(options, own, each, index, pool, 0) for index, each in enumerate(config.layers)]
        attention = self.layers[0].attention
        assert isinstance(attention, Attention)
        self.attention = attention
        self._joined = options.kernels.joined
        self.norms = [
            Norm(options, model.norm, name, width)
            for name in (config.token_norm, config.hidden_norm, config.final_norm)
        ]
        self._following = [*(layer.before_attention for layer in self.layers[1:]), self.norms[2]]
        self.projection = Linear(options, [Part(config.projection, width)], 2 * width)
        self._memory = OutputBufferPool()
        self.output: WeightForm | None = None
        """A smaller copy of the output layer; None: that is small enough."""
        if isinstance(output, PackedWeight):
            self.output = rounded_weight(
                output.outputs, output.inputs, HEAD_BITS, options.dtype, options.device, (), options.release,
                options.memory.empty,
            )  # fmt: skip

    def _merged(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.projection(self._joined(self.norms[0](embedded), self.norms[1](hidden)))

    def _normed(self, stream: torch.Tensor) -> torch.Tensor:
        first = self.layers[0].before_attention
        return stream if first is None else first(stream)

    def write(self, embedded: torch.Tensor, hidden: torch.Tensor, step: StepContext, angles: Angles) -> None:
        """Keep keys and values of tokens, of their embeddings and the hidden states before them, both [T, width]."""
        self.attention.write(self._normed(self._merged(embedded, hidden)), step, angles)

    def __call__(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: StepContext, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers on the same. Returns (inputs of the output layer, hidden states to feed back), [T, width]."""
        stream = self._merged(embedded, hidden)
        x = self._normed(stream)
        for layer, following in zip(self.layers, self._following, strict=True):
            stream, x = layer(stream, x, step, angles, following)
        return x, x if self.config.chains_normed else stream

    def logits(self, x: torch.Tensor, head: LMHead) -> torch.Tensor:
        """Logits [T, vocab] of x [T, width], by the copy of the output layer `head` if there is one."""
        return head(x) if self.output is None else self.output.logits(x, head.bias, self._memory)

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that are its alone, by name."""
        for part in self._parts():
            yield from part.slots()

    def _parts(self) -> list[Any]:
        return [*self.layers, *self.norms, self.projection]

    def names(self) -> set[str]:
        """Names of all tensors that may be its alone."""
        others = (layer.mlp.other_slots() for layer in self.layers if layer.mlp is not None)
        return {name for each in (self.slots(), *others) for name, _ in each}

    def with_output(self, slot: TensorSlot) -> TensorSlot:
        """The slot of the model's output layer, which fills the copy as well."""
        copy = self.output
        if copy is None:
            return slot

        def load(tensor: torch.Tensor | StoredMatrix) -> None:
            copy.load(0, tensor)
            slot.load(tensor)

        return replace(slot, load=load, memory=[*slot.memory, *copy.tensors()])

    @property
    def nbytes(self) -> int:
        own: int = sum(part.nbytes for part in self._parts())
        return own + (0 if self.output is None else self.output.nbytes)
