"""Pooling: from the hidden states of a text to one vector, whole or chunk by chunk.

Done on the host, text by text, in float32: a sum over positions is one addition after the other, so that a vector has
the same bits whatever was computed beside it, and in however many chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound
from asyncengine.pooling.activations import activate
from asyncengine.pooling.spec import DenseSpec, PoolingSpec
from asyncengine.step import Row, StepResult

Floats = NDArray[np.float32]
NON_FINITE = "the model computed numbers that are not finite for this text"


class Span(NamedTuple):
    """The span of a row's hidden states."""

    row: int
    """Its place in the batch."""
    first: int
    last: int
    """Rows [first, last) of the hidden states: positions of the chunk, or its last one alone."""


class Pooler:
    """Pools the rows of one runner's steps, in their order. Keeps what it knows of texts that come in chunks."""

    def __init__(self, spec: PoolingSpec, width: int, head: torch.Tensor | None = None) -> None:
        """`width`: of the hidden states. `head`: a matrix [labels, width] behind the pooling. Raises `ModelNotFound`
        for Dense modules whose weights are missing or do not fit."""
        self.spec = spec
        self._head = None if head is None else np.ascontiguousarray(head.float().numpy())
        self.every = spec.every
        """Whether it needs all positions; else the last one."""
        self.layers = [Dense(layer) for layer in spec.dense]
        sizes = [max(1, len(spec.modes)) * width, *(layer.spec.outputs for layer in self.layers)]
        for layer, size in zip(self.layers, sizes, strict=False):
            if layer.spec.inputs != size:
                raise ModelNotFound(f"{layer.spec.folder} takes {layer.spec.inputs} numbers, and is given {size}")
        self.dimensions = sizes[-1] if self._head is None else len(self._head)
        self._partial: dict[int, Partial] = {}
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
        """None: more is to come."""
        if not self.every:
            return states[-1].copy() if row.samples else None
        if row.start == 0:
            self._partial[row.slot] = Partial(self.spec.modes)
        partial = self._partial[row.slot]
        pooled = row.spec.pooled
        partial.add(states, row.start, 0 if pooled is None else pooled.skip)
        return self._partial.pop(row.slot).vector() if row.samples else None


class Partial:
    """The part of one text's vector that its first positions give."""

    def __init__(self, modes: Sequence[str]) -> None:
        self._modes = modes
        self._count = 0
        self._weight = 0
        self._found: dict[str, Floats] = {}

    def add(self, states: Floats, start: int, skip: int) -> None:
        """`states` [n, width] of the positions from `start`; the text's first `skip` are left out."""
        left_out = min(len(states), max(0, skip - start))
        states = states[left_out:]
        if not len(states):
            return
        found, first = self._found, start + left_out
        if not self._count and "cls" in self._modes:
            found["cls"] = states[0].copy()
        if "lasttoken" in self._modes:
            found["lasttoken"] = states[-1].copy()
        if "max" in self._modes:
            most = states.max(axis=0)
            found["max"] = np.maximum(found["max"], most) if "max" in found else most
        if "mean" in self._modes or "mean_sqrt_len_tokens" in self._modes:
            found["sum"] = _sum(found.get("sum"), states)
        if "weightedmean" in self._modes:
            weights = np.arange(first + 1, first + 1 + len(states), dtype=np.float32)
            found["weighted"] = _sum(found.get("weighted"), states * weights[:, None])
            self._weight += int(weights.sum(dtype=np.float64))
        self._count += len(states)

    def vector(self) -> Floats:
        """[modes * width]"""
        parts = [self._part(mode) for mode in self._modes]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _part(self, mode: str) -> Floats:
        part: Floats
        match mode:
            case "mean":
                part = self._found["sum"] / np.float32(self._count)
            case "mean_sqrt_len_tokens":
                part = self._found["sum"] / np.sqrt(np.float32(self._count))
            case "weightedmean":
                part = self._found["weighted"] / np.float32(self._weight)
            case _:
                part = self._found[mode]
        return part


def _sum(known: Floats | None, states: Floats) -> Floats:
    """Row after row, from what is known: in chunks the same as in one go."""
    if known is not None:
        states = np.concatenate((known[None], states))
    total: Floats = np.add.reduce(states, axis=0)
    return total


class Dense:
    """A linear layer with an activation, of one vector at a time: a product of many would round by their number."""

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
        found: dict[str, torch.Tensor] = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelNotFound(f"{file} cannot be read: {error}") from None
    return found


def _tensor(folder: Path, stored: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> Floats:
    found = stored.get(name)
    if found is None:
        raise ModelNotFound(f"{folder} lacks the tensor {name}")
    if tuple(found.shape) != shape:
        raise ModelNotFound(f"{folder} has a wrong shape for the tensor {name}: {list(found.shape)}, not {list(shape)}")
    numbers: Floats = np.ascontiguousarray(found.float().numpy())
    return numbers
