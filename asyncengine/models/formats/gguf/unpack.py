"""Blocks of every quantized type into numbers, scales and minima: what is right, and what runs where no compiler is.

`kernels.cpu.unpack_blocks` does the same compiled, up to ten times as fast. Layouts: ggml-common.h and
dequantize_row_* in ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncengine.layers.stored import GroupedRows

Blocks = NDArray[np.uint8]
"""[rows, blocks of a row, bytes of a block]"""


def _halves(blocks: Blocks, first: int) -> NDArray[np.float32]:
    """[rows, blocks]: the float16 that begins at byte `first` of each block."""
    pair = np.ascontiguousarray(blocks[:, :, first : first + 2])
    return pair.view("<f2")[:, :, 0].astype(np.float32)


def _rows(numbers: NDArray[Any], blocks: Blocks) -> NDArray[np.uint8]:
    return np.ascontiguousarray(numbers, dtype=np.uint8).reshape(len(blocks), -1)


def _nibbles(packed: NDArray[np.uint8], half: int) -> NDArray[np.uint8]:
    """Each `half` bytes are 2 * half numbers: the lower halves of all, then the upper ones."""
    parts = packed.reshape(*packed.shape[:2], -1, 1, half)
    return np.concatenate([parts & 15, parts >> 4], axis=3).reshape(*packed.shape[:2], -1)


def _fifth_bits(blocks: Blocks, first: int) -> NDArray[Any]:
    """16 for each of the 32 numbers whose bit is set in the four bytes at `first`."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, :, first : first + 4]), axis=2, bitorder="little")
    return bits << 4


def _q4_0(blocks: Blocks) -> GroupedRows:
    return GroupedRows(_rows(_nibbles(blocks[:, :, 2:], 16), blocks), _halves(blocks, 0))


def _q4_1(blocks: Blocks) -> GroupedRows:
    numbers = _rows(_nibbles(blocks[:, :, 4:], 16), blocks)
    return GroupedRows(numbers, _halves(blocks, 0), minima=-_halves(blocks, 2))


def _q5_0(blocks: Blocks) -> GroupedRows:
    numbers = (_nibbles(blocks[:, :, 6:], 16) | _fifth_bits(blocks, 2)) + 16  # of 6 bits: the middle is 32, not 16
    return GroupedRows(_rows(numbers, blocks), _halves(blocks, 0))


def _q5_1(blocks: Blocks) -> GroupedRows:
    numbers = _nibbles(blocks[:, :, 8:], 16) | _fifth_bits(blocks, 4)
    return GroupedRows(_rows(numbers, blocks), _halves(blocks, 0), minima=-_halves(blocks, 2))


def _q8_0(blocks: Blocks) -> GroupedRows:
    return GroupedRows(_rows(blocks[:, :, 2:] ^ 128, blocks), _halves(blocks, 0))


def _mxfp4(blocks: Blocks) -> GroupedRows:
    return GroupedRows(_rows(_nibbles(blocks[:, :, 1:], 16), blocks), _exponents(blocks[:, :, 0]))


def _mxfp4_pairs(blocks: Blocks) -> GroupedRows:
    packed = blocks[:, :, 1:]
    numbers = np.stack([packed & 15, packed >> 4], axis=3)
    return GroupedRows(_rows(numbers, blocks), _exponents(blocks[:, :, 0]))


def _exponents(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Half of 2^(e - 127), as the table holds twice the numbers; below 2 that is no normal number."""
    exponents = stored.astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(0x200000) << np.minimum(exponents, 2), (exponents - 1) << 23)
    return bits.astype(np.uint32).view(np.float32)


def _q2_k(blocks: Blocks) -> GroupedRows:
    packed = blocks[:, :, 16:80].reshape(*blocks.shape[:2], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 1, 4, 1)
    scales = blocks[:, :, :16]
    return GroupedRows(
        _rows((packed >> shifts) & 3, blocks), _halves(blocks, 80), _signed(scales & 15, blocks),
        minima=_halves(blocks, 82), minimum_steps=_signed(scales >> 4, blocks),
    )  # fmt: skip


def _q3_k(blocks: Blocks) -> GroupedRows:
    shape = blocks.shape[:2]
    low = (blocks[:, :, 32:96].reshape(*shape, 2, 1, 32) >> _shifts(0, 2, 4, 6)) & 3
    bit = (blocks[:, :, :32].reshape(*shape, 1, 1, 32) >> _shifts(*range(8)).reshape(1, 1, 2, 4, 1)) & 1
    packed = blocks[:, :, 96:108]
    lower = np.concatenate([packed[:, :, :8] & 15, packed[:, :, :8] >> 4], axis=2)
    upper = np.concatenate([(packed[:, :, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2)
    steps = (lower | (upper << 4)).astype(np.int8) - 32
    numbers = low + 4 + 4 * bit  # of 4 bits: the middle is 8, and a set bit means that 4 is not taken off
    return GroupedRows(_rows(numbers, blocks), _halves(blocks, 108), _signed(steps, blocks))


def _q4_k(blocks: Blocks) -> GroupedRows:
    steps, minimum_steps = _six_bits(blocks)
    return GroupedRows(
        _rows(_nibbles(blocks[:, :, 16:], 32), blocks), _halves(blocks, 0), steps,
        minima=_halves(blocks, 2), minimum_steps=minimum_steps,
    )  # fmt: skip


def _q5_k(blocks: Blocks) -> GroupedRows:
    steps, minimum_steps = _six_bits(blocks)
    high = (blocks[:, :, 16:48].reshape(*blocks.shape[:2], 1, 1, 32) >> _shifts(*range(8)).reshape(1, 1, 8, 1, 1)) & 1
    numbers = _nibbles(blocks[:, :, 48:], 32) | (high.reshape(*blocks.shape[:2], 256) << 4)
    return GroupedRows(
        _rows(numbers, blocks), _halves(blocks, 0), steps, minima=_halves(blocks, 2), minimum_steps=minimum_steps
    )


def _q6_k(blocks: Blocks) -> GroupedRows:
    low = _nibbles(blocks[:, :, :128], 64)
    high = (blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> _shifts(0, 2, 4, 6)) & 3
    numbers = low | (high.reshape(low.shape) << 4)
    return GroupedRows(_rows(numbers, blocks), _halves(blocks, 208), _signed(blocks[:, :, 192:208], blocks))


def _iq4_xs(blocks: Blocks) -> GroupedRows:
    low, high = blocks[:, :, 4:8], np.ascontiguousarray(blocks[:, :, 2:4]).view("<u2")
    lower = np.stack([low & 15, low >> 4], axis=3).reshape(*blocks.shape[:2], 8)
    upper = (high >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3
    steps = (lower | (upper << 4)).astype(np.int8) - 32
    numbers = _rows(_nibbles(blocks[:, :, 8:], 16), blocks)
    return GroupedRows(numbers, _halves(blocks, 0), _signed(steps, blocks))


def _shifts(*by: int) -> NDArray[np.uint8]:
    return np.array(by, dtype=np.uint8).reshape(1, 1, 1, -1, 1)


def _signed(steps: NDArray[np.uint8] | NDArray[np.int8], blocks: Blocks) -> NDArray[np.int8]:
    return np.ascontiguousarray(steps).view(np.int8).reshape(len(blocks), -1)


def _six_bits(blocks: Blocks) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Eight scales and eight minima of 6 bits in twelve bytes: of the last four of each, two bits lie in the others."""
    scale, minimum, both = (blocks[:, :, first : first + 4] for first in (4, 8, 12))
    scales = np.concatenate([scale & 63, (both & 15) | ((scale >> 2) & 48)], axis=2)
    minima = np.concatenate([minimum & 63, (both >> 4) | ((minimum >> 2) & 48)], axis=2)
    return _signed(scales, blocks), _signed(minima, blocks)


def compiled(kind: str, stored: NDArray[np.uint8], places: NDArray[np.int64]) -> GroupedRows:
    """Rows `places` of a matrix [rows, bytes of a row], as the function of `UNPACKERS` gives them."""
    from asyncengine.kernels.cpu.unpack_blocks import unpack_blocks

    found = unpack_blocks(kind, stored, places)
    scales = _exponents(found.scales) if kind in EXPONENTS else found.scales.view("<f2").astype(np.float32)
    minima = found.minima.view("<f2").astype(np.float32) if found.minima.size else None
    return GroupedRows(
        found.numbers, scales, found.steps if found.steps.size else None,
        minima=-minima if kind in ADDED and minima is not None else minima,
        minimum_steps=found.minimum_steps if found.minimum_steps.size else None,
    )  # fmt: skip


UNPACKERS: Mapping[str, Callable[[Blocks], GroupedRows]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "IQ4_NL": _q4_0, "MXFP4": _mxfp4,
    "MXFP4_PAIRS": _mxfp4_pairs,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_XS": _iq4_xs,
}  # fmt: skip
ADDED = ("Q4_1", "Q5_1")
"""Types whose minimum is added to the numbers, not taken off."""
EXPONENTS = ("MXFP4", "MXFP4_PAIRS")
"""Types whose scale is a power of two, stored as its exponent."""
