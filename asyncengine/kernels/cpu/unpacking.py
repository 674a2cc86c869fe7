"""Stored weights unpacked on their way into memory: blocks of llama.cpp's quantized types, and eight-bit floats.

Blocks become a number a byte, with scales beside, in about a third of a nanosecond for a number. The layouts are
ggml-common.h's. Each kernel takes addresses: of the first row in the file, of the wanted rows' numbers (int64), and of
what it writes; scales stay the 16 bits that they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.kernels.cpu.jit import array, inline, pointer, serial


class UnpackedBlocks(NamedTuple):
    """Rows of a matrix, of B blocks and G groups each."""

    numbers: NDArray[np.uint8]
    """[n, inputs]"""
    scales: NDArray[np.uint16]
    """[n, B]: float16 as bits; of MXFP4 the exponent."""
    minima: NDArray[np.uint16]
    """[n, B], where the type has minima: float16 as bits."""
    steps: NDArray[np.int8]
    """[n, G], where groups have steps."""
    minimum_steps: NDArray[np.int8]


@inline
def _bytes(address: int, count: int):  # type: ignore[no-untyped-def]
    return array(pointer(address, np.uint8(0)), (count,))


@inline
def _half(block, index: int):  # type: ignore[no-untyped-def]
    return np.uint16(block[index]) | (np.uint16(block[index + 1]) << np.uint16(8))


@inline
def _nibbles(block, first: int, out, at: int, half: int):  # type: ignore[no-untyped-def]
    """`half` bytes: the lower halves of all, then the upper ones."""
    for index in range(half):
        packed = block[first + index]
        out[at + index] = packed & np.uint8(15)
        out[at + half + index] = packed >> np.uint8(4)


@inline
def _pairs(block, first: int, out, count: int):  # type: ignore[no-untyped-def]
    """`count` bytes of two neighbours each, the first in the lower half."""
    for index in range(count):
        packed = block[first + index]
        out[2 * index] = packed & np.uint8(15)
        out[2 * index + 1] = packed >> np.uint8(4)


@inline
def _six_bits(block, steps, minima) -> None:  # type: ignore[no-untyped-def]
    """Eight scales and eight minima of 6 bits, in bytes 4 to 15."""
    for index in range(4):
        scale, minimum, both = block[4 + index], block[8 + index], block[12 + index]
        steps[index] = scale & 63
        minima[index] = minimum & 63
        steps[4 + index] = (both & 15) | ((scale >> 2) & 48)
        minima[4 + index] = (both >> 4) | ((minimum >> 2) & 48)


def blocks_of(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function that unpacks a block of `count` numbers: the result is a kernel for rows of such blocks. All
    arguments but `shape` are arrays: the block's bytes, and the outputs that it fills."""

    def make(function: Callable[..., None]) -> Callable[..., None]:
        unpack = inline(function)

        def kernel(
            base: int, row_ids: int, rows: int, blocks: int, shape: int, groups: int, numbers: int, scales: int,
            minima: int, steps: int, minimum_steps: int,
        ) -> None:  # fmt: skip
            ids, size = array(pointer(row_ids, np.int64(0)), (rows,)), shape % 1000
            for row in range(rows):
                for index in range(blocks):
                    position = row * blocks + index
                    unpack(
                        _bytes(base + (ids[row] * blocks + index) * size, size), shape,
                        _bytes(numbers + position * count, count),
                        array(pointer(scales + position * 2, np.uint16(0)), (1,)),
                        array(pointer(minima + position * 2, np.uint16(0)), (1,)),
                        array(pointer(steps + position * groups, np.int8(0)), (groups,)),
                        array(pointer(minimum_steps + position * groups, np.int8(0)), (groups,)),
                    )  # fmt: skip

        kernel.__name__ = kernel.made_for = function.__name__  # type: ignore[attr-defined]
        return serial(kernel)

    return make


@blocks_of(32)
def _small(block, shape: int, out, scale, minimum, steps, below) -> None:  # type: ignore[no-untyped-def]
    """Blocks of 32. `shape`: bytes of a block, and features: + 1000 a minimum, + 2000 fifth bits, + 4000 whole bytes
    instead, + 8000 an exponent for a scale, + 16000 the same with neighbours in a byte."""
    has = shape // 1000
    at = 4 if has & 1 else 2
    scale[0] = block[0] if has & 24 else _half(block, 0)
    if has & 1:
        minimum[0] = _half(block, 2)
    if has & 8:
        _nibbles(block, 1, out, 0, 16)
    elif has & 16:
        _pairs(block, 1, out, 16)
    elif has & 4:
        # two's complement plus 128: the panels' numbers have no sign
        for number in range(32):
            out[number] = block[2 + number] ^ np.uint8(128)
    elif has & 2:
        _nibbles(block, at + 4, out, 0, 16)
        middle = np.uint8(0 if has & 1 else 16)
        for number in range(32):
            bit = (block[at + (number >> 3)] >> np.uint8(number & 7)) & np.uint8(1)
            out[number] = (out[number] | (bit << np.uint8(4))) + middle
    else:
        _nibbles(block, at, out, 0, 16)


@blocks_of(256)
def _q2_k(block, shape: int, out, scale, minimum, steps, below) -> None:  # type: ignore[no-untyped-def]
    scale[0], minimum[0] = _half(block, 80), _half(block, 82)
    for group in range(16):
        steps[group] = block[group] & np.uint8(15)
        below[group] = block[group] >> np.uint8(4)
    for half in range(2):
        for quarter in range(4):
            for number in range(32):
                packed = block[16 + half * 32 + number]
                out[half * 128 + quarter * 32 + number] = (packed >> np.uint8(2 * quarter)) & np.uint8(3)


@blocks_of(256)
def _q3_k(block, shape: int, out, scale, minimum, steps, below) -> None:  # type: ignore[no-untyped-def]
    scale[0] = _half(block, 108)
    for group in range(16):
        low = block[96 + (group & 7)] >> np.uint8(4 * (group >> 3))
        high = block[104 + (group & 3)] >> np.uint8(2 * (group >> 2))
        steps[group] = np.int8((low & 15) | ((high & 3) << 4)) - np.int8(32)
    for half in range(2):
        for quarter in range(4):
            for number in range(32):
                low2 = (block[32 + half * 32 + number] >> np.uint8(2 * quarter)) & np.uint8(3)
                bit = (block[number] >> np.uint8(half * 4 + quarter)) & np.uint8(1)
                out[half * 128 + quarter * 32 + number] = low2 + np.uint8(4) + (bit << np.uint8(2))


@blocks_of(256)
def _q4_k(block, shape: int, out, scale, minimum, steps, below) -> None:  # type: ignore[no-untyped-def]
    """Q4_K, and Q5_K with its fifth bits (`shape` 176)."""
    first = 48 if shape == 176 else 16
    scale[0], minimum[0] = _half(block, 0), _half(block, 2)
    _six_bits(block, steps, below)
    for quarter in range(4):
        _nibbles(block, first + quarter * 32, out, quarter * 64, 32)
    if shape == 176:
        for group in range(8):
            for number in range(32):
                bit = (block[16 + number] >> np.uint8(group)) & np.uint8(1)
                out[group * 32 + number] |= bit << np.uint8(4)


@blocks_of(256)
def _q6_k(block, shape: int, out, scale, minimum, steps, below) -> None:  # type: ignore[no-untyped-def]
    scale[0] = _half(block, 208)
    for group in range(16):
        steps[group] = block[192 + group]
    for half in range(2):
        _nibbles(block, half * 64, out, half * 128, 64)
        for quarter in range(4):
            for number in range(32):
                high = (block[128 + half * 32 + number] >> np.uint8(2 * quarter)) & np.uint8(3)
                out[half * 128 + quarter * 32 + number] |= high << np.uint8(4)


@blocks_of(256)
def _iq4_xs(block, shape: int, out, scale, minimum, steps, below) -> None:  # type: ignore[no-untyped-def]
    scale[0] = _half(block, 0)
    for group in range(8):
        low = block[4 + (group >> 1)] >> np.uint8(4 * (group & 1))
        high = block[2 + (group >> 2)] >> np.uint8(2 * (group & 3))
        steps[group] = np.int8((low & 15) | ((high & 3) << 4)) - np.int8(32)
        _nibbles(block, 8 + group * 16, out, group * 32, 16)


_KERNELS: Mapping[str, tuple[Callable[..., None], int, int, int, bool]] = {
    "Q4_0": (_small, 18, 32, 0, False),
    "IQ4_NL": (_small, 18, 32, 0, False),
    "Q4_1": (_small, 1020, 32, 0, True),
    "Q5_0": (_small, 2022, 32, 0, False),
    "Q5_1": (_small, 3024, 32, 0, True),
    "Q8_0": (_small, 4034, 32, 0, False),
    "MXFP4": (_small, 8017, 32, 0, False),
    "MXFP4_PAIRS": (_small, 16017, 32, 0, False),
    "Q2_K": (_q2_k, 84, 256, 16, True),
    "Q3_K": (_q3_k, 110, 256, 16, False),
    "Q4_K": (_q4_k, 144, 256, 8, True),
    "Q5_K": (_q4_k, 176, 256, 8, True),
    "Q6_K": (_q6_k, 210, 256, 16, False),
    "IQ4_XS": (_iq4_xs, 136, 256, 8, False),
}
"""Kernel, its `shape`, numbers of a block, groups of a block that have steps, whether there are minima."""


def unpack_blocks(name: str, stored: NDArray[np.uint8], row_ids: NDArray[np.int64]) -> UnpackedBlocks:
    """Rows `row_ids` of a matrix of blocks [rows, bytes of a row], contiguous. Raises `KeyError` for an unknown type,
    `IndexError` for ids out of range, `ValueError` for rows that are no whole blocks."""
    kernel, shape, size, groups, has_minima = _KERNELS[name]
    blocks, rest = divmod(stored.shape[1], shape % 1000)
    if rest or not stored.flags.c_contiguous:
        raise ValueError(f"{name}: rows of {stored.shape[1]} bytes are no blocks of {shape % 1000}")
    rows = len(row_ids)
    if rows and not 0 <= row_ids.min() <= row_ids.max() < len(stored):
        raise IndexError(f"rows {row_ids.min()} to {row_ids.max()} of {len(stored)}")
    ids = np.ascontiguousarray(row_ids, dtype=np.int64)
    unpacked = UnpackedBlocks(
        np.empty((rows, blocks * size), np.uint8),
        np.empty((rows, blocks), np.uint16),
        np.empty((rows, blocks if has_minima else 0), np.uint16),
        np.empty((rows, blocks * groups), np.int8),
        np.empty((rows, blocks * groups if has_minima else 0), np.int8),
    )
    kernel(stored.ctypes.data, ids.ctypes.data, rows, blocks, shape, groups, *(item.ctypes.data for item in unpacked))
    return unpacked


# Eight-bit floats (e4m3) into whole numbers whose groups share a step: what `float_formats` does with torch, in a
# fifth of its time. A float's whole number depends on itself and on the exponent of its group's largest, of which there
# are sixteen: all are in a table.

CLASSES = 16
"""Exponents that an eight-bit float can have."""


def unpack_floats(
    floats: NDArray[np.uint8], group: int, table: NDArray[np.uint8], steps: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(whole numbers [n, inputs], steps [n, inputs / group]) of floats [n, inputs].

    `table` [16, 256]: the number of each float in a group whose largest has that exponent; `steps` [16]: its step.
    Raises `ValueError` for inputs that are no whole groups, or tables of other sizes.
    """
    rows, inputs = floats.shape
    if inputs % group or table.shape != (CLASSES, 256) or steps.shape != (CLASSES,):
        raise ValueError(f"{inputs} inputs in groups of {group}, tables {table.shape} and {steps.shape}")
    given = np.ascontiguousarray(floats)
    numbers = np.empty((rows, inputs), dtype=np.uint8)
    of_groups = np.empty((rows, inputs // group), dtype=np.float32)
    _unpack(
        given.ctypes.data, numbers.ctypes.data, of_groups.ctypes.data, of_groups.size, group, table.ctypes.data,
        steps.ctypes.data,
    )  # fmt: skip
    return numbers, of_groups


@serial
def _unpack(floats: int, numbers: int, of_groups: int, groups: int, group: int, table: int, steps: int) -> None:
    numbers_of_class = array(pointer(table, np.uint8(0)), (CLASSES, 256))
    step_of_class = array(pointer(steps, np.float32(0)), (CLASSES,))
    group_steps = array(pointer(of_groups, np.float32(0)), (groups,))
    for index in range(groups):
        group_floats = array(pointer(floats + index * group, np.uint8(0)), (group,))
        result = array(pointer(numbers + index * group, np.uint8(0)), (group,))
        largest = np.uint8(0)
        for lane in range(group):
            largest = max(largest, group_floats[lane] & np.uint8(127))
        exponent = largest >> np.uint8(3)
        group_steps[index] = step_of_class[exponent]
        numbers_of_float = numbers_of_class[exponent]
        for lane in range(group):
            result[lane] = numbers_of_float[group_floats[lane]]
