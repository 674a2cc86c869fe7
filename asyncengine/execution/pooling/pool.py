"""The pooler: the hidden states of a text become one vector, whole or chunk by chunk.

It computes on the host, text by text, in float32: a sum over positions is one addition after the other, so that a
vector has the same bits whatever was computed beside it, and in however many chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from asyncengine.activations import Floats, activate
from asyncengine.errors import ModelNotFound
from asyncengine.pooling_spec import DenseSpec, PoolingSpec
from asyncengine.step import Row, StepResult

NON_FINITE = "the model computed numbers that are not finite for this text"


class Span(NamedTuple):
    """The hidden states of one row of a batch: the positions of its chunk, or the last of them alone."""

    row: int
    """Index of the row in the batch."""
    first: int
    last: int
    """Rows [first, last) of the hidden states."""


class Pooler:
    """Pools the rows of one runner's steps, in their order. Keeps the sums of texts that come in chunks."""

    def __init__(self, spec: PoolingSpec, width: int, head: torch.Tensor | None = None) -> None:
        """`width`: numbers of a hidden state. `head`: a matrix [labels, width] behind the pooling. Raises
        `ModelNotFound` for Dense modules whose weights are missing or do not fit."""
        self.spec = spec
        self._head = None if head is None else np.ascontiguousarray(head.float().numpy())
        self.every = spec.every
        """Whether it needs the hidden states of all positions, or of the last one."""
        self.layers = [Dense(layer) for layer in spec.dense]
        sizes = [max(1, len(spec.modes)) * width, *(layer.spec.outputs for layer in self.layers)]
        for layer, size in zip(self.layers, sizes, strict=False):
            if layer.spec.inputs != size:
                raise ModelNotFound(f"{layer.spec.folder} takes {layer.spec.inputs} numbers, and is given {size}")
        self.dimensions = sizes[-1] if self._head is None else len(self._head)
        self._sums: dict[int, Sums] = {}
        """Texts of which a chunk is still to come, by slot."""

    def read(self, rows: Sequence[Row], spans: Sequence[Span], hidden: torch.Tensor, result: StepResult) -> None:
        """Put the vectors of rows that end their texts into `result`. `hidden` [N, width], on the host."""
        states = hidden.float().numpy()
        for span in spans:
            row = rows[span.row]
            vector = self._pool(row, states[span.first : span.last])
            if vector is None:
                continue
            for layer in self.layers:
                vector = layer(vector)
            if self._head is not None:
                vector = self._head @ vector
            if np.isfinite(vector).all():
                result.vectors[span.row] = vector
            else:
                result.errors[span.row] = NON_FINITE

    def _pool(self, row: Row, states: Floats) -> Floats | None:
        """The pooled vector of the row's text, given its chunk [positions, width]; None: another chunk is to come."""
        if not self.every:
            return states[-1].copy() if row.samples else None
        sums = Sums(self.spec.modes) if row.start == 0 else self._sums.pop(row.slot)
        pooled = row.spec.pooled
        sums.add(states, row.start, 0 if pooled is None else pooled.skip)
        if row.samples:
            return sums.vector()
        self._sums[row.slot] = sums
        return None


class Sums:
    """The sums, maxima and single states of one text's first positions, as each pooling mode needs them."""

    def __init__(self, modes: Sequence[str]) -> None:
        self._modes = modes
        self._count = 0
        self._weight = 0
        self._values: dict[str, Floats] = {}

    def add(self, states: Floats, start: int, skip: int) -> None:
        """Add `states` [n, width] of the positions from `start` on; the text's first `skip` are left out."""
        left_out = min(len(states), max(0, skip - start))
        states = states[left_out:]
        if not len(states):
            return
        values, first = self._values, start + left_out
        if not self._count and "cls" in self._modes:
            values["cls"] = states[0].copy()
        if "lasttoken" in self._modes:
            values["lasttoken"] = states[-1].copy()
        if "max" in self._modes:
            highest = states.max(axis=0)
            values["max"] = np.maximum(values["max"], highest) if "max" in values else highest
        if "mean" in self._modes or "mean_sqrt_len_tokens" in self._modes:
            values["sum"] = _sum(values.get("sum"), states)
        if "weightedmean" in self._modes:
            weights = np.arange(first + 1, first + 1 + len(states), dtype=np.float32)
            values["weighted"] = _sum(values.get("weighted"), states * weights[:, None])
            self._weight += int(weights.sum(dtype=np.float64))
        self._count += len(states)

    def vector(self) -> Floats:
        """The vector [modes * width]."""
        count, values = np.float32(self._count), dict(self._values)
        if "sum" in values:
            values |= {"mean": values["sum"] / count, "mean_sqrt_len_tokens": values["sum"] / np.sqrt(count)}
        if "weighted" in values:
            values["weightedmean"] = values["weighted"] / np.float32(self._weight)
        vectors = [values[mode] for mode in self._modes]
        return vectors[0] if len(vectors) == 1 else np.concatenate(vectors)


def _sum(before: Floats | None, states: Floats) -> Floats:
    """The sum of `before` and `states` row after row: in chunks the same bits as in one go."""
    if before is not None:
        states = np.concatenate((before[None], states))
    return np.add.reduce(states, axis=0)


class Dense:
    """A linear layer with an activation, for one vector at a time: a product of many would round by their number."""

    def __init__(self, spec: DenseSpec) -> None:
        """Raises `ModelNotFound` for weights that are missing, misshapen, or in no safetensors file."""
        self.spec = spec
        stored = _tensors(spec.folder)
        self._weight = _tensor(spec.folder, stored, "linear.weight", (spec.outputs, spec.inputs))
        self._bias = _tensor(spec.folder, stored, "linear.bias", (spec.outputs,)) if spec.bias else None
        self._residual: Floats | None = None
        if spec.residual and spec.inputs != spec.outputs:
            self._residual = _tensor(spec.folder, stored, "residual.weight", (spec.outputs, spec.inputs))

    def __call__(self, vector: Floats) -> Floats:
        out: Floats = self._weight @ vector
        if self._bias is not None:
            out += self._bias
        out = activate(self.spec.activation, out[None])[0]
        if self.spec.residual:
            out = out + (vector if self._residual is None else self._residual @ vector)
        return out


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / "model.safetensors"
    if not file.is_file():
        raise ModelNotFound(f"{folder} has no model.safetensors: only safetensors files are read, pickles run code")
    try:
        stored: dict[str, torch.Tensor] = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelNotFound(f"{file} cannot be read: {error}") from None
    return stored


def _tensor(folder: Path, stored: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> Floats:
    tensor = stored.get(name)
    if tensor is None:
        raise ModelNotFound(f"{folder} lacks the tensor {name}")
    if tuple(tensor.shape) != shape:
        raise ModelNotFound(
            f"{folder} has a wrong shape for the tensor {name}: {list(tensor.shape)}, not {list(shape)}"
        )
    return np.ascontiguousarray(tensor.float().numpy())
