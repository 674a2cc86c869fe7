"""THE forward: embedding, layers, final norm; logits are a second call on the rows that want them.

What varies between families is declared in a `DecoderConfig`, which `families` makes of config.json. A forward's
context (attention, adapters of the rows) is an argument. The order of operations is that of transformers' modules; the
sum that ends a branch and the norm that begins the next are one operation, also from layer to layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from asyncengine.layers.attention import Attention, AttentionConfig
from asyncengine.layers.embedding import Embedding, LMHead
from asyncengine.layers.fused import FusedLayers, fused_layers
from asyncengine.layers.linear import Linear
from asyncengine.layers.mlp import MLP, MLPConfig
from asyncengine.layers.norm import Norm, NormConfig, add_and_norm
from asyncengine.layers.options import LayerOptions
from asyncengine.layers.places import Place
from asyncengine.layers.rotary import Angles, Rotary, RotaryConfig
from asyncengine.layers.slots import TensorSlot
from asyncengine.layers.step import StepContext


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer. A norm that is not named is not there."""

    attention: AttentionConfig
    mlp: MLPConfig
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """On what attention gives, before it is added (Gemma 2, OLMo 2, GLM 4)."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    parallel: bool = False
    """Attention and MLP read the same input, and both are added to it (Cohere)."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only language model."""

    vocab_size: int
    width: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    rotary: tuple[RotaryConfig, ...] = ()
    max_positions: int = 2048
    """Positions of the learned embedding, if there is one."""
    embedding: str = "model.embed_tokens"
    embedding_scale: float = 1.0
    positions: str | None = None
    """Learned position embeddings (GPT-2, OPT)."""
    position_offset: int = 0
    """Rows of that table before the one of position 0 (OPT)."""
    layer: str = "model.layers.{}."
    final_norm: str | None = "model.norm"
    head: str = "lm_head"
    tied: bool = False
    head_bias: bool = False
    residual_scale: float = 1.0
    """Each branch is multiplied by it before it is added (Granite)."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    """Logits become cap * tanh(logits / cap) (Gemma 2)."""
    ignored: tuple[str, ...] = field(default=())
    """Regular expressions of tensors that checkpoints of this family have and nobody needs."""


class DecoderLayer:
    """Attention and feed-forward around a residual stream."""

    def __init__(self, options: LayerOptions, model: DecoderConfig, config: LayerConfig, index: int) -> None:
        prefix = model.layer.format(index)
        width, norm = model.width, model.norm
        self.config = config
        self.scale = model.residual_scale

        def named(name: str | None) -> Norm | None:
            return None if name is None else Norm(options, norm, prefix + name, width)

        self.before_attention, self.after_attention = named(config.before_attention), named(config.after_attention)
        self.before_mlp, self.after_mlp = named(config.before_mlp), named(config.after_mlp)
        self.attention = Attention(options, config.attention, prefix, width, index)
        self.mlp = MLP(options, config.mlp, prefix, width)
        rotary = config.attention.rotary
        self.merged = self.attention.merged_heads(None if rotary is None else model.rotary[rotary])

    def __call__(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        step: StepContext,
        angles: Angles,
        following: Norm | None,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual stream after this layer, its norm by `following`), of the stream [T, width] and its norm x.

        `rows`: those of the result that are wanted, int64; None: all. The feed-forward part computes no others.
        """
        branch = self.attention(x, step, angles, self.merged)
        if self.after_attention is not None:
            branch = self.after_attention(branch)
        adapters = step.adapters
        if self.config.parallel:
            residual = residual + branch
            if rows is not None:
                residual, x = residual.index_select(0, rows), x.index_select(0, rows)
        else:
            residual, x = add_and_norm(residual, branch, self.scale, self.before_mlp)
            if rows is not None:
                residual, x = residual.index_select(0, rows), x.index_select(0, rows)
        branch = self.mlp(x, adapters if rows is None else step.row_adapters)
        if self.after_mlp is not None:
            branch = self.after_mlp(branch)
        return add_and_norm(residual, branch, self.scale, following)

    def norms(self) -> list[Norm]:
        every = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return [norm for norm in every if norm is not None]

    def linears(self) -> list[Linear]:
        return [*self.attention.linears(), *self.mlp.linears()]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """What it takes from a checkpoint, by name."""
        for part in (self.attention, self.mlp, *self.norms()):
            yield from part.slots()


class Decoder:
    """A `CausalLM`. Its weights are whatever its memory held before `slots` are filled."""

    def __init__(self, config: DecoderConfig, options: LayerOptions, max_model_len: int) -> None:
        self.config, self.options = config, options
        self.dtype, self.device = options.dtype, options.device
        self.vocab_size = self.input_vocab_size = config.vocab_size
        self.head = LMHead(
            options, config.head, config.vocab_size, config.width, bias=config.head_bias,
            tied=config.embedding if config.tied else None,
        )  # fmt: skip
        self.embedding = Embedding(
            options, config.embedding, config.vocab_size, config.width, config.embedding_scale,
            self.head if config.tied else None,
        )  # fmt: skip
        self.positions: Embedding | None = None
        if config.positions is not None:
            self.positions = Embedding(options, config.positions, config.max_positions, config.width)
        self.layers = [DecoderLayer(options, config, layer, index) for index, layer in enumerate(config.layers)]
        self.norm = None if config.final_norm is None else Norm(options, config.norm, config.final_norm, config.width)
        self.rotary = [Rotary(rotary, max_model_len, options.dtype, options.device) for rotary in config.rotary]
        self._unrotated = Angles(options.zeros(1, 0), options.zeros(1, 0), "halves")
        self.specs = [layer.attention.spec for layer in self.layers]
        self.fused: FusedLayers | None = fused_layers(self.layers, self.norm, options, config.residual_scale)
        """Short steps in one call, where there are kernels for all of a layer."""

    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] of `rows` (int64 [N], ascending) of ids [T]."""
        wanted = None if len(rows) == len(ids) else rows  # ascending: as many as there are tokens are all of them
        return self.logits(self.hidden_states(ids, step, wanted), step)

    def hidden_states(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor | None = None) -> torch.Tensor:
        """[T, width] after the final norm, of int64 ids [T]; of `rows` only, if given (int64, ascending)."""
        h = self.embedding(ids, step.adapters)
        if self.positions is not None:
            h = h + self.positions(step.positions + self.config.position_offset)
        angles = [rotary(step.positions) for rotary in self.rotary]
        chosen = [layer.config.attention.rotary for layer in self.layers]
        by_layer = [self._unrotated if own is None else angles[own] for own in chosen]
        if self.fused is not None and rows is None and self.fused.serves(len(ids), step, by_layer):
            return self.fused(h, step, by_layer)
        first = self.layers[0].before_attention
        x = h if first is None else first(h)
        for place, layer in enumerate(self.layers):
            last = place + 1 == len(self.layers)
            following = self.norm if last else self.layers[place + 1].before_attention
            h, x = layer(h, x, step, by_layer[place], following, rows if last else None)
        return x

    def logits(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """[N, vocab] of hidden states [N, width], whose rows' adapters are `step.row_adapters`."""
        logits = self.head(hidden, step.row_adapters)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def slots(self) -> dict[str, TensorSlot]:
        """The place of every tensor that a checkpoint has to hold, by its name there."""
        parts: Sequence = (self.embedding, self.positions, *self.layers, self.norm, self.head)
        return {name: slot for part in parts if part is not None for name, slot in part.slots()}

    @property
    def nbytes(self) -> int:
        """Of all weights."""
        parts = [self.embedding, self.positions, self.norm, self.head]
        for layer in self.layers:
            parts += [*layer.linears(), *layer.norms(), *(layer.attention.norms or ())]
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def compiled(self) -> bool:
        """Whether short steps run in compiled kernels throughout."""
        return self.fused is not None

    def describe(self) -> list[str]:
        """How it runs, e.g. ["decoder x 1", "fused_layers x 28", "packed x 113"]."""
        counts = Counter(linear.weight.name for layer in self.layers for linear in layer.linears())
        counts[self.head.weight.name] += 1
        if self.fused is not None:
            counts["fused_layers"] = len(self.layers)
        return ["decoder x 1", *(f"{name} x {count}" for name, count in sorted(counts.items()))]

    def places(self) -> list[Place]:
        """Where adapters may act, in the model's order."""
        table, head = self.embedding, self.head
        found = [Place(table.num_embeddings, ((table.path, table.width),), "embedding", scale=table.scale)]
        for layer in self.layers:
            found += [
                Place(linear.inputs, linear.parts, "conv1d" if linear.transposed else "linear")
                for linear in layer.linears()
            ]
        return [*found, Place(head.inputs, head.parts, head=True)]

    def unbind(self) -> None:
        """Nothing of a step is kept."""
