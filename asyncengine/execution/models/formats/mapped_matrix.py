"""A quantized matrix whose parts lie in mapped safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.execution.layers.stored import GroupedRows, NumberForm

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
