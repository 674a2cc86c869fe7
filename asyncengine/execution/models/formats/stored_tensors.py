"""Tensors of a quantized safetensors checkpoint, the matrices that they make up, and the unpacking of their numbers."""

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
"""dtype of stored scales -> `NumberForm.scale_dtype`."""
Setting = TypeVar("Setting", int, bool)


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Headers of all tensors in a checkpoint's files, and a way to read the few small ones that describe others."""

    folder: Path
    headers: Mapping[str, StoredTensor]
    read: Callable[[str], Any]
    """A tensor by its name, mapped and not copied."""

    def paths(self, ending: str) -> Iterator[str]:
        """Module paths of all tensors whose names end in `ending`, which is removed."""
        for name in self.headers:
            if name.endswith(ending):
                yield name.removesuffix(ending)

    def need(self, name: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The header of a required tensor. Raises `ModelNotFound` if it is missing or has another dtype or shape."""
        stored = self.headers.get(name)
        if stored is None:
            raise ModelNotFound(f"{self.folder} lacks the tensor {name}")
        if stored.dtype not in dtypes:
            raise ModelNotFound(f"{self.folder} has the tensor {name} as {stored.dtype}, not as {' or '.join(dtypes)}")
        if shape is not None and stored.shape != shape:
            raise self.misshapen(name, stored.shape, shape)
        return stored

    def matrix(self, name: str, dtypes: Collection[str]) -> StoredTensor:
        """`need` for a tensor of two dimensions, neither of them 0."""
        stored = self.need(name, dtypes)
        if len(stored.shape) != 2 or 0 in stored.shape:
            raise self.wrong(name, f"has the shape {list(stored.shape)}, which is no matrix")
        return stored

    def misshapen(self, name: str, shape: Sequence[int], expected: object) -> ModelNotFound:
        shown = list(expected) if isinstance(expected, tuple) else expected
        return ModelNotFound(f"{self.folder} has a wrong shape for the tensor {name}: {list(shape)}, not {shown}")

    def wrong(self, name: str, what: str) -> ModelNotFound:
        """The error for a tensor with the problem `what`."""
        return ModelNotFound(f"{self.folder}: {shorten(name, 300)} {what}")


def setting(settings: Mapping[str, Any], name: str, default: Setting) -> Setting:
    """A field of a quantization config. Raises `ModelNotFound` if it is not of its default's type (int or bool)."""
    value = settings.get(name)
    if value is not None and type(value) is not type(default):
        words = "true or false" if isinstance(default, bool) else "a whole number"
        raise ModelNotFound(f"quantization_config: {name} must be {words}, got {shorten(repr(value), 80)}")
    return default if value is None else value


# A quantized matrix whose tensors lie in mapped safetensors files.

Tensors = Mapping[str, torch.Tensor]
"""Tensors of one matrix by their role in it ("numbers", "scales", "zeros", ...), as the files have them."""
Unpack = Callable[[Tensors, int, int], GroupedRows]
"""(tensors, first row, last row) -> rows [first, last), in memory of their own."""


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """The tensors of a quantized matrix and the function that unpacks them, known before any of them is read."""

    format: str
    """Name of the quantization format, which `info` shows."""
    shape: tuple[int, int]
    """(outputs, inputs)"""
    form: NumberForm
    names: Mapping[str, str]
    """Names of its tensors in the files, by role. The first one is the largest, whose file stands for the matrix."""
    unpack: Unpack
    order: NDArray[np.int64] | None = None
    sliced: tuple[str, ...] = ("numbers",)
    """Roles of tensors whose first dimension is the outputs: pages of rows that have been read can be released."""
    turned: tuple[str, ...] = ()
    """Roles of tensors whose last dimension is the outputs, or words of several outputs. `unpack` gets them transposed,
    cut to the requested rows, which then begin with row 0. Either all tensors with rows are such, or none is."""
    ignored: tuple[str, ...] = ()
    """Names of tensors that describe static quantization of activations, which are quantized dynamically here."""
    experts: int = 0
    """Number of experts whose equal matrices are stacked along the rows (gpt-oss); 0 for a single matrix."""


_WORD = 8
"""Multiple of rows at which transposed tensors are cut: a 32-bit word holds 8 rows of four bits, or 4 of eight."""


class MappedMatrix:
    """A `StoredMatrix` of mapped tensors. Any number of threads may read its rows."""

    def __init__(self, spec: MatrixSpec, tensors: Tensors, release: Callable[[torch.Tensor], object]) -> None:
        """`release` is called with tensors whose pages will not be read again."""
        self.name, self.shape, self.form, self.order = spec.format, spec.shape, spec.form, spec.order
        self._spec, self._tensors, self._release = spec, tensors, release

    def rows(self, first: int, last: int) -> GroupedRows:
        """Rows [first, last), unpacked."""
        if not self._spec.turned:
            return self._spec.unpack(self._tensors, first, last)
        begin = first // _WORD * _WORD
        tensors = {**self._tensors, **{key: self._turn(self._tensors[key], begin, last) for key in self._spec.turned}}
        return self._spec.unpack(tensors, first - begin, last - begin)

    def _turn(self, tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Transpose the columns of outputs [first, last), or of the words that hold them, to [outputs, others]."""
        outputs_per_column = self.shape[0] // tensor.shape[-1]
        return tensor[:, first // outputs_per_column : -(-last // outputs_per_column)].T.contiguous()

    def release(self, first: int, last: int) -> None:
        """Let the system reclaim the pages of rows [first, last); with the last row, those of the whole matrix."""
        if last == self.shape[0]:
            for tensor in self._tensors.values():
                self._release(tensor)
            return
        for name in self._spec.sliced:
            self._release(self._tensors[name][first:last])


# Unpacking of 4- and 8-bit numbers from the words of a file, and of a file's groups into those that kernels take.

Bytes = NDArray[np.uint8]

_BLOCK = 1 << 18
"""Bytes that are unpacked at a time, so that they stay in a core's cache."""
_WIDEST_GROUP, _NARROWEST_GROUP = 128, 16


def spread(packed: Bytes) -> Bytes:
    """Unpack bytes [n, k] of two four-bit numbers each, the low one first, to [n, 2 k]."""
    rows, width = packed.shape
    numbers = np.empty((rows, 2 * width), dtype=np.uint8)
    wide = numbers.view("<u2")
    block = max(1, _BLOCK // max(1, 2 * width))
    for first in range(0, rows, block):
        block_words = wide[first : first + block]
        block_words[...] = packed[first : first + block]
        block_words |= block_words << np.uint16(4)
        block_words &= np.uint16(0x0F0F)
    return numbers


def along_inputs(words: torch.Tensor, first: int, last: int, bits: int) -> Bytes:
    """Rows [first, last) of numbers in words int32 [outputs, m], the lowest bits first: [last - first, 32 m / bits]."""
    # of one column, any strides count as contiguous, but not to `view`
    packed = words[first:last].reshape(-1).numpy().view(np.uint8).reshape(last - first, 4 * words.shape[1])
    return spread(packed) if bits == 4 else packed.copy()


def along_outputs(words: torch.Tensor, first: int, last: int, bits: int, lanes: Sequence[int] = range(8)) -> Bytes:
    """Rows [first, last) of numbers in words int32 [m, k], each of which holds those of 32 / bits outputs: [n, k].

    `lanes`: the output, among a word's eight, that its n-th four bits belong to.
    """
    per_word, width = 32 // bits, words.shape[1]
    low, high = first // per_word, -(-last // per_word)
    numbers = np.empty((high - low, per_word, width), dtype=np.uint8)
    block = max(1, _BLOCK // (8 * width))
    for begin in range(low, high, block):
        block_words = words[begin : min(begin + block, high)].reshape(-1).view(torch.uint8).view(-1, width, 4)
        planes = block_words.transpose(1, 2).contiguous().numpy()
        block_numbers = numbers[begin - low : begin - low + block]
        if bits == 8:
            block_numbers[...] = planes
            continue
        for byte in range(4):
            np.bitwise_and(planes[:, byte], np.uint8(15), out=block_numbers[:, lanes[2 * byte]])
            np.right_shift(planes[:, byte], np.uint8(4), out=block_numbers[:, lanes[2 * byte + 1]])
    return numbers.reshape(-1, width)[first - per_word * low : last - per_word * low]


def floats(scales: torch.Tensor) -> NDArray[np.float32]:
    """A float32 copy of the scales."""
    return scales.to(torch.float32, copy=True).contiguous().numpy()


def form_of_groups(inputs: int, groups: int, bits: int, scale_dtype: str, *, zeros: bool) -> NumberForm | None:
    """The form of a matrix with `groups` scales of `scale_dtype` in a row, each with a zero point if `zeros`.

    A single scale without a zero point is the row's (`group` 0). A group whose size is no power of two, or above 128,
    is cut into several with equal scales. None if the groups are too narrow or do not divide the inputs.
    """
    size, rest = divmod(inputs, groups)
    if rest:
        return None
    if groups == 1 and not zeros:
        return NumberForm(bits, 0)
    size = min(size & -size, _WIDEST_GROUP)
    if size < _NARROWEST_GROUP:
        return None
    return NumberForm(bits, size, "zeros" if zeros else "middle", scale_dtype=SCALES[scale_dtype])  # type: ignore[arg-type]


def grouped_rows(
    form: NumberForm, numbers: Bytes, scales: NDArray[np.float32], zeros: Bytes | None = None
) -> GroupedRows:
    """Rows in a form of `form_of_groups`, from the file's scales [n, groups] and zero points of the same shape."""
    if form.group == 0:
        return GroupedRows(numbers, row_scales=scales[:, 0])
    times = numbers.shape[1] // form.group // scales.shape[1]
    if times > 1:
        scales = np.repeat(scales, times, axis=1)
        zeros = None if zeros is None else np.repeat(zeros, times, axis=1)
    return GroupedRows(numbers, scales, zeros=zeros)
