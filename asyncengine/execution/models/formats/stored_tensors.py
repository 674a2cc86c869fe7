"""The tensors of a quantized safetensors checkpoint while the matrices that they make up are looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, shorten
from asyncengine.execution.layers.stored import GroupedRows, NumberForm
from asyncengine.execution.models.formats import StoredTensor

SCALES = ("F16", "BF16", "F32")
"""Kinds of tensors that scales come in."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The files' headers, and the few small tensors that have to be read to know what the others mean."""

    folder: Path
    headers: Mapping[str, StoredTensor]
    read: Callable[[str], torch.Tensor]
    """A tensor by its name, mapped and not copied."""

    def paths(self, ending: str) -> Iterator[str]:
        """Paths of modules: the part before `ending` of the names that have it."""
        for name in self.headers:
            if name.endswith(ending):
                yield name.removesuffix(ending)

    def need(self, name: str, kinds: Sequence[str], shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The header of a tensor that has to be there. Raises `ModelNotFound` if it is missing or something else."""
        found = self.headers.get(name)
        if found is None:
            raise ModelNotFound(f"{self.folder} lacks the tensor {name}")
        if found.kind not in kinds:
            raise ModelNotFound(f"{self.folder} has the tensor {name} as {found.kind}, not as {' or '.join(kinds)}")
        if shape is not None and found.shape != shape:
            raise self.misshapen(name, found.shape, shape)
        return found

    def matrix(self, name: str, kinds: Sequence[str]) -> StoredTensor:
        """The same, of two dimensions, none of them 0."""
        found = self.need(name, kinds)
        if len(found.shape) != 2 or 0 in found.shape:
            raise self.wrong(name, f"has the shape {list(found.shape)}, which is no matrix")
        return found

    def misshapen(self, name: str, shape: Sequence[int], wanted: object) -> ModelNotFound:
        shown = list(wanted) if isinstance(wanted, tuple) else wanted
        return ModelNotFound(f"{self.folder} has a wrong shape for the tensor {name}: {list(shape)}, not {shown}")

    def wrong(self, name: str, what: str) -> ModelNotFound:
        """The error that says what is wrong with a tensor."""
        return ModelNotFound(f"{self.folder}: {shorten(name, 300)} {what}")


def integer(settings: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number of a configuration. Raises `ModelNotFound`."""
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelNotFound(f"quantization_config: {name} must be a whole number, got {shorten(repr(value), 80)}")
    return value


def switch(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    """A yes or no of a configuration. Raises `ModelNotFound`."""
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelNotFound(f"quantization_config: {name} must be true or false, got {shorten(repr(value), 80)}")
    return value


# A quantized matrix whose parts lie in mapped safetensors files.

Parts = Mapping[str, torch.Tensor]
"""A matrix's tensors by what they are in it ("numbers", "scales", ...), as the files have them."""
Unpack = Callable[[Parts, int, int], GroupedRows]
"""(parts, first row, last row) -> those rows, in memory of their own."""


@dataclass(frozen=True, slots=True)
class FoundMatrix:
    """The tensors of a matrix, and the way to unpack them: known before any of it is read."""

    kind: str
    """The name of its type, for `info`."""
    shape: tuple[int, int]
    """(outputs, inputs)"""
    form: NumberForm
    parts: Mapping[str, str]
    """Names of its tensors in the files, by their part in the matrix. The first of them is the largest."""
    unpack: Unpack
    order: NDArray[np.int64] | None = None
    sliced: tuple[str, ...] = ("numbers",)
    """Parts whose first dimension is the outputs: pages of rows that have been read can go."""
    turned: tuple[str, ...] = ()
    """Parts whose last dimension is the outputs, or words of several: `unpack` gets them turned, and of these
    only the rows that it is asked for, which begin with row 0 then. All parts that are told apart by rows are such, or
    none is."""
    ignored: tuple[str, ...] = ()
    """Names of tensors beside it that say something of activations, which are rounded here as they come."""
    experts: int = 0
    """The number of matrices of equal size that lie one below the other (gpt-oss); 0: it is one."""


_WORD = 8
"""Rows that a word of turned parts can have: a number of them that all words' counts divide."""


class MappedMatrix:
    """A `StoredMatrix` of mapped tensors. Any number of threads may read its rows."""

    def __init__(self, found: FoundMatrix, parts: Parts, release: Callable[[torch.Tensor], object]) -> None:
        """`release`: told of tensors whose pages will not be read again."""
        self.name, self.shape, self.form, self.order = found.kind, found.shape, found.form, found.order
        self._found, self._parts, self._release = found, parts, release

    def rows(self, first: int, last: int) -> GroupedRows:
        """Rows [first, last), unpacked."""
        if not self._found.turned:
            return self._found.unpack(self._parts, first, last)
        begin = first // _WORD * _WORD
        parts = {**self._parts, **{name: self._turn(self._parts[name], begin, last) for name in self._found.turned}}
        return self._found.unpack(parts, first - begin, last - begin)

    def _turn(self, part: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """[outputs, others] of outputs [first, last), or of the words that have them."""
        each = self.shape[0] // part.shape[-1]
        return part[:, first // each : -(-last // each)].T.contiguous()

    def release(self, first: int, last: int) -> None:
        """Let the system take back the pages of these rows; with the last of them, those of the whole matrix."""
        if last == self.shape[0]:
            for part in self._parts.values():
                self._release(part)
            return
        for name in self._found.sliced:
            self._release(self._parts[name][first:last])
