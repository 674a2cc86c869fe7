"""Small numbers out of the words that files pack them into, and groups into those that products take."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.layers.stored import NumberForm

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


def columns(words: torch.Tensor, first: int, last: int) -> Bytes:
    """Columns [first, last) of int32 [m, n], each a row of bytes: [last - first, 4 m], the lowest byte first."""
    turned = words[:, first:last].T.contiguous().numpy()
    return turned.astype("<i4", copy=False).view(np.uint8)


def rows_of(words: torch.Tensor, first: int, last: int) -> Bytes:
    """Rows [first, last) of int32 [n, m] as bytes [last - first, 4 m]."""
    return words[first:last].contiguous().numpy().astype("<i4", copy=False).view(np.uint8)


def numbers_of(packed: Bytes, bits: int) -> Bytes:
    """Numbers of 4 or 8 bits from bytes."""
    return spread(packed) if bits == 4 else packed


def floats(scales: torch.Tensor) -> NDArray[np.float32]:
    """In memory of their own."""
    found: NDArray[np.float32] = scales.to(torch.float32, copy=True).contiguous().numpy()
    return found


def form_of_groups(
    inputs: int, groups: int, bits: int, kind: str, *, zeros: bool, known: str = ""
) -> NumberForm | None:
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


def repeated(values: NDArray[np.generic], form: NumberForm, inputs: int) -> NDArray[np.generic]:
    """[n, groups of the file] -> [n, groups of the form]."""
    times = inputs // form.group // values.shape[1]
    return values if times == 1 else np.repeat(values, times, axis=1)
