"""Token embeddings and the output layer (LM head), which are often one matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from asyncengine.execution.device.arena import OutputBufferPool, new_tensor
from asyncengine.execution.layers.basic import Linear, Norm, NormConfig, Part
from asyncengine.execution.layers.kernels import ACTIVATIONS
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.step import RowAdapters
from asyncengine.execution.layers.stored import StoredMatrix, TensorSlot
from asyncengine.execution.layers.weight_forms import WeightForm, parts_of

_FEW = 64
"""Token ids up to which each is looked at by itself."""


def _new(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return new_tensor(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)


class Embedding:
    """Rows of a table [tokens, width], times `scale` (Gemma, Granite).

    `head`: the output layer whose weight is this table.
    """

    def __init__(
        self, options: LayerOptions, path: str, tokens: int, width: int, scale: float = 1.0, head: LMHead | None = None
    ) -> None:
        self.path, self.num_embeddings, self.width = path, tokens, width
        self.scale = float(torch.tensor(scale).to(options.dtype))
        self._dtype, self._device = options.dtype, options.device
        self._head = head
        self._release = options.release
        self.stored = options.table(path, tokens, width) if head is None else None
        self._table = options.large_zeros(tokens, width) if head is None and self.stored is None else None

    def __call__(self, ids: torch.Tensor, adapters: RowAdapters | None = None) -> torch.Tensor:
        """[T, width] of int64 ids [T]. Raises `IndexError` for an id out of range, on a CPU."""
        if self._device.type == "cpu":
            self._check(ids)
        if self._head is not None:
            out = self._head.embed(ids.contiguous(), self._dtype)
        elif self.stored is not None:
            out = _new((len(ids), self.width), self._dtype, self._device)
            self.stored.read_rows(ids.contiguous(), out)
        else:
            assert self._table is not None
            out = functional.embedding(ids, self._table)
        if self.scale != 1.0:
            out.mul_(self.scale)
        if adapters is not None:  # their factors have the scale in them already
            adapters.add(self.path, ids, out)
        return out

    def _check(self, ids: torch.Tensor) -> None:
        # torch's operators let go of the interpreter's lock, and numpy's take longer to call than a few ids to look at
        if ids.shape[0] <= _FEW:
            known = ids.tolist()
            low, high = min(known, default=0), max(known, default=0)
        else:
            low, high = int(ids.numpy().min()), int(ids.numpy().max())
        if low < 0 or high >= self.num_embeddings:
            raise IndexError(f"token ids must be in 0 .. {self.num_embeddings - 1}")

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        if self._head is None:
            stored, shape = self.stored, (self.num_embeddings, self.width)
            memory = [self._table] if self._table is not None else stored.tensors() if stored else ()
            takes = None if stored is None else stored.takes(0)
            yield f"{self.path}.weight", TensorSlot(shape, self._load, memory=memory, takes=takes)

    def _load(self, table: torch.Tensor | StoredMatrix) -> None:
        if self.stored is not None:
            self.stored.load(0, table)
            return
        assert self._table is not None
        for first, part in parts_of(table, self._release):
            self._table[first : first + len(part)].copy_(part)

    @property
    def nbytes(self) -> int:
        kept = self._table if self.stored is None else self.stored
        return 0 if kept is None else kept.nbytes


class LMHead:
    """Logits [rows, vocabulary] of hidden states [rows, width], in float32 where a kernel makes them so.

    `tied`: its weight is the embedding's table, and the checkpoint calls it by that name.
    """

    def __init__(
        self, options: LayerOptions, path: str, tokens: int, width: int, *, bias: bool = False, tied: str | None = None
    ) -> None:
        self.path, self.vocab_size, self.inputs = path, tokens, width
        self.parts = (Part(path, tokens),)
        self._weight_path = path if tied is None else tied
        self.weight: WeightForm = options.head_weight(tokens, width, self._weight_path)
        self.bias = options.zeros(tokens, dtype=self.weight.bias_dtype) if bias else None
        self._memory = OutputBufferPool()

    def __call__(self, x: torch.Tensor, adapters: RowAdapters | None = None) -> torch.Tensor:
        y = self.weight.logits(x, self.bias, self._memory)
        if adapters is not None:
            adapters.add(self.path, x, y)
        return y

    def embed(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` (int64 [T], contiguous, in range) of the weight, [T, width]."""
        out = _new((len(ids), self.inputs), dtype, ids.device)
        self.weight.read_rows(ids, out)
        return out

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        shape = (self.vocab_size, self.inputs)
        load, takes = partial(self.weight.load, 0), self.weight.takes(0)
        yield f"{self._weight_path}.weight", TensorSlot(shape, load, memory=self.weight.tensors(), takes=takes)
        if self.bias is not None:
            yield f"{self.path}.bias", TensorSlot.into(self.bias, initial=0.0)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


# Embeddings for each layer (Gemma 3n, Gemma 4): every token has a small vector of its own at every layer.


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
