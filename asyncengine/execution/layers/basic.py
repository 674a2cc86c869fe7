"""Linear layers, norms and embeddings, from which all other layers are built.

A linear layer may merge several matrices of the checkpoint. A norm may add a branch to the residual stream first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch.nn import functional

from asyncengine.execution.device.arena import OutputBufferPool, new_tensor
from asyncengine.execution.layers.kernels import ACTIVATIONS, CompiledKernels
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.sharded import LocalWeight, Share, own_rows
from asyncengine.execution.layers.step import RowAdapters
from asyncengine.execution.layers.stored import Layer, StoredMatrix, TensorSlot, plain
from asyncengine.execution.layers.weight_forms import WeightForm, row_chunks


class Matrix(NamedTuple):
    """One matrix of the checkpoint, of several that a linear layer may hold side by side."""

    path: str
    """Its name in the checkpoint without ".weight", by which adapters target it as well."""
    outputs: int


class Linear(Layer):
    """y = x W^T + b. Matrices that multiply the same x are merged: queries, keys and values; gate and up.

    `transposed`: the checkpoint has [inputs, outputs] (GPT-2). `share`: the outputs that this rank needs; it computes
    only those if the weight's form allows it (`local`).
    """

    def __init__(
        self, options: LayerOptions, matrices: Sequence[Matrix], inputs: int, *, bias: bool = False,
        transposed: bool = False, share: Share | None = None,
    ) -> None:  # fmt: skip
        self.matrices = tuple(matrices)
        self.path = matrices[0].path
        self.inputs, self.outputs = inputs, sum(matrix.outputs for matrix in matrices)
        self.transposed = transposed
        self._firsts = [0, *accumulate(matrix.outputs for matrix in matrices)]
        paths = () if transposed else [matrix.path for matrix in matrices]
        bounds = self._firsts[1:-1]
        local = None if share is None else options.local_weight(share, inputs, bounds, paths)
        self._share, self.local = share, local is not None
        """Whether it computes this rank's outputs only."""
        self.weight: WeightForm = local or options.weight(self.outputs, inputs, bounds, paths)
        self.outputs = self.weight.outputs
        self.bias = options.zeros(self.outputs, dtype=self.weight.bias_dtype) if bias else None

    def __call__(self, x: torch.Tensor, adapters: RowAdapters | None = None) -> torch.Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        y = self.weight.multiply(x, self.bias)
        if adapters is not None:
            adapters.add(self.path, x, y)
        return y

    def local_outputs(self, x: torch.Tensor, adapters: RowAdapters | None = None) -> torch.Tensor:
        """[rows, inputs] -> [rows, this rank's outputs]; all outputs without `share`."""
        y = self(x, adapters)
        return y if self._share is None or self.local else self._share.columns(y)

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        memory = self.weight.tensors()
        for (path, outputs), first in zip(self.matrices, self._firsts, strict=False):
            shape = (self.inputs, outputs) if self.transposed else (outputs, self.inputs)
            takes, waiting = self.weight.takes(first), self.weight.waiting
            load = partial(self._load, first)
            yield f"{path}.weight", TensorSlot(shape, load, waits_with=waiting, memory=memory, takes=takes)
            if self.bias is not None:
                yield f"{path}.bias", self._bias_slot(self.bias, first, outputs)

    def kept_outputs(self) -> tuple[tuple[slice, ...], ...] | None:
        """The outputs of each matrix that this rank has; None: all of them."""
        if not isinstance(self.weight, LocalWeight):
            return None
        spans, firsts = self.weight.spans, zip(self.matrices, self._firsts, strict=False)
        return tuple(tuple(rows for rows, _ in own_rows(spans, first, outputs)) for (_, outputs), first in firsts)

    def _bias_slot(self, bias: torch.Tensor, first: int, count: int) -> TensorSlot:
        if not isinstance(self.weight, LocalWeight):
            return TensorSlot.into(bias[first : first + count], initial=0.0)
        return TensorSlot.some(bias, count, own_rows(self.weight.spans, first, count), 0.0)

    def _load(self, first: int, tensor: torch.Tensor | StoredMatrix) -> None:
        self.weight.load(first, plain(tensor, tensor.shape).T.contiguous() if self.transposed else tensor)


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A family's norm."""

    kind: Literal["rms", "layer"] = "rms"
    epsilon: float = 1e-6
    offset: float = 0.0
    """A number that is added to the checkpoint's weight in float32: 1 in Gemma."""
    weight: bool = True
    """False: normalisation only (OLMo 1)."""
    bias: bool = False


class Norm(Layer):
    """x / rms(x) * weight, or layer normalisation, over the last dimension; rounded once, to x's dtype.

    `heads`: the weight is [heads, width], one row for each head of x [T, heads, width] (Cohere); with "{}" in the path,
    the checkpoint has a tensor [width] for each head (StableLM). `share`: x has this rank's heads only.
    """

    def __init__(
        self, options: LayerOptions, config: NormConfig, path: str, width: int, heads: int = 0,
        share: Share | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.path = path
        self.width = width
        self._kernels = options.kernels
        shape = (heads, width) if heads else (width,)
        by_kernel = config.kind == "rms" and not heads
        self._weight = options.zeros(*shape, dtype=options.norm_dtype if by_kernel else torch.float32).fill_(1.0)
        self._bias = options.zeros(*shape, dtype=torch.float32) if config.bias else None
        self.weight, self.bias = self._weight, self._bias
        if heads and share is not None:
            kept = share.local_slice(heads)
            self.weight, self.bias = self._weight[kept], None if self._bias is None else self._bias[kept]
        self._by_kernel = by_kernel
        self._plain = config.kind == "layer" and not heads
        """Whether it is a layer norm with one weight for all heads."""
        self._shift = torch.zeros_like(self.weight) if self._plain and self.bias is None else self.bias
        self._folded = 0.0 if by_kernel and options.norm_dtype != torch.float32 else config.offset
        """The offset that is added to the stored weight; 0 for a weight of a narrower dtype, which would round it."""
        self._offset = config.offset - self._folded

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        if self._by_kernel:
            return self._kernels.rms_norm(x, self.weight, config.epsilon, self._offset)
        if self._plain:
            assert self._shift is not None
            return self._kernels.layer_norm(x, self.weight, self._shift, config.epsilon)
        return self._normed(x.float()).to(x.dtype)

    def _normed(self, wide: torch.Tensor) -> torch.Tensor:
        """The norm in float32, by torch's operators."""
        config = self.config
        if config.kind == "layer":
            wide = functional.layer_norm(wide, (self.width,), None, None, config.epsilon)
        else:
            wide = functional.rms_norm(wide, (self.width,), None, config.epsilon)
        wide = wide * self.weight
        return wide if self.bias is None else wide + self.bias

    def add(
        self, residual: torch.Tensor, branch: torch.Tensor, scale: float, kept: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual + branch * scale, its norm). Not `kept`: the first result may be arbitrary."""
        if self._by_kernel:
            return self._kernels.add_rms_norm(residual, branch, scale, self.weight, self.config.epsilon, self._offset)
        if self._plain:
            assert self._shift is not None
            epsilon = self.config.epsilon
            return self._kernels.add_layer_norm(residual, branch, scale, self.weight, self._shift, epsilon, kept)
        total = torch.add(residual.float(), branch, alpha=scale)
        return total.to(residual.dtype), self._normed(total).to(residual.dtype)

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x [T, heads, dim], over each head, or over all heads if it is as wide as they are together."""
        return self(x.reshape(len(x), -1, self.width)).reshape(x.shape)

    def norm_columns(self, x: torch.Tensor, first: int, size: int) -> None:
        """Norm the columns [first, first + size) of x [T, all] in place, as `of_heads` does."""
        groups, kernels = size // self.width, self._kernels
        if isinstance(kernels, CompiledKernels):
            centred = self.config.kind == "layer"
            kernels.norm_heads(x, self.weight, self.bias, first, groups, self.config.epsilon, centred)
        else:
            columns = x[:, first : first + size]
            columns.copy_(self(columns.reshape(len(columns), groups, -1)).flatten(1))

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        if "{}" in self.path:
            for head, row in enumerate(self._weight):
                yield f"{self.path.format(head)}.weight", TensorSlot.into(row, self._folded, 1.0 - self.config.offset)
        elif self.config.weight:
            yield f"{self.path}.weight", TensorSlot.into(self._weight, self._folded, 1.0 - self.config.offset)
        if self._bias is not None:
            yield f"{self.path}.bias", TensorSlot.into(self._bias, initial=0.0)


def named_norm(options: LayerOptions, config: NormConfig | None, path: str | None, width: int) -> Norm | None:
    """The norm of that name; None without a configuration or a name."""
    return None if config is None or path is None else Norm(options, config, path, width)


# Token embeddings and the output layer (LM head), which are often one matrix.

_FEW = 64
"""Token ids up to which they are checked in Python; numpy is faster beyond."""


class Embedding(Layer):
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
        shape, on_cpu = (len(ids), self.width), self._device.type == "cpu"
        if on_cpu:
            self._check(ids)
        if self._table is not None:
            out = torch.embedding(self._table, ids)
        else:
            form = self.stored if self._head is None else self._head.weight
            assert form is not None
            out = new_tensor(shape, self._dtype) if on_cpu else ids.new_empty(shape, dtype=self._dtype)
            form.read_rows(ids.contiguous(), out)
        if self.scale != 1.0:
            out.mul_(self.scale)
        if adapters is not None:  # adapters' factors include the scale
            adapters.add(self.path, ids, out)
        return out

    def first_rows(self, count: int) -> torch.Tensor:
        """Embeddings [count, width] of the ids 0 to `count` - 1; a view of the table if that is a plain tensor."""
        if self._table is not None and self.scale == 1.0:
            return self._table[:count]
        return self(torch.arange(count, device=self._device))

    def _check(self, ids: torch.Tensor) -> None:
        # torch's operators release the interpreter lock, and numpy's take longer to call than a loop over a few ids
        if ids.shape[0] <= _FEW:
            known = ids.tolist()
            low, high = min(known, default=0), max(known, default=0)
        else:
            low, high = int(ids.numpy().min()), int(ids.numpy().max())
        if low < 0 or high >= self.num_embeddings:
            raise IndexError(f"token ids must be in 0 .. {self.num_embeddings - 1}")

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
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
        for first, rows in row_chunks(table, self._release):
            self._table[first : first + len(rows)].copy_(rows)


class LMHead(Layer):
    """Logits [rows, vocabulary] of hidden states [rows, width], in float32 where a kernel makes them so.

    `tied`: its weight is the embedding's table, and the checkpoint calls it by that name.
    """

    def __init__(
        self, options: LayerOptions, path: str, tokens: int, width: int, *, bias: bool = False, tied: str | None = None
    ) -> None:
        self.path, self.vocab_size, self.inputs = path, tokens, width
        self.matrices = (Matrix(path, tokens),)
        self._weight_path = path if tied is None else tied
        self.weight: WeightForm = options.head_weight(tokens, width, self._weight_path)
        self.bias = options.zeros(tokens, dtype=self.weight.bias_dtype) if bias else None
        self._memory = OutputBufferPool()

    def __call__(self, x: torch.Tensor, adapters: RowAdapters | None = None) -> torch.Tensor:
        y = self.weight.logits(x, self.bias, self._memory)
        if adapters is not None:
            adapters.add(self.path, x, y)
        return y

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        shape = (self.vocab_size, self.inputs)
        load, takes = partial(self.weight.load, 0), self.weight.takes(0)
        yield f"{self._weight_path}.weight", TensorSlot(shape, load, memory=self.weight.tensors(), takes=takes)
        if self.bias is not None:
            yield f"{self.path}.bias", TensorSlot.into(self.bias, initial=0.0)


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


class LayerInputs(Layer):
    """The vectors of all layers, [T, layers, width]: a token's own, plus a projection of its embedding."""

    def __init__(
        self, options: LayerOptions, config: LayerInputConfig, norm: NormConfig, layers: int, width: int
    ) -> None:
        self._shape = (layers, config.width)
        self.table = Embedding(options, config.table, config.vocab_size, layers * config.width, config.width**0.5)
        self.projection = Linear(options, [Matrix(config.projection, layers * config.width)], width)
        self.norm = Norm(options, norm, config.norm, config.width)
        self._scale = width**-0.5

    def __call__(self, ids: torch.Tensor, h: torch.Tensor, adapters: RowAdapters | None) -> torch.Tensor:
        """Vectors [T, layers, numbers of one] of int64 ids [T] and their embeddings h [T, width]."""
        shape = (len(ids), *self._shape)
        projected = self.norm((self.projection(h, adapters) * self._scale).view(shape))
        return (projected + self.table(ids).view(shape)) * 2.0**-0.5


class LayerInput(Layer):
    """A layer's use of its vectors: norm(out(act(gate(h)) * vector)), to be added to the stream h."""

    def __init__(
        self, options: LayerOptions, config: LayerInputConfig, norm: NormConfig, prefix: str, width: int
    ) -> None:
        self._activation, self._kernels = ACTIVATIONS[config.activation], options.kernels
        self.gated = options.kernels.gated(config.activation)
        self.gate = Linear(options, [Matrix(prefix + config.gate, config.width)], width)
        self.out = Linear(options, [Matrix(prefix + config.out, width)], config.width)
        self.norm = Norm(options, norm, prefix + config.out_norm, width)

    def __call__(self, h: torch.Tensor, vectors: torch.Tensor, adapters: RowAdapters | None) -> torch.Tensor:
        """h [rows, width], vectors [rows, width of a vector] -> [rows, width]."""
        gate = self.gate(h, adapters)
        if self.gated is None:
            return self.norm(self.out(self._activation(gate) * vectors, adapters))
        return self.norm(self.out(self.gated(self._kernels.joined(gate, vectors)), adapters))

    def linears(self) -> list[Linear]:
        return [self.gate, self.out]
