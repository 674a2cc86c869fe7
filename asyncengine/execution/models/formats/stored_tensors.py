"""The tensors of a quantized safetensors checkpoint, the matrices that they make up, and the numbers in these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, shorten
from asyncengine.execution.layers.stored import GroupedRows, NumberForm
from asyncengine.execution.models.formats import StoredTensor

SCALES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""Kinds of tensors that scales come in -> `NumberForm.scale_dtype`."""
Setting = TypeVar("Setting", int, bool)


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The files' headers, and the few small tensors that have to be read to know what the others mean."""

    folder: Path
    headers: Mapping[str, StoredTensor]
    read: Callable[[str], Any]
    """A tensor by its name, mapped and not copied."""

    def paths(self, ending: str) -> Iterator[str]:
        """Paths of modules: the part before `ending` of the names that have it."""
        for name in self.headers:
            if name.endswith(ending):
                yield name.removesuffix(ending)

    def need(self, name: str, kinds: Collection[str], shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The header of a tensor that has to be there. Raises `ModelNotFound` if it is missing or something else."""
        found = self.headers.get(name)
        if found is None:
            raise ModelNotFound(f"{self.folder} lacks the tensor {name}")
        if found.kind not in kinds:
            raise ModelNotFound(f"{self.folder} has the tensor {name} as {found.kind}, not as {' or '.join(kinds)}")
        if shape is not None and found.shape != shape:
            raise self.misshapen(name, found.shape, shape)
        return found

    def matrix(self, name: str, kinds: Collection[str]) -> StoredTensor:
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


def setting(settings: Mapping[str, Any], name: str, default: Setting) -> Setting:
    """A value of a configuration, of its default's type: a whole number, or a yes or no. Raises `ModelNotFound`."""
    value = settings.get(name)
    if value is not None and type(value) is not type(default):
        words = "true or false" if isinstance(default, bool) else "a whole number"
        raise ModelNotFound(f"quantization_config: {name} must be {words}, got {shorten(repr(value), 80)}")
    return default if value is None else value


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


# Small numbers out of the words that files pack them into, and groups into those that products take.

Bytes = NDArray[np.uint8]

_BLOCK = 1 << 18
"""Bytes that are worked on at once: they stay in a core's cache."""
_WIDEST_GROUP, _NARROWEST_GROUP = 128, 16


def spread(packed: Bytes) -> Bytes:
    """[n, k] bytes of two numbers each, the low one first -> [n, 2 k]."""
    rows, width = packed.shape
    numbers = np.empty((rows, 2 * width), dtype=np.uint8)
    wide = numbers.view("<u2")
    block = max(1, _BLOCK // max(1, 2 * width))
    for first in range(0, rows, block):
        part = wide[first : first + block]
        part[...] = packed[first : first + block]
        part |= part << np.uint16(4)
        part &= np.uint16(0x0F0F)
    return numbers


def along_inputs(words: torch.Tensor, first: int, last: int, bits: int) -> Bytes:
    """Rows [first, last) of numbers in words int32 [outputs, m], the lowest bits first: [last - first, 32 m / bits]."""
    # of one column, any strides count as contiguous, but not to `view`
    packed = words[first:last].reshape(-1).numpy().view(np.uint8).reshape(last - first, 4 * words.shape[1])
    return spread(packed) if bits == 4 else packed.copy()


def along_outputs(words: torch.Tensor, first: int, last: int, bits: int, places: Sequence[int] = range(8)) -> Bytes:
    """Rows [first, last) of numbers in words int32 [m, k], each of which holds those of 32 / bits outputs: [n, k].

    `places`: which of a word's outputs its n-th four bits are.
    """
    each, width = 32 // bits, words.shape[1]
    low, high = first // each, -(-last // each)
    numbers = np.empty((high - low, each, width), dtype=np.uint8)
    block = max(1, _BLOCK // (8 * width))
    for begin in range(low, high, block):
        part = words[begin : min(begin + block, high)].reshape(-1).view(torch.uint8).view(-1, width, 4)
        planes = part.transpose(1, 2).contiguous().numpy()
        into = numbers[begin - low : begin - low + block]
        if bits == 8:
            into[...] = planes
            continue
        for byte in range(4):
            np.bitwise_and(planes[:, byte], np.uint8(15), out=into[:, places[2 * byte]])
            np.right_shift(planes[:, byte], np.uint8(4), out=into[:, places[2 * byte + 1]])
    return numbers.reshape(-1, width)[first - each * low : last - each * low]


def floats(scales: torch.Tensor) -> NDArray[np.float32]:
    """In memory of their own."""
    return scales.to(torch.float32, copy=True).contiguous().numpy()


def form_of_groups(inputs: int, groups: int, bits: int, kind: str, *, zeros: bool) -> NumberForm | None:
    """The form of a matrix with `groups` scales of `kind` in a row, perhaps with a zero each.

    One scale in a row is the row's (`group` 0), unless zeros come with it. A group that is no power of two, or above
    128, is cut into several of equal scales. None: the groups are too narrow, or do not divide the inputs.
    """
    size, rest = divmod(inputs, groups)
    if rest:
        return None
    if groups == 1 and not zeros:
        return NumberForm(bits, 0)
    size = min(size & -size, _WIDEST_GROUP)
    if size < _NARROWEST_GROUP:
        return None
    return NumberForm(bits, size, "zeros" if zeros else "middle", scale_dtype=SCALES[kind])  # type: ignore[arg-type]


def grouped_rows(
    form: NumberForm, numbers: Bytes, scales: NDArray[np.float32], zeros: Bytes | None = None
) -> GroupedRows:
    """Rows of a form of `form_of_groups`, with the file's scales [n, groups], and zeros of the same shape."""
    if form.group == 0:
        return GroupedRows(numbers, row_scales=scales[:, 0])
    times = numbers.shape[1] // form.group // scales.shape[1]
    if times > 1:
        scales = np.repeat(scales, times, axis=1)
        zeros = None if zeros is None else np.repeat(zeros, times, axis=1)
    return GroupedRows(numbers, scales, zeros=zeros)
