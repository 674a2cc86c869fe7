"""One layer of a decoder, or of an encoder: what mixes tokens, and a feed-forward part, around a residual stream; and a
head of such layers that predicts further tokens.

Which cache each layer reads, which rotation it has, and which of them are computed here, is in the `DecoderPlan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from asyncengine.execution.device.arena import OutputBufferPool
from asyncengine.execution.layers.attention import Attention
from asyncengine.execution.layers.basic import LayerInput, Linear, LMHead, Matrix, Norm
from asyncengine.execution.layers.latent_attention import HeadProducts, LatentAttention
from asyncengine.execution.layers.mlp import MLP, MoEConfig, SideExperts, SparseMLP
from asyncengine.execution.layers.options import LayerOptions, rounded_weight
from asyncengine.execution.layers.rotary import Angles, Rotary
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.layers.stored import Layer, StoredMatrix, TensorSlot
from asyncengine.execution.layers.weight_forms import PackedWeight, WeightForm

if TYPE_CHECKING:
    from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig


class DecoderLayer:
    """Attention and feed-forward around a residual stream."""

    def __init__(
        self, options: LayerOptions, model: DecoderConfig, config: LayerConfig, index: int, pool: int, state: int
    ) -> None:
        """`pool`: the place of the keys and values that it attends to in the attention backend. `state`: that of its
        states among the pools."""
        prefix = model.layer.format(index)
        width, norm = model.width, model.norm
        self.config, self._kernels = config, options.kernels
        self.scale = model.residual_scale

        names = config.before_attention, config.after_attention, config.before_mlp, config.after_mlp
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            None if name is None else Norm(options, norm, prefix + name, width) for name in names
        )
        self.attention: Attention | LatentAttention | None = None
        if config.attention is not None:
            self.attention = config.attention.build(options, model.rotary, prefix, width, pool)
        self.state = None if config.state is None else config.state.build(options, norm, prefix, width, state)
        form: Any = SparseMLP if isinstance(config.mlp, MoEConfig) else MLP
        self.mlp: MLP | SparseMLP | None = None if config.mlp is None else form(options, config.mlp, prefix, width)
        self.side = None if config.side is None else SideExperts(options, config.side, norm, prefix, width)
        inputs = model.layer_inputs
        self.inputs = None if inputs is None else LayerInput(options, inputs, norm, prefix, width)
        self.scalar_path = f"{prefix}{config.scalar}"
        self.scalar = None if config.scalar is None else options.zeros(width, dtype=torch.float32).fill_(1.0)
        moved = self.state is None or self.state.kernel is not None
        products: list[Linear | HeadProducts] = [*self.linears(), *self._products()]
        made = all(product.weight.compiled for product in products)
        self.compiled = moved and made and all(mixture.experts.compiled for mixture in self.mixtures())
        """Whether its products are all made, and its states moved, by compiled kernels."""

    def __call__(
        self, residual: torch.Tensor, x: torch.Tensor, step: StepContext, angles: Angles, following: Norm | None,
        rows: torch.Tensor | None = None, vectors: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(residual stream after this layer, its norm by `following`), of the stream [T, width] and its norm x.

        `rows`: those of the result that are wanted, int64; None: all. The feed-forward part computes no others.
        `vectors`: this layer's of `LayerInputs`, [T, width of a vector].
        """
        branch = self.mix(x, step, angles)
        if self.mlp is None or branch is None:
            return self._single(residual, x, branch, step, following, rows)
        mixed = branch
        if not self.config.parallel:
            residual, x = self._add(residual, branch, self.before_mlp, not self.config.post_norm)
            residual = x if self.config.post_norm else residual
        step.note_routes(self.mixtures, residual, x)
        if rows is not None:
            residual, x = residual.index_select(0, rows), x.index_select(0, rows)
        if self.config.parallel and self.before_mlp is not None:
            x = self.before_mlp(residual)
        adapters = step.adapters if rows is None else step.row_adapters
        branch = self.mlp(x, adapters)
        if self.side is not None:
            branch = self.side(residual, branch)
        if self.config.parallel:
            residual = self._kernels.add_both(residual, mixed if rows is None else mixed.index_select(0, rows), branch)
            return residual, residual if following is None else following(residual)
        if self.config.post_norm:
            _, x = self._add(residual, branch, self.after_mlp, kept=False)
            return x, x
        if self.after_mlp is not None:
            branch = self.after_mlp(branch)
        if self.inputs is not None and vectors is not None:
            residual, _ = self._add(residual, branch, None)
            branch = self.inputs(residual, vectors if rows is None else vectors.index_select(0, rows), adapters)
        if self.scalar is None:
            return self._add(residual, branch, following)
        residual = self._kernels.scale_each(self._add(residual, branch, None)[0], self.scalar)
        return residual, residual if following is None else following(residual)

    def mix(self, x: torch.Tensor, step: StepContext, angles: Angles) -> torch.Tensor | None:
        """The contribution of other tokens, [T, width]; None: the layer is its feed-forward part alone."""
        branch = None if self.attention is None else self.attention(x, step, angles)
        scale = self.config.attention_scale
        if self.state is not None:
            own = self.state(x, step)
            branch = own if branch is None else self._kernels.add_scaled(branch, scale, own)
        elif branch is not None and scale != 1.0:
            branch *= scale
        return branch if branch is None or self.after_attention is None else self.after_attention(branch)

    def _add(
        self, residual: torch.Tensor, branch: torch.Tensor, norm: Norm | None, kept: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the sum, what `norm` makes of it; None: the sum itself). Not `kept`: the sum is not needed."""
        if norm is not None:
            return norm.add(residual, branch, self.scale, kept)
        total = self._kernels.add_scaled(branch, self.scale, residual)
        return total, total

    def _single(
        self, residual: torch.Tensor, x: torch.Tensor, branch: torch.Tensor | None, step: StepContext,
        following: Norm | None, rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The same of a layer that has one branch only: it mixes, or it is a feed-forward part."""
        step.note_routes(self.mixtures, residual, x)
        if rows is not None:
            residual, x = residual.index_select(0, rows), x.index_select(0, rows)
            branch = None if branch is None else branch.index_select(0, rows)
        if branch is None:
            assert self.mlp is not None
            branch = self.mlp(x, step.adapters if rows is None else step.row_adapters)
        return self._add(residual, branch, following)

    def norms(self) -> list[Norm]:
        every = [self.before_attention, self.after_attention, self.before_mlp, self.after_mlp]
        every += [] if self.inputs is None else [self.inputs.norm]
        every += [] if self.side is None else self.side.norms
        return [norm for norm in every if norm is not None]

    def linears(self) -> list[Linear]:
        modules = (self.attention, self.state, self.mlp, self.inputs)
        return [linear for module in modules if module is not None for linear in module.linears()]

    def _products(self) -> tuple[HeadProducts, ...]:
        """Products of heads, which no adapter changes."""
        return self.attention.products if isinstance(self.attention, LatentAttention) else ()

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        inputs = [] if self.inputs is None else self.inputs.linears()
        sides = [] if self.side is None else [self.side]
        modules: list[Any] = [self.attention, self.state, self.mlp, *sides, *self.norms(), *inputs]
        for module in modules:
            yield from () if module is None else module.slots()
        if self.scalar is not None:
            yield self.scalar_path, replace(TensorSlot.into(self.scalar, initial=1.0), shape=(1,))

    def mixtures(self) -> list[SparseMLP | SideExperts]:
        """Its mixtures of experts, whose weights are no linears."""
        return [module for module in (self.mlp, self.side) if isinstance(module, (SparseMLP, SideExperts))]


# The head of a checkpoint that predicts the token after the next one (multi-token prediction, Gloeckle et al. 2024).
#
# Of DeepSeek V3's form (2024): the hidden state of a position and the embedding of the token behind it are normed and
# made one, then a layer or two, a norm and the model's own output layer give the token behind that. Here an entry of
# its keys and values belongs to the position of its token: it follows from the text up to there, as all else on that
# page. The first position has none, as no hidden state is before it.

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
    """The matrix that makes one of the normed embedding and the normed hidden state, in this order; with `taps`, of
    what the stream is before those layers."""
    final_norm: str
    chains_normed: bool = False
    """Whether the hidden state that is fed back for a further guess is the one behind `final_norm`."""
    taps: tuple[int, ...] = ()
    """Layers of the model, ascending, before which its stream is what the head reads (as many as there are layers:
    behind the last); (): it reads the hidden state behind the final norm."""

    def build(
        self, options: LayerOptions, model: DecoderConfig, pool: int, output: WeightForm, max_model_len: int
    ) -> MTPHead:
        """The head of the decoder `model`. `pool` and `output` as in `MTPHead`."""
        return MTPHead(options, model, self, pool, output)

    def renamed(self, named: Callable[[str], str]) -> MTPConfig:
        """The same under other names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        names: dict[str, Any] = {field: named(value) for field, value in values.items() if isinstance(value, str)}
        return replace(self, **names)


def head_layers(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """The same layers, whose attention leaves out the first position."""

    def one(layer: LayerConfig) -> LayerConfig:
        own = layer.attention
        return layer if own is None else replace(layer, attention=replace(own, first=1))

    return tuple(one(layer) for layer in layers)


class MTPHead(Layer):
    """The head of a decoder. `pool` is the place of its keys and values in the attention backend."""

    name = "mtp"
    copies_output = True
    """Whether the model's output layer makes its logits."""
    rotary: Rotary | None = None
    """A rotation of its own; None: the model's."""

    def __init__(
        self, options: LayerOptions, model: DecoderConfig, config: MTPConfig, pool: int, output: WeightForm | None
    ) -> None:
        """`output`: the model's output layer; None: the head has its own."""
        self.config, width = config, model.width
        own = replace(model, layer=config.layer, layer_inputs=None)
        self.layers = [DecoderLayer(options, own, each, index, pool, 0) for index, each in enumerate(config.layers)]
        attention = self.layers[0].attention
        assert attention is not None
        self.attention = attention
        self._joined = options.kernels.joined
        names = config.token_norm, config.hidden_norm, config.final_norm
        self.norms = [Norm(options, model.norm, name, width) for name in names]
        self._following = [*(layer.before_attention for layer in self.layers[1:]), self.norms[2]]
        self.projection = Linear(options, [Matrix(config.projection, width)], (len(config.taps) or 2) * width)
        self._memory = OutputBufferPool()
        self.output: WeightForm | None = None
        """A smaller copy of the output layer; None: that is small enough."""
        if isinstance(output, PackedWeight):
            self.output = rounded_weight(
                output.outputs, output.inputs, HEAD_BITS, options.dtype, options.device, (), options.release,
                options.memory.empty,
            )  # fmt: skip

    def features(self, hidden: torch.Tensor, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        """The part [T, width] of a step that the head reads. hidden: states behind the final norm [T, width]; streams:
        one tensor, those before the layers of `taps` side by side [T, taps * width], if there are any."""
        return hidden

    def _begin(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the residual stream, what the first layer's attention reads)"""
        stream = self.projection(self._joined(self.norms[0](embedded), self.norms[1](hidden)))
        first = self.layers[0].before_attention
        return stream, stream if first is None else first(stream)

    def write(self, embedded: torch.Tensor, hidden: torch.Tensor, step: StepContext, angles: Angles) -> None:
        """Keep keys and values of tokens, of their embeddings and the hidden states before them, both [T, width]."""
        self.attention.write(self._begin(embedded, hidden)[1], step, angles)

    def __call__(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: StepContext, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers on the same. Returns (inputs of the output layer, hidden states to feed back), [T, width]."""
        stream, x = self._begin(embedded, hidden)
        for layer, following in zip(self.layers, self._following, strict=True):
            stream, x = layer(stream, x, step, angles, following)
        return x, x if self.config.chains_normed else stream

    def logits(self, x: torch.Tensor, head: LMHead, scaled: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Logits [T, vocab] of x [T, width], by the copy of the output layer `head` if there is one. `scaled`: what
        the model makes of its logits."""
        return scaled(head(x) if self.output is None else self.output.logits(x, head.bias, self._memory))

    def inner(self) -> Sequence[Any]:
        """The layers that are its alone."""
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
