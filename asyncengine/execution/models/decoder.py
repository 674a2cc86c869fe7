"""THE forward: embedding, layers, final norm; logits are a second call on the rows that want them.

What varies between families is declared in a `DecoderConfig`, which `families` makes of config.json. A forward's
context (attention, adapters of the rows) is an argument. The order of operations is that of transformers' modules; the
sum that ends a branch and the norm that begins the next are one operation, also from layer to layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from asyncengine.execution.device.arena import Arena
from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import (
    Embedding,
    LayerInputConfig,
    LayerInputs,
    Linear,
    LMHead,
    NormConfig,
    named_norm,
)
from asyncengine.execution.layers.latent_attention import LatentAttentionConfig
from asyncengine.execution.layers.mlp import MLPConfig, MoEConfig, SideExpertsConfig
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.recorded import RecordedLayers
from asyncengine.execution.layers.rotary import Angles, Rotary, RotaryConfig
from asyncengine.execution.layers.sharded import leave
from asyncengine.execution.layers.states import StateConfig
from asyncengine.execution.layers.step import NO_IMAGES, CausalLM, LoraTarget, StepContext, StreamHooks, Traces
from asyncengine.execution.layers.stored import TensorSlot, nbytes_of
from asyncengine.execution.layers.weight_forms import WeightForm
from asyncengine.execution.models.decoder_layer import DecoderLayer, MTPConfig, MTPHead
from asyncengine.execution.models.decoder_plan import plan_decoder


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer. A norm that is not named is not there."""

    attention: AttentionConfig | LatentAttentionConfig | None
    mlp: MLPConfig | MoEConfig | None
    """None: the layer mixes tokens and nothing else (Mamba-2, Nemotron-H)."""
    state: StateConfig | None = None
    """A layer that keeps a state, in the place of attention, or beside it on the same input and added to it
    (Falcon-H1). With neither, the layer is its feed-forward part alone (Nemotron-H)."""
    attention_scale: float = 1.0
    """A factor of attention's results (Falcon-H1)."""
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """On what attention gives, before it is added (Gemma 2, OLMo 2, GLM 4)."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    parallel: bool = False
    """Attention and MLP read the same input, and both are added to it (Cohere). With `before_mlp`, each has a norm of
    its own (Falcon 40B)."""
    post_norm: bool = False
    """`before_mlp` and `after_mlp` normalise the stream itself, after each sum (OPT 350M)."""
    side: SideExpertsConfig | None = None
    """A mixture of experts beside the feed-forward part, of the stream itself (Gemma 4)."""
    scalar: str | None = None
    """A number of the checkpoint that the layer's result is multiplied by (Gemma 4)."""


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
    embedding_norm: str | None = None
    """The norm of embeddings before the first layer (BLOOM)."""
    positions: str | None = None
    """Learned position embeddings (GPT-2, OPT)."""
    position_offset: int = 0
    """Rows of that table before the one of position 0 (OPT)."""
    embedding_width: int | None = None
    """Numbers of an embedding and of what the output layer reads, if not `width`: two matrices go between (OPT
    350M)."""
    project_in: str = ""
    project_out: str = ""
    layer_inputs: LayerInputConfig | None = None
    """Further embeddings that each layer adds (Gemma 4)."""
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
    mtp: MTPConfig | None = None
    """The head that predicts further tokens, where checkpoints may have one; its tensors are `ignored` otherwise."""
    aliases: tuple[tuple[str, str], ...] = ()
    """(a tensor's name, another one) that checkpoints may have instead (OLMo Hybrid)."""
    ignored: tuple[str, ...] = field(default=())
    """Regular expressions of tensors that checkpoints of this family have and no layer needs."""

    @property
    def outer_width(self) -> int:
        """Numbers of an embedding, and of what the output layer reads."""
        return self.embedding_width or self.width

    @property
    def input_vocab_size(self) -> int:
        """Token ids are below it."""
        sizes = (self.vocab_size,) if self.layer_inputs is None else (self.vocab_size, self.layer_inputs.vocab_size)
        return min(sizes)


class Decoder(CausalLM):
    """A model of `layers`. Its weights are whatever its memory held before `slots` are filled."""

    def __init__(self, config: DecoderConfig, options: LayerOptions, max_model_len: int) -> None:
        self.config, self.options, self.max_model_len = config, options, max_model_len
        self.dtype, self.device = options.dtype, options.device
        self.vocab_size, self.input_vocab_size = config.vocab_size, config.input_vocab_size
        self.plan = plan = plan_decoder(
            config, None if options.stage is None else options.stage.run,
            kernels=options.kernels.name, sharded=options.ranks is not None,
        )  # fmt: skip
        outside, outer = options.at(None), config.outer_width
        self.head = LMHead(
            outside, config.head, config.vocab_size, outer, bias=config.head_bias,
            tied=config.embedding if config.tied else None,
        )  # fmt: skip
        self.embedding = Embedding(
            outside, config.embedding, config.vocab_size, outer, config.embedding_scale,
            self.head if config.tied else None,
        )  # fmt: skip
        self.projections = [Linear(outside, [matrix], inputs) for matrix, inputs in plan.projections]
        """From embeddings to the layers and back, where their widths differ."""
        self.embedding_norm = named_norm(outside, config.norm, config.embedding_norm, config.width)
        self.inputs: LayerInputs | None = None
        if config.layer_inputs is not None:
            self.inputs = LayerInputs(outside, config.layer_inputs, config.norm, len(config.layers), config.width)
        self.positions: Embedding | None = None
        if config.positions is not None:
            rows = config.max_positions + config.position_offset
            self.positions = Embedding(outside, config.positions, rows, config.width)
        self.layers = [
            DecoderLayer(options.at(index), config, layer, index, plan.pools[index], plan.states[index])
            for index, layer in enumerate(config.layers)
        ]
        self.norm = named_norm(outside, config.norm, config.final_norm, config.width)
        norms = [*(layer.before_attention for layer in self.layers[1:]), self.norm]
        self._following = [norm if index in plan.normed else None for index, norm in enumerate(norms)]
        self.rotary = [Rotary(rotary, max_model_len, options.dtype, options.device) for rotary in config.rotary]
        self._unrotated = Angles(outside.zeros(1, 0), outside.zeros(1, 0), "halves")
        attentions = [layer.attention for layer in self.layers if layer.attention is not None]
        self.specs = [own.spec for own in attentions if own.config.keys_of is None]
        self.mtp: MTPHead | None = None
        if config.mtp is not None:
            self.mtp = config.mtp.build(outside, config, len(self.specs), self.head.weight, max_model_len)
            self.specs.append(self.mtp.attention.spec)
        self.states = [layer.state.spec for layer in self.layers if layer.state is not None]
        self.recorded: RecordedLayers | None = None
        """Short steps in one call, where compiled kernels make all products."""
        if plan.records and all(layer.compiled for layer in self.layers):
            paths = tuple(linear.path for index in plan.run for linear in self.layers[index].linears())
            self.recorded = RecordedLayers(self._through_layers, bool(self.states), paths, ends=plan.is_last)

    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] of `rows` (int64 [N], ascending; there may be none) of ids [T]."""
        # ascending: as many as there are tokens are all of them
        wanted = None if rows.shape[0] == ids.shape[0] else rows
        return self.logits(self.hidden_states(ids, step, wanted), step)

    def hidden_states(
        self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor | None = None,
        streams: list[torch.Tensor] | None = None, kept: list[torch.Tensor] | Traces | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """[T, width] after the final norm, of int64 ids [T]; of `rows` only, if given (int64, ascending). `streams`
        takes, without rows, what a head reads of other layers (`MTPHead.features`); `kept` the stream before each
        layer, and behind the last."""
        traces = step.traces
        if traces is not None and (traces.layers or traces.added):  # of all tokens, wanted or not
            hidden = self._hidden_states(ids, step, None, streams, traces)
            traces.end(hidden)
            return hidden if rows is None else hidden.index_select(0, rows)
        if step.routes is not None and rows is not None and not len(rows):
            # routers of the last layer are wanted all the same
            return self._hidden_states(ids, step, None, None, kept)[:0]
        return self._hidden_states(ids, step, rows, streams, kept)

    def _hidden_states(
        self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor | None, streams: list[torch.Tensor] | None,
        kept: list[torch.Tensor] | Traces | None,
    ) -> torch.Tensor:  # fmt: skip
        """The same of exactly these rows: which of them a step needs is settled by `hidden_states`."""
        x, width = self.run_layers(*self.embedded(ids, step), step, rows, kept), self.config.width
        if self.plan.taps and streams is not None:
            streams.append(x[:, width:].contiguous())
        return self.projected(x[:, :width].contiguous() if self.plan.taps else x, step, rows)

    def embedded(self, ids: torch.Tensor, step: StepContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(what the first layer reads [T, width], the vectors of `LayerInputs`), of int64 ids [T]."""
        h = self.embedding(ids, step.adapters)
        images = step.images or NO_IMAGES
        if images.tokens is not None and images.features is not None:
            h.index_copy_(0, images.tokens, images.features)
        vectors = None if self.inputs is None else self.inputs(ids, h, step.adapters)
        if self.projections:
            h = self.projections[0](h, step.adapters)
        if self.positions is not None:
            h = h + self.positions(step.positions + self.config.position_offset)
        if self.embedding_norm is not None:
            h = self.embedding_norm(h)
        return h, vectors

    def run_layers(
        self, h: torch.Tensor, vectors: torch.Tensor | None, step: StepContext, rows: torch.Tensor | None,
        kept: list[torch.Tensor] | Traces | None = None, recorded: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """The result [T, width] of this process's layers, of what the first of them reads; behind the last layer of
        all, its final norm, of `rows` only, if given; without rows, streams before other layers beside it, if a head
        reads them. Not `recorded`: layers are called one by one."""
        axes = None if step.images is None else step.images.axes
        angles = [*(rotary(step.positions, axes) for rotary in self.rotary), self._unrotated]
        run = self._through_layers if self.recorded is None or not recorded else self.recorded.run
        return run(h, step, angles, vectors, rows, kept)

    def projected(self, x: torch.Tensor, step: StepContext, rows: torch.Tensor | None) -> torch.Tensor:
        """The rows that the output layer reads, of those behind the final norm: all, or `rows`."""
        if not self.projections or not len(x):
            return x
        return self.projections[1](x, step.adapters if rows is None else step.row_adapters)

    def _through_layers(
        self, h: torch.Tensor, step: StepContext, angles: Sequence[Angles], vectors: torch.Tensor | None = None,
        rows: torch.Tensor | None = None, kept: list[torch.Tensor] | Traces | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The same as `run_layers`, layer by layer."""
        plan, unread = self.plan, rows is not None and not len(rows)
        if unread and plan.run.start > plan.last_kept:
            return h.new_empty(0, self.head.inputs)
        h, x = self._begin(h)
        hooks = StreamHooks.of(step, kept, plan.taps if rows is None else ())
        for index in plan.run:
            layer, layer_angles, following = self.layers[index], angles[plan.rotaries[index]], self._following[index]
            if unread and index == plan.last_kept:  # kernels of a GPU refuse to be launched for no rows
                layer.mix(x, step, layer_angles)
                return h.new_empty(0, self.head.inputs)
            if hooks is not None:
                hooks.keep(index, h)
            wanted = rows if index + 1 == len(self.layers) else None
            h, x = layer(h, x, step, layer_angles, following, wanted, None if vectors is None else vectors[:, index])
            if hooks is not None:
                h, x = hooks.add(index, h, x, following)
        if hooks is not None:
            hooks.keep(len(self.layers), h)
            x = hooks.beside(x, self.options.kernels.joined)
        return torch.cat([h, x], dim=-1) if plan.hands_on_norms else x

    def _begin(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the stream before this process's first layer, its norm), of what `embedded` or the stage before gave."""
        if self.plan.reads_norms:
            stream, normed = h.chunk(2, dim=-1)
            return stream.contiguous(), normed.contiguous()
        first = self.layers[self.plan.run.start].before_attention
        return h, h if first is None else first(h)

    @property
    def carried(self) -> tuple[int, tuple[int, ...]]:
        """Numbers of a token between stages: width of what layers give, and shape of the vectors of `LayerInputs`."""
        inputs, width = self.config.layer_inputs, self.config.width * (1 + self.plan.carries_norms)
        return width, () if inputs is None else (len(self.layers), inputs.width)

    def write_mtp(self, ids: torch.Tensor, before: torch.Tensor, step: StepContext) -> None:
        """Have the head keep what it needs of ids [T], by the hidden states before them [T, width]."""
        head, embedded, angles = self._head_inputs(ids, step)
        head.write(embedded, before, step, angles)

    def guess(self, ids: torch.Tensor, before: torch.Tensor, step: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head on ids [T] and the hidden states of the positions before them [T, width]. Returns (logits of the
        next tokens [T, vocab], hidden states to run it on again [T, width])."""
        head, embedded, angles = self._head_inputs(ids, step)
        x, hidden = head(embedded, before, step, angles)
        return head.logits(x, self.head, self._scaled), hidden

    def _head_inputs(self, ids: torch.Tensor, step: StepContext) -> tuple[MTPHead, torch.Tensor, Angles]:
        """(the head, embeddings that it reads [T, width], angles of its attention)"""
        head, axes = self.mtp, None if step.images is None else step.images.axes
        assert head is not None
        own = head.attention.config.rotary
        angles = self._unrotated if own is None else (head.rotary or self.rotary[own])(step.positions, axes)
        return head, self.embedded(ids, step)[0], angles

    def logits(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """[N, vocab] of hidden states [N, width], whose rows' adapters are `step.row_adapters`."""
        if not len(hidden):
            return hidden.new_empty(0, self.vocab_size)
        return self._scaled(self.head(hidden, step.row_adapters))

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def slots(self) -> dict[str, TensorSlot]:
        """The slot of every tensor that a checkpoint has to hold, by its name there."""
        slots = {name: self._here(slot, layer) for module, layer in self._modules() for name, slot in module.slots()}
        if self.mtp is not None:
            output, _ = next(self.head.slots())
            slots[output] = self.mtp.with_output(slots[output])
        beyond = self._following[self.plan.run[-1]]
        return slots if beyond is None else slots | dict(beyond.slots())  # which may be the next stage's as well

    def _modules(self) -> list[tuple[Any, int | None]]:
        """All modules with weights, each with the index of its layer; None: it lies before or behind the layers."""
        modules = (self.embedding, self.positions, self.embedding_norm, self.inputs, *self.projections, *self.layers,
                   self.norm, self.head, self.mtp)  # fmt: skip
        indices = {id(layer): index for index, layer in enumerate(self.layers)}
        indices[id(self.norm)] = len(self.layers) - 1  # the final norm is computed by the last layer's stage
        return [(module, indices.get(id(module))) for module in modules if module is not None]

    def _here(self, slot: TensorSlot, layer: int | None) -> TensorSlot:
        """The slot, which takes nothing where another stage has the weight."""
        stage = self.options.stage
        return slot if stage is None or stage.has(layer) else replace(slot, load=leave)

    def other_slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """The same of tensors that a checkpoint may hold instead of some of those."""
        slots = self.slots() if self.config.aliases else {}
        yield from ((other, replace(slots[name], replaces=(name,))) for name, other in self.config.aliases)
        for index, layer in enumerate([*self.layers, *(self.mtp.layers if self.mtp is not None else ())]):
            others = () if layer.mlp is None else layer.mlp.other_slots()
            yield from ((name, self._here(slot, index)) for name, slot in others)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights that are here."""
        stage = self.options.stage
        return nbytes_of(module for module, layer in self._modules() if stage is None or stage.has(layer))

    @property
    def unsteady(self) -> str | None:
        """Why a token's numbers may depend on the tokens that are computed beside it; None: they do not, to the bit."""
        weights = [linear.weight for layer in self.layers for linear in layer.linears()]
        weights += [*(linear.weight for linear in self.projections), self.head.weight]
        if self.options.kernels.name != "compiled" or not all(weight.compiled for weight in weights):
            return self.options.why_torch()
        if not all(mixture.experts.compiled for layer in self.layers for mixture in layer.mixtures()):
            return "experts' products are torch's, whose sums depend on what is computed together"
        return None

    @property
    def compiled(self) -> bool:
        """Whether short steps run in compiled kernels throughout."""
        return self.recorded is not None and (
            not self.recorded.obstacle or all(each.mixtures() for each in self.layers)
        )

    def describe(self) -> list[str]:
        """Parts of the model by the way in which they run, e.g. ["decoder x 1", "packed x 9", ...]."""
        counts = Counter(linear.weight.name for layer in self.layers for linear in layer.linears())
        counts[self.head.weight.name] += 1
        counts.update([] if self.mtp is None else [self.mtp.name])
        counts.update(mixture.experts.name for layer in self.layers for mixture in layer.mixtures())
        if self.recorded is not None and self.recorded.obstacle is None:
            counts["recorded_layers"] = len(self.layers)
        return ["decoder x 1", *(f"{name} x {count}" for name, count in sorted((+counts).items()))]

    @property
    def key(self) -> Hashable:
        """Equal for decoders that are computed by the same kernels on arrays of the same shapes."""
        options = self.options
        return (
            self.config, self.dtype, self.device, self.max_model_len, options.kernels.name, options.bits,
            options.stage, tuple(options.forms.items()), tuple(self.describe()), self.unsteady,
        )  # fmt: skip

    def lora_targets(self) -> list[LoraTarget]:
        """Products that adapters may change, in the model's order."""
        table, head, first = self.embedding, self.head, self.plan.run.start == 0
        module, rows = (table.path, table.width), table.num_embeddings
        targets = [LoraTarget(rows, (module,), "embedding", scale=table.scale, is_local=first)]
        outer = [*self.projections, *([] if self.inputs is None else [self.inputs.projection])]
        linears = [(linear, first) for linear in outer]
        linears += [
            (linear, index in self.plan.run) for index, each in enumerate(self.layers) for linear in each.linears()
        ]
        for linear, is_local in linears:
            targets.append(LoraTarget(
                linear.inputs, linear.matrices, "conv1d" if linear.transposed else "linear",
                local_outputs=linear.kept_outputs(), is_local=is_local, bias=linear.bias,
                read_rows=linear.weight.read_rows if self.options.ranks is None else None,
            ))  # fmt: skip
        return [*targets, LoraTarget(
            head.inputs, head.matrices, head="tied" if self.config.tied else "own", is_local=first, bias=head.bias,
            read_rows=head.weight.read_rows if self.options.ranks is None else None, new_weight=self._new_head,
        )]  # fmt: skip

    def _new_head(self, rows: int) -> WeightForm:
        """Memory for so many rows of another output layer, in this model's dtype; all ranks have all of it."""
        return replace(self.options, bits=None, ranks=None, memory=Arena()).weight(rows, self.head.inputs)


class PooledDecoder(CausalLM):
    """A decoder whose `forward` gives the wanted rows' hidden states [N, width] to be pooled, or, of a model whose
    score is a logit, scores [N, 1]: the logit of the first of `tokens`, less that of the second if there is one."""

    def __init__(self, decoder: Decoder, tokens: Sequence[int] = ()) -> None:
        self.decoder, self.specs, self.states = decoder, decoder.specs, decoder.states
        self.input_vocab_size, self.vocab_size = decoder.input_vocab_size, decoder.vocab_size
        self.dtype, self.device = decoder.dtype, decoder.device
        self.width = 1 if tokens else decoder.config.outer_width
        self._tokens = list(tokens)

    @property
    def unsteady(self) -> str | None:
        return self.decoder.unsteady

    @property
    def compiled(self) -> bool:
        return self.decoder.compiled

    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        """[N, width] of `rows` (int64 [N], ascending) of ids [T]; there may be none."""
        if not self._tokens:
            return self.decoder.hidden_states(ids, step, None if len(rows) == len(ids) else rows)
        logits = self.decoder.forward(ids, step, rows)[:, self._tokens].float()
        return logits[:, :1] - logits[:, 1:] if len(self._tokens) == 2 else logits

    def lora_targets(self) -> list[LoraTarget]:
        return self.decoder.lora_targets()
