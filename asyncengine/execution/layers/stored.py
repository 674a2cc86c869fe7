"""Quantized matrices as checkpoints store them: the one vocabulary between files (`models.formats`) and kernels.

A matrix [outputs, inputs] of small integers; every `group` inputs of a row share a scale, and perhaps a zero or a
minimum:

    w[o, i] = row_scale[o] * (scale[o, g] * value(number[o, i], zero[o, g]) - minimum[o, g]),    g = i // group

Formats differ in which of these they have, and in their numbers of bits. A scale may itself be a small integer times
the scale of a block of groups (llama.cpp's k-quants): both are kept, so that kernels read fewer bytes. Everything here
is exact; rounding happens later, to scales or to x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Below = Literal["middle", "zeros", "minima", "table", "floats"]
"""The meaning of a number: number - 2^(bits - 1); number - its group's zero; number, from which the group's minimum is
taken; an entry of a table; or bits of an e4m3 float."""


@dataclass(frozen=True, slots=True)
class NumberForm:
    """The form in which the numbers of a matrix are stored."""

    bits: int
    """Bits of a number: 4, 6 or 8. Numbers of 2, 3 and 5 bits are kept in the next of them."""
    group: int
    """Inputs that share a scale: 16, 32, 64, 128 or more (a power of two); 0: there is only the row's scale."""
    below: Below = "middle"
    block: int = 0
    """Inputs that share a scale of scales, a multiple of `group`; 0: scales are numbers of their own."""
    scale_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """The narrowest that holds the scales (of blocks, where there are blocks) exactly."""
    table: tuple[int, ...] = ()
    """Sixteen values of -128 .. 127, with `below` "table" (MXFP4: twice the number; IQ4_NL)."""
    floats: int | None = None
    """Inputs that share a scale of the e4m3 floats that the numbers were made of; 0: all of a row; None: they were not.
    """


class StoredForm(NamedTuple):
    """Facts about a `StoredMatrix` before it is read, from which layers allocate memory for it."""

    name: str
    numbers: NumberForm
    ordered: bool = False
    """Whether it may have an `order`."""

    def takes(self, matrix: StoredMatrix) -> bool:
        """Whether memory that was allocated for this form can hold the matrix."""
        return matrix.form == self.numbers and (self.ordered or matrix.order is None)


class GroupedRows(NamedTuple):
    """Some rows of such a matrix. n rows; G = inputs / group; B = inputs / block, or G without blocks."""

    numbers: NDArray[np.uint8]
    """[n, inputs], one in a byte."""
    scales: NDArray[np.float32] | None = None
    """[n, B]"""
    steps: NDArray[np.int8] | None = None
    """[n, G]: the scale of a group is its block's times this."""
    zeros: NDArray[np.uint8] | None = None
    """[n, G]"""
    minima: NDArray[np.float32] | None = None
    """[n, B]"""
    minimum_steps: NDArray[np.int8] | None = None
    """[n, G], as `steps`."""
    row_scales: NDArray[np.float32] | None = None
    """[n]"""
    floats: NDArray[np.uint8] | None = None
    """[n, inputs]: bits of e4m3 floats, of which the numbers were made."""
    float_scales: NDArray[np.float32] | None = None
    """[n, inputs / form.floats]"""


class StoredMatrix(Protocol):
    """A quantized matrix in mapped files."""

    name: str
    """The name of its type, for `info`: "Q4_K", "awq", ..."""
    shape: tuple[int, int]
    """(outputs, inputs)"""
    form: NumberForm
    order: NDArray[np.int64] | None
    """Input i of the numbers is input order[i] of x (GPTQ's activation order); None: they are the same."""

    def rows(self, first: int, last: int) -> GroupedRows:
        """Rows [first, last), unpacked into memory of their own."""

    def release(self, first: int, last: int) -> None:
        """Note that rows [first, last) will not be read again, so that the system may take back their pages."""


class RowRange:
    """Rows [first, last) of a stored matrix as a matrix: one expert's, if a file has all experts in one."""

    def __init__(self, matrix: StoredMatrix, first: int, last: int) -> None:
        self.name, self.form, self.order = matrix.name, matrix.form, matrix.order
        self.shape = (last - first, matrix.shape[1])
        self._matrix, self._first = matrix, first

    def rows(self, first: int, last: int) -> GroupedRows:
        """Rows [first, last) of these."""
        return self._matrix.rows(self._first + first, self._first + last)

    def release(self, first: int, last: int) -> None:
        """Give back the memory of these rows, as the whole matrix does."""
        self._matrix.release(self._first + first, self._first + last)


def bytes_of(form: NumberForm, numbers: int, *, whole_bytes: bool = False) -> int:
    """Approximate bytes of `numbers` numbers with scales, zeros and minima. `whole_bytes`: 6-bit ones take 8 bits."""
    size = (8 if whole_bytes and form.bits == 6 else form.bits) / 8
    if form.group:
        scale = {"float16": 2, "bfloat16": 2, "float32": 4}[form.scale_dtype]
        planes = 2 if form.below == "minima" else 1
        size += planes * (scale / form.block + 1 / form.group if form.block else scale / form.group)
        size += (form.below == "zeros") / form.group
    return round(numbers * size)


def dequantize(rows: GroupedRows, form: NumberForm) -> torch.Tensor:
    """float32 [n, inputs], in the order of the numbers."""
    count, inputs = rows.numbers.shape
    group = form.group or inputs
    values = rows.numbers.astype(np.float32)
    if form.below == "table":
        values = np.asarray(form.table, dtype=np.float32)[rows.numbers]
    elif form.below == "middle":
        values -= np.float32(1 << (form.bits - 1))
    grouped = values.reshape(count, -1, group)
    if rows.zeros is not None:
        grouped -= rows.zeros.astype(np.float32)[:, :, None]
    if rows.scales is not None:
        grouped *= _of_groups(rows.scales, rows.steps, grouped.shape[1])[:, :, None]
    if rows.minima is not None:
        grouped -= _of_groups(rows.minima, rows.minimum_steps, grouped.shape[1])[:, :, None]
    if rows.row_scales is not None:
        grouped *= rows.row_scales[:, None, None]
    return torch.from_numpy(values)


def _of_groups(blocks: NDArray[np.float32], steps: NDArray[np.int8] | None, groups: int) -> NDArray[np.float32]:
    """[n, G] scales (or minima) of groups, from those of their blocks and the groups' steps."""
    if steps is None:
        return blocks
    return np.repeat(blocks, groups // blocks.shape[1], axis=1) * steps.astype(np.float32)


def dense(matrix: StoredMatrix, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Exact values of rows [first, last): float32 [last - first, inputs], in the order of x."""
    numbers = dequantize(matrix.rows(first, matrix.shape[0] if last is None else last), matrix.form)
    if matrix.order is None:
        return numbers
    ordered = torch.empty_like(numbers)
    ordered[:, torch.from_numpy(matrix.order)] = numbers
    return ordered


def plain(tensor: torch.Tensor | StoredMatrix, shape: Sequence[int]) -> torch.Tensor:
    """A tensor as it is; a stored matrix dequantized, as float32 of this shape."""
    return tensor if isinstance(tensor, torch.Tensor) else dense(tensor).view(tuple(shape))


# Slots for a checkpoint's tensors, by which weights enter a model both when loading and when updating.


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlot:
    """Destination of one named tensor of a checkpoint."""

    shape: tuple[int, ...]
    """The tensor's shape in a checkpoint."""
    load: Callable[[torch.Tensor | StoredMatrix], None]
    """Takes a tensor of that shape and any float dtype, or quantized, perhaps mapped from a file; keeps nothing of it.
    """
    initial: float | None = None
    """The value in a model without a checkpoint; None: random numbers."""
    other_shape: tuple[int, ...] | None = None
    """Another shape that the tensor may have: `load` tells by the shape what it is given."""
    replaces: tuple[str, ...] = ()
    """Names of tensors in whose stead checkpoints may have this one."""
    waits_with: object = None
    """Key shared by the slots whose tensors can only be packed together, once all of them are given."""
    memory: Sequence[torch.Tensor] = ()
    """All memory that `load` writes to; empty: unknown."""
    takes: StoredForm | None = None
    """The only stored form that it takes, since memory was allocated for it; None: any, and plain numbers."""

    @staticmethod
    def into(target: torch.Tensor, added: float = 0.0, initial: float | None = None, factor: float = 1.0) -> TensorSlot:
        """A slot that copies into `target`, in its dtype, multiplies by `factor` there, and adds `added` (Gemma's
        norms: 1 + weight)."""

        def load(tensor: torch.Tensor | StoredMatrix) -> None:
            target.copy_(plain(tensor, target.shape))
            if factor != 1.0:
                target.mul_(factor)
            if added:
                target.add_(added)

        return TensorSlot(tuple(target.shape), load, initial)

    @staticmethod
    def some(
        target: torch.Tensor, count: int, rows: Sequence[tuple[slice, slice]], initial: float | None = None,
        made: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers,
    ) -> TensorSlot:  # fmt: skip
        """A slot for a tensor [count] that copies some of its numbers into `target`: `rows` are (slice of the tensor,
        slice of `target`). `made` is applied to the numbers."""

        def load(tensor: torch.Tensor | StoredMatrix) -> None:
            whole = made(plain(tensor, (count,)).view(count))
            for given, own in rows:
                target[own] = whole[given]

        return TensorSlot((count,), load, initial)


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Every tensor among these values, in their tuples and lists, and in objects with weights (`Weighted`, or any
    with a method `slots`); each once."""
    tensors: dict[int, torch.Tensor] = {}
    queue = [*values]
    while queue:
        value = queue.pop(0)
        if isinstance(value, torch.Tensor):
            tensors[id(value)] = value
        elif isinstance(value, (tuple, list)):
            queue[:0] = value
        elif isinstance(value, Weighted) or callable(getattr(type(value), "slots", None)):
            queue[:0] = vars(value).values()
    return list(tensors.values())


def nbytes_of(values: Iterable[Any]) -> int:
    """Bytes of the `tensors_in` these: what two of them share counts once."""
    return sum(tensor.nbytes for tensor in tensors_in(values))


class Weighted:
    """An object with weights, its own or those of objects that it consists of."""

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of its weights."""
        return tensors_in([self])

    @property
    def nbytes(self) -> int:
        """Bytes of these."""
        return nbytes_of([self])


class Layer(Weighted):
    """A component of a model with weights, its own or those of the layers that it consists of."""

    def inner(self) -> Sequence[Any]:
        """The layers that it consists of, in the order of their tensors."""
        return [value for value in vars(self).values() if isinstance(value, Layer)]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name."""
        for layer in self.inner():
            yield from layer.slots()
