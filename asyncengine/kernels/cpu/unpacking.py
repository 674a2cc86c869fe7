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
    """Some rows. B blocks in a row, G groups."""

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
def _half(block, place: int):  # type: ignore[no-untyped-def]
    return np.uint16(block[place]) | (np.uint16(block[place + 1]) << np.uint16(8))


@inline
def _nibbles(block, first: int, out, at: int, half: int):  # type: ignore[no-untyped-def]
    """`half` bytes: the lower halves of all, then the upper ones."""
    for place in range(half):
        packed = block[first + place]
        out[at + place] = packed & np.uint8(15)
        out[at + half + place] = packed >> np.uint8(4)


@inline
def _pairs(block, first: int, out, count: int):  # type: ignore[no-untyped-def]
    """`count` bytes of two neighbours each, the first in the lower half."""
    for place in range(count):
        packed = block[first + place]
        out[2 * place] = packed & np.uint8(15)
        out[2 * place + 1] = packed >> np.uint8(4)


@inline
def _six_bits(block, steps, minima) -> None:  # type: ignore[no-untyped-def]
    """Eight scales and eight minima of 6 bits, in bytes 4 to 15."""
    for place in range(4):
        scale, minimum, both = block[4 + place], block[8 + place], block[12 + place]
        steps[place] = scale & 63
        minima[place] = minimum & 63
        steps[4 + place] = (both & 15) | ((scale >> 2) & 48)
        minima[4 + place] = (both >> 4) | ((minimum >> 2) & 48)


def blocks_of(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Above a function that takes a block of `count` numbers apart: make of it the kernel of rows of such blocks. All
    its arguments but `shape` are arrays, of what the block has and of what it fills."""

    def make(function: Callable[..., None]) -> Callable[..., None]:
        unpack = inline(function)

        def kernel(
            base: int, places: int, rows: int, blocks: int, shape: int, groups: int, numbers: int, scales: int,
            minima: int, steps: int, minimum_steps: int,
        ) -> None:  # fmt: skip
            wanted, size = array(pointer(places, np.int64(0)), (rows,)), shape % 1000
            for row in range(rows):
                for index in range(blocks):
                    place = row * blocks + index
                    unpack(
                        _bytes(base + (wanted[row] * blocks + index) * size, size), shape,
                        _bytes(numbers + place * count, count),
                        array(pointer(scales + place * 2, np.uint16(0)), (1,)),
                        array(pointer(minima + place * 2, np.uint16(0)), (1,)),
                        array(pointer(steps + place * groups, np.int8(0)), (groups,)),
                        array(pointer(minimum_steps + place * groups, np.int8(0)), (groups,)),
                    )  # fmt: skip

        kernel.__name__ = kernel.made_for = function.__name__  # type: ignore[attr-defined]
        return serial(kernel)

    return make


@blocks_of(32)
def _small(block, shape: int, out, scale, minimum, steps, below) -> None:  # type: ignore[no-untyped-def]
    """Blocks of 32. `shape`: bytes of a block, and what it has: + 1000 a minimum, + 2000 fifth bits, + 4000 whole bytes
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
    for part in range(4):
        _nibbles(block, first + part * 32, out, part * 64, 32)
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


def unpack_blocks(kind: str, stored: NDArray[np.uint8], places: NDArray[np.int64]) -> UnpackedBlocks:
    """Rows `places` of a matrix of blocks [rows, bytes of a row], contiguous. Raises `KeyError` for an unknown type,
    `IndexError` for rows that are not there, `ValueError` for rows that are no whole blocks."""
    kernel, shape, size, groups, has_minima = _KERNELS[kind]
    blocks, rest = divmod(stored.shape[1], shape % 1000)
    if rest or not stored.flags.c_contiguous:
        raise ValueError(f"{kind}: rows of {stored.shape[1]} bytes are no blocks of {shape % 1000}")
    rows = len(places)
    if rows and not 0 <= places.min() <= places.max() < len(stored):
        raise IndexError(f"rows {places.min()} to {places.max()} of {len(stored)}")
    wanted = np.ascontiguousarray(places, dtype=np.int64)
    found = UnpackedBlocks(
        np.empty((rows, blocks * size), np.uint8),
        np.empty((rows, blocks), np.uint16),
        np.empty((rows, blocks if has_minima else 0), np.uint16),
        np.empty((rows, blocks * groups), np.int8),
        np.empty((rows, blocks * groups if has_minima else 0), np.int8),
    )
    kernel(stored.ctypes.data, wanted.ctypes.data, rows, blocks, shape, groups, *(part.ctypes.data for part in found))
    return found


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
    known = array(pointer(table, np.uint8(0)), (CLASSES, 256))
    by_class = array(pointer(steps, np.float32(0)), (CLASSES,))
    found = array(pointer(of_groups, np.float32(0)), (groups,))
    for place in range(groups):
        given = array(pointer(floats + place * group, np.uint8(0)), (group,))
        result = array(pointer(numbers + place * group, np.uint8(0)), (group,))
        largest = np.uint8(0)
        for index in range(group):
            largest = max(largest, given[index] & np.uint8(127))
        own = largest >> np.uint8(3)
        found[place] = by_class[own]
        row = known[own]
        for index in range(group):
            result[index] = row[given[index]]
