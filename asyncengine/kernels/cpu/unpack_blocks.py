"""Blocks of llama.cpp's quantized types into a number a byte, with scales beside: on the way of every file into memory.

About a third of a nanosecond for a number. The layouts are ggml-common.h's. Each function takes addresses: of the first
row in the file, of the wanted rows' numbers (int64), and of what it writes; scales stay the 16 bits that they are.
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
def _six_bits(block, steps, minima, at: int):  # type: ignore[no-untyped-def]
    """Eight scales and eight minima of 6 bits, in bytes 4 to 15."""
    for place in range(4):
        scale, minimum, both = block[4 + place], block[8 + place], block[12 + place]
        steps[at + place] = scale & 63
        minima[at + place] = minimum & 63
        steps[at + 4 + place] = (both & 15) | ((scale >> 2) & 48)
        minima[at + 4 + place] = (both >> 4) | ((minimum >> 2) & 48)


@serial
def _small(
    base: int, places: int, rows: int, blocks: int, shape: int, numbers: int, scales: int, minima: int, steps: int,
    minimum_steps: int,
) -> None:  # fmt: skip
    """Blocks of 32. `shape`: bytes of a block, and what it has: + 1000 a minimum, + 2000 fifth bits, + 4000 whole bytes
    instead, + 8000 an exponent for a scale, + 16000 the same with neighbours in a byte."""
    wanted = array(pointer(places, np.int64(0)), (rows,))
    size, has = shape % 1000, shape // 1000
    scale = array(pointer(scales, np.uint16(0)), (rows * blocks,))
    minimum = array(pointer(minima, np.uint16(0)), (rows * blocks,))
    for row in range(rows):
        for index in range(blocks):
            block = _bytes(base + (wanted[row] * blocks + index) * size, size)
            out = _bytes(numbers + (row * blocks + index) * 32, 32)
            place = row * blocks + index
            if has & 8:
                scale[place] = block[0]
                _nibbles(block, 1, out, 0, 16)
                continue
            if has & 16:
                scale[place] = block[0]
                _pairs(block, 1, out, 16)
                continue
            scale[place] = _half(block, 0)
            at = 2
            if has & 1:
                minimum[place] = _half(block, 2)
                at = 4
            if has & 4:
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


@serial
def _q2_k(
    base: int, places: int, rows: int, blocks: int, shape: int, numbers: int, scales: int, minima: int, steps: int,
    minimum_steps: int,
) -> None:  # fmt: skip
    wanted = array(pointer(places, np.int64(0)), (rows,))
    scale = array(pointer(scales, np.uint16(0)), (rows * blocks,))
    minimum = array(pointer(minima, np.uint16(0)), (rows * blocks,))
    step = _bytes(steps, rows * blocks * 16)
    below = _bytes(minimum_steps, rows * blocks * 16)
    for row in range(rows):
        for index in range(blocks):
            place = row * blocks + index
            block = _bytes(base + (wanted[row] * blocks + index) * 84, 84)
            out = _bytes(numbers + place * 256, 256)
            scale[place], minimum[place] = _half(block, 80), _half(block, 82)
            for group in range(16):
                step[place * 16 + group] = block[group] & np.uint8(15)
                below[place * 16 + group] = block[group] >> np.uint8(4)
            for half in range(2):
                for quarter in range(4):
                    for number in range(32):
                        packed = block[16 + half * 32 + number]
                        out[half * 128 + quarter * 32 + number] = (packed >> np.uint8(2 * quarter)) & np.uint8(3)


@serial
def _q3_k(
    base: int, places: int, rows: int, blocks: int, shape: int, numbers: int, scales: int, minima: int, steps: int,
    minimum_steps: int,
) -> None:  # fmt: skip
    wanted = array(pointer(places, np.int64(0)), (rows,))
    scale = array(pointer(scales, np.uint16(0)), (rows * blocks,))
    step = array(pointer(steps, np.int8(0)), (rows * blocks * 16,))
    for row in range(rows):
        for index in range(blocks):
            place = row * blocks + index
            block = _bytes(base + (wanted[row] * blocks + index) * 110, 110)
            out = _bytes(numbers + place * 256, 256)
            scale[place] = _half(block, 108)
            for group in range(16):
                low = block[96 + (group & 7)] >> np.uint8(4 * (group >> 3))
                high = block[104 + (group & 3)] >> np.uint8(2 * (group >> 2))
                step[place * 16 + group] = np.int8((low & 15) | ((high & 3) << 4)) - np.int8(32)
            for half in range(2):
                for quarter in range(4):
                    for number in range(32):
                        low2 = (block[32 + half * 32 + number] >> np.uint8(2 * quarter)) & np.uint8(3)
                        bit = (block[number] >> np.uint8(half * 4 + quarter)) & np.uint8(1)
                        out[half * 128 + quarter * 32 + number] = low2 + np.uint8(4) + (bit << np.uint8(2))


@serial
def _q4_k(
    base: int, places: int, rows: int, blocks: int, shape: int, numbers: int, scales: int, minima: int, steps: int,
    minimum_steps: int,
) -> None:  # fmt: skip
    """Q4_K, and Q5_K with its fifth bits (`shape` 176)."""
    wanted = array(pointer(places, np.int64(0)), (rows,))
    scale = array(pointer(scales, np.uint16(0)), (rows * blocks,))
    minimum = array(pointer(minima, np.uint16(0)), (rows * blocks,))
    step = _bytes(steps, rows * blocks * 8)
    below = _bytes(minimum_steps, rows * blocks * 8)
    first = 48 if shape == 176 else 16
    for row in range(rows):
        for index in range(blocks):
            place = row * blocks + index
            block = _bytes(base + (wanted[row] * blocks + index) * shape, shape)
            out = _bytes(numbers + place * 256, 256)
            scale[place], minimum[place] = _half(block, 0), _half(block, 2)
            _six_bits(block, step, below, place * 8)
            for part in range(4):
                _nibbles(block, first + part * 32, out, part * 64, 32)
            if shape == 176:
                for group in range(8):
                    for number in range(32):
                        bit = (block[16 + number] >> np.uint8(group)) & np.uint8(1)
                        out[group * 32 + number] |= bit << np.uint8(4)


@serial
def _q6_k(
    base: int, places: int, rows: int, blocks: int, shape: int, numbers: int, scales: int, minima: int, steps: int,
    minimum_steps: int,
) -> None:  # fmt: skip
    wanted = array(pointer(places, np.int64(0)), (rows,))
    scale = array(pointer(scales, np.uint16(0)), (rows * blocks,))
    step = _bytes(steps, rows * blocks * 16)
    for row in range(rows):
        for index in range(blocks):
            place = row * blocks + index
            block = _bytes(base + (wanted[row] * blocks + index) * 210, 210)
            out = _bytes(numbers + place * 256, 256)
            scale[place] = _half(block, 208)
            for group in range(16):
                step[place * 16 + group] = block[192 + group]
            for half in range(2):
                _nibbles(block, half * 64, out, half * 128, 64)
                for quarter in range(4):
                    for number in range(32):
                        high = (block[128 + half * 32 + number] >> np.uint8(2 * quarter)) & np.uint8(3)
                        out[half * 128 + quarter * 32 + number] |= high << np.uint8(4)


@serial
def _iq4_xs(
    base: int, places: int, rows: int, blocks: int, shape: int, numbers: int, scales: int, minima: int, steps: int,
    minimum_steps: int,
) -> None:  # fmt: skip
    wanted = array(pointer(places, np.int64(0)), (rows,))
    scale = array(pointer(scales, np.uint16(0)), (rows * blocks,))
    step = array(pointer(steps, np.int8(0)), (rows * blocks * 8,))
    for row in range(rows):
        for index in range(blocks):
            place = row * blocks + index
            block = _bytes(base + (wanted[row] * blocks + index) * 136, 136)
            out = _bytes(numbers + place * 256, 256)
            scale[place] = _half(block, 0)
            for group in range(8):
                low = block[4 + (group >> 1)] >> np.uint8(4 * (group & 1))
                high = block[2 + (group >> 2)] >> np.uint8(2 * (group & 3))
                step[place * 8 + group] = np.int8((low & 15) | ((high & 3) << 4)) - np.int8(32)
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
    kernel(
        stored.ctypes.data, wanted.ctypes.data, rows, blocks, shape, found.numbers.ctypes.data,
        found.scales.ctypes.data, found.minima.ctypes.data, found.steps.ctypes.data, found.minimum_steps.ctypes.data,
    )  # fmt: skip
    return found
