"""Small numbers out of the words that files pack them into, and groups into those that products take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.execution.layers.stored import GroupedRows, NumberForm

Bytes = NDArray[np.uint8]

SCALE_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""Kinds of tensors -> `NumberForm.scale_dtype`."""
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
    dtype = SCALE_DTYPES[kind]
    return NumberForm(bits, size, "zeros" if zeros else "middle", scale_dtype=dtype)  # type: ignore[arg-type]


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
