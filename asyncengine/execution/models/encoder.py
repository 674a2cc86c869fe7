"""Forward pass of all encoders: embeddings, the decoder's layers without a causal mask, classification heads.

Layers are the decoder's; attention is bidirectional over whole sequences (`attention.whole`). Differences between
families are declared in an `EncoderConfig`, which `families.encoders` makes of config.json. The sequences of a step are
concatenated without padding, and a token's hidden state depends on its own sequence only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.attention.base import LayerSpec, StepAttention
from asyncengine.execution.layers.basic import Embedding, Linear, Matrix, NormConfig, named_norm
from asyncengine.execution.layers.kernels import ACTIVATIONS
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.recorded import RecordedLayers
from asyncengine.execution.layers.rotary import Angles, Rotary
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.layers.stored import Layer, TensorSlot, nbytes_of
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.decoder_layer import DecoderLayer

# Attention of encoders: all keys of a step's sequences are computed in the step itself, so that there is no KV cache.


class SequenceAttention(Protocol):
    """The attention of an encoder. Not thread-safe: one step at a time."""

    def plan(self, counts: Sequence[int]) -> StepAttention:
        """The attention of one step over concatenated sequences of `counts` tokens each, >= 1."""


class TorchSequences:
    """`SequenceAttention` in torch's own operations, on any device: each sequence by itself.

    `bias`: function from a number of tokens to the bias that is added to the scores of every layer, [heads, tokens,
    tokens]. Raises `UnsupportedModel` for layers that `scaled_dot_product_attention` cannot express: soft caps, sinks.
    """

    def __init__(self, layers: Sequence[LayerSpec], bias: Callable[[int], torch.Tensor] | None = None) -> None:
        if any(spec.softcap is not None or spec.sinks is not None or spec.chunk is not None for spec in layers):
            raise UnsupportedModel("an encoder with soft caps, sinks or chunks is not written down")
        if bias is not None and any(spec.window is not None for spec in layers):
            raise UnsupportedModel("an encoder with windows and a bias by distance is not written down")
        self._bias = bias
        self._layers = tuple(layers)
        self._counts: list[int] = []
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def plan(self, counts: Sequence[int]) -> TorchSequences:
        self._counts, self._masks = list(counts), {}
        return self

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._kept = key, value

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        assert self._kept is not None
        spec, (key, value) = self._layers[layer], self._kept
        self._kept = None
        out = query.new_empty((query.shape[0], spec.num_heads, spec.value_dim))
        sequences = [torch.split(tensor, self._counts) for tensor in (query, key, value, out)]
        # each sequence alone: padded to a batch, its sums would depend on the lengths of the others
        for queries, keys, values, output in zip(*sequences, strict=True):
            heads = [tensor.transpose(0, 1)[None] for tensor in (queries, keys, values)]
            attended = scaled_dot_product_attention(
                heads[0], heads[1], heads[2], attn_mask=self._mask(spec, len(queries), query.device), scale=spec.scale,
                enable_gqa=spec.num_kv_heads != spec.num_heads,
            )  # fmt: skip
            output.copy_(attended[0].transpose(0, 1))
        return out

    def _mask(self, spec: LayerSpec, count: int, device: torch.device) -> torch.Tensor | None:
        """Mask [count, count], true where a query (row) sees a key, or the bias of scores; None: it sees all keys."""
        if self._bias is not None:
            if (count, None) not in self._masks:
                self._masks[count, None] = self._bias(count)
            return self._masks[count, None]
        if spec.window is None or spec.window >= count:
            return None
        if (count, spec.window) not in self._masks:
            positions = torch.arange(count, device=device)
            self._masks[count, spec.window] = (positions[:, None] - positions).abs() < spec.window
        return self._masks[count, spec.window]


# Biases that attention adds to a score for the distance between query and key.

_FAR = 128
"""Distance from which on all keys share the last bucket."""


class DistanceBias(Layer):
    """T5's relative position bias (Raffel et al. 2020): a learned bias for each head and bucket of distances, which
    MPNet shares among all layers. Half of the buckets are for keys before a query, half for those behind it. Of either
    half, the first half has one distance each, the rest grow logarithmically up to 128."""

    def __init__(self, options: LayerOptions, path: str, buckets: int, heads: int) -> None:
        self._path = path
        self._table = options.zeros(buckets, heads)

    def __call__(self, count: int) -> torch.Tensor:
        """Bias [heads, count, count] of a sequence of `count` tokens, with queries as rows."""
        positions = torch.arange(count, device=self._table.device)
        distances, half = torch.arange(1 - count, count), len(self._table) // 2  # position of key minus that of query
        exact = half // 2
        far = distances.abs()
        growth = torch.log(far.clamp(min=1).float() / exact) / math.log(_FAR / exact) * (half - exact)
        buckets = torch.where(far < exact, far, (exact + growth.long()).clamp(max=half - 1)) + (distances > 0) * half
        by_distance = self._table[buckets.to(self._table.device)].T  # of all distances, once
        return by_distance[:, positions - positions[:, None] + count - 1]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        yield f"{self._path}.weight", TensorSlot.into(self._table)


_TOGETHER = 256
"""Tokens whose hidden states stay in a core's cache between layers. Products in 8 bits are so fast that reading these
from memory costs a twentieth of a step of 1,024 tokens."""
DISTANCES = 32
"""Buckets of a `DistanceBias`, the same in all models."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Configuration of an encoder: a decoder's, with the modules before and behind the layers."""

    stack: DecoderConfig
    """Embeddings, positions, layers and final norm. Its output layer is not used."""
    max_model_len: int
    """Positions of a sequence."""
    segments: str | None = None
    """Name of the embeddings of token types; None if there are none."""
    num_segments: int = 0
    embedding_norm: str | None = None
    """Norm of the sum of all embeddings."""
    padding: int | None = None
    """Token id that learned positions skip and after which they begin to count (RoBERTa); None: they count from 0."""
    distance_bias: str | None = None
    """Name of the bias that all layers add to scores by the distance of query and key (MPNet); None: there is none."""
    head: SequenceHeadConfig | None = None
    """The head of a classifier."""


class Encoder:
    """A bidirectional model. Its weights are uninitialized until `slots` are filled."""

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
        self.embedding_norm = named_norm(options, stack.norm, config.embedding_norm, stack.width)
        self.layers = [DecoderLayer(options, stack, item, index, index, 0) for index, item in enumerate(stack.layers)]
        self.norm = named_norm(options, stack.norm, stack.final_norm, stack.width)
        self.rotary = [Rotary(item, config.max_model_len, options.dtype, options.device) for item in stack.rotary]
        self._together = 0 if options.bits is None or options.device.type != "cpu" else _TOGETHER
        """Most tokens that pass through all layers together; 0: all tokens of a step do."""
        self._position_ids = torch.arange(config.max_model_len, device=options.device)
        self._unrotated = Angles(options.zeros(1, 0), options.zeros(1, 0), "halves")
        self.head: SequenceHead | None = None
        self.distance_bias: DistanceBias | None = None
        if config.distance_bias is not None:
            heads = next(item.attention.num_heads for item in stack.layers if item.attention is not None)
            self.distance_bias = DistanceBias(options, config.distance_bias, DISTANCES, heads)
        self.num_labels = 0
        if config.head is not None:
            self.num_labels = config.head.num_labels
            self.head = SequenceHead(replace(options, bits=None), config.head, stack.norm, stack.width)
        specs = [layer.attention.spec for layer in self.layers if layer.attention is not None]
        self._attention: SequenceAttention
        if options.kernels.name != "compiled" or self.distance_bias is not None:
            self._attention = TorchSequences(specs, self.distance_bias)
        else:
            from asyncengine.execution.attention.cpu import CompiledSequences

            self._attention = CompiledSequences(specs, self.dtype)
        self.recorded: RecordedLayers | None = None
        """Replay of short steps in one call, where compiled kernels compute all products."""
        if not isinstance(self._attention, TorchSequences) and all(layer.compiled for layer in self.layers):
            self.recorded = RecordedLayers(self._through_layers, keeps_states=False, paths=())

    def forward(
        self, ids: torch.Tensor, counts: Sequence[int], segments: torch.Tensor | None = None, *, recorded: bool = True
    ) -> torch.Tensor:
        """Hidden states [T, width] of ids int64 [T]: concatenated sequences of `counts` tokens each, >= 1.

        `segments` int64 [T]: token types; None: all 0. `recorded=False`: layers are called one by one. Raises
        `IndexError` for an id out of range, on a CPU.
        """
        if sum(counts) != ids.shape[0]:
            raise ValueError(f"counts add up to {sum(counts)}, but there are {ids.shape[0]} ids")
        if self._together and ids.shape[0] > self._together and len(counts) > 1:
            return torch.cat(self._in_groups(ids, list(counts), segments, recorded))
        runs = [self._position_ids[:count] for count in counts]
        positions = runs[0] if len(runs) == 1 else torch.cat(runs)
        step = StepContext(positions, self._attention.plan(counts))
        h = self._embed(ids, positions, counts, segments)
        angles = [*(rotary(positions) for rotary in self.rotary), self._unrotated]
        x = self.recorded(h, step, angles) if recorded and self.recorded is not None else None
        return self._through_layers(h, step, angles) if x is None else x

    def _in_groups(
        self, ids: torch.Tensor, counts: list[int], segments: torch.Tensor | None, recorded: bool
    ) -> list[torch.Tensor]:
        """Hidden states of groups of consecutive sequences: of `_together` tokens at most, or one longer sequence."""
        outputs, begin, row = [], 0, 0
        while row < len(counts):
            last, end = row + 1, begin + counts[row]
            while last < len(counts) and end + counts[last] - begin <= self._together:
                end, last = end + counts[last], last + 1
            types = None if segments is None else segments[begin:end]
            outputs.append(self.forward(ids[begin:end], counts[row:last], types, recorded=recorded))
            begin, row = end, last
        return outputs

    def _through_layers(self, h: torch.Tensor, step: StepContext, angles: Sequence[Angles]) -> torch.Tensor:
        h = h if self.embedding_norm is None else self.embedding_norm(h)
        first = self.layers[0].before_attention
        x = h if first is None else first(h)
        for index, layer in enumerate(self.layers):
            following = self.norm if index + 1 == len(self.layers) else self.layers[index + 1].before_attention
            rotary = None if layer.config.attention is None else layer.config.attention.rotary
            h, x = layer(h, x, step, angles[-1 if rotary is None else rotary], following)
        return x

    def classify(self, hidden: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Logits [sequences, num_labels] of `hidden` [T, width], the result of `forward` for `counts`.

        Raises `ValueError` for a model without a classification head.
        """
        if self.head is None:
            raise ValueError("the model has no classification head")
        return self.head(hidden, counts)

    def _embed(
        self, ids: torch.Tensor, positions: torch.Tensor, counts: Sequence[int], segments: torch.Tensor | None
    ) -> torch.Tensor:
        h = self.embedding(ids)
        if self.segments is not None:
            h += self.segments.first_rows(1) if segments is None else self.segments(segments)
        if self.positions is not None:
            padding = self.config.padding
            if padding is not None:
                h += self.positions(padded_positions(ids, counts, padding))
            else:
                h += self.positions.first_rows(counts[0]) if len(counts) == 1 else self.positions(positions)
        return h

    def slots(self) -> dict[str, TensorSlot]:
        """The slot of every tensor that a checkpoint must hold, by its name there."""
        return {name: slot for module in self._modules() for name, slot in module.slots()}

    def _modules(self) -> list[Any]:
        outer = (self.embedding, self.positions, self.segments, self.embedding_norm)
        return [item for item in (*outer, *self.layers, self.norm, self.distance_bias, self.head) if item is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return nbytes_of(self._modules())

    @property
    def unsteady(self) -> str | None:
        """Why a token's hidden state may depend on the other sequences of its step; None if it does not."""
        linears = [linear for layer in self.layers for linear in layer.linears()]
        weights = [linear.weight for linear in (*linears, *([] if self.head is None else self.head.linears()))]
        if self.options.kernels.name != "compiled" or not all(weight.compiled for weight in weights):
            return self.options.why_torch()
        return None

    def describe(self) -> list[str]:
        """Numbers of modules by the form in which they run, e.g. ["encoder x 1", "packed x 24"]."""
        counts = Counter(linear.weight.name for layer in self.layers for linear in layer.linears())
        if self.recorded is not None and self.recorded.obstacle is None:
            counts["recorded_layers"] = len(self.layers)
        return ["encoder x 1", *(f"{name} x {count}" for name, count in sorted(counts.items()))]


def padded_positions(ids: torch.Tensor, counts: Sequence[int], padding: int) -> torch.Tensor:
    """Positions int64 [T] as fairseq counts them: from `padding` + 1 on, over the tokens of each sequence that are not
    `padding`; a token that is, even inside a text, has position `padding`.
    """
    shown = ids != padding
    total = torch.cumsum(shown, 0)
    lengths = torch.tensor(list(counts), device=ids.device)
    ends = torch.cumsum(lengths, 0)
    before = torch.zeros_like(ends)
    before[1:] = total[ends[:-1] - 1]
    return (total - before.repeat_interleave(lengths)) * shown + padding


# Classification head: from the hidden states of a sequence to a logit for each label.


@dataclass(frozen=True, slots=True)
class SequenceHeadConfig:
    """A family's classification head, with the checkpoint's names of its matrices."""

    num_labels: int
    out: str
    """The last linear layer."""
    dense: str | None = None
    """A linear layer before it, as wide as the model (BERT's pooler)."""
    dense_bias: bool = True
    activation: str = "tanh"
    """Activation of `dense`: a name in `ACTIVATIONS`, or "tanh"."""
    norm: str | None = None
    """Norm behind the activation (ModernBERT)."""
    pooling: Literal["first", "mean", "late"] = "first"
    """The first token, the mean of all, or the mean of the logits of all (EuroBERT)."""


class SequenceHead(Layer):
    """out(norm(act(dense(pooled))))."""

    def __init__(self, options: LayerOptions, config: SequenceHeadConfig, norm: NormConfig, width: int) -> None:
        self.config = config
        self.dense: Linear | None = None
        if config.dense is not None:
            self.dense = Linear(options, [Matrix(config.dense, width)], width, bias=config.dense_bias)
        self.norm = named_norm(options, norm, config.norm, width)
        self.out = Linear(options, [Matrix(config.out, config.num_labels)], width, bias=True)
        self._activation = torch.tanh if config.activation == "tanh" else ACTIVATIONS[config.activation]

    def __call__(self, hidden: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Logits [sequences, labels] of hidden states [T, width] of `counts` tokens each, >= 1."""
        sequences = torch.split(hidden, list(counts))
        if self.config.pooling == "late":
            logits = torch.split(self._logits(hidden), list(counts))
            return torch.stack([each.float().mean(0).to(each.dtype) for each in logits])
        if self.config.pooling == "mean":
            return self._logits(torch.stack([each.float().mean(0).to(each.dtype) for each in sequences]))
        return self._logits(torch.stack([each[0] for each in sequences]))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.dense is not None:
            x = self._activation(self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        return self.out(x)

    def linears(self) -> list[Linear]:
        return [self.out] if self.dense is None else [self.dense, self.out]
