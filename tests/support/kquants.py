"""Q4_K, Q5_K and Q6_K written by rounding, for tests: the public `gguf` package only reads these types.

Simpler than llama.cpp's search, and some tenths of a percent worse.
"""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

_SHRINK = (1.0, 0.95, 0.9, 0.85)
"""Parts of a group's range that its numbers may span: outliers cost less than coarse steps."""
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Types that llama.cpp takes for rows that are no whole blocks."""


def stored_as(kind: str, columns: int) -> str:
    """The type that llama.cpp's quantizer gives a matrix with so many inputs."""
    return _FALLBACK[kind] if kind in _FALLBACK and columns % 256 else kind


def quantize(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """[rows, bytes] of a matrix [rows, inputs]."""
    if kind not in _FALLBACK:
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    blocks = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, 256)
    packed = _q6_k(blocks) if kind == "Q6_K" else _with_minima(blocks, 5 if kind == "Q5_K" else 4)
    return packed.reshape(len(values), -1)


def _with_minima(blocks: NDArray[np.float32], bits: int) -> NDArray[np.uint8]:
    """Groups of 32 between their minimum and maximum."""
    groups, most = blocks.reshape(-1, 8, 32), (1 << bits) - 1
    best = np.full(groups.shape[:2], np.inf, dtype=np.float32)
    scale, minimum = np.zeros_like(best), np.zeros_like(best)
    for shrink in _SHRINK:
        below = np.maximum(-groups.min(axis=2), 0) * shrink
        step = (np.maximum(groups.max(axis=2), 0) * shrink + below) / most
        rounded = np.clip(np.rint((groups + below[..., None]) / _safe(step)[..., None]), 0, most)
        error = np.square(rounded * step[..., None] - below[..., None] - groups).sum(axis=2)
        better = error < best
        best = np.where(better, error, best)
        scale, minimum = np.where(better, step, scale), np.where(better, below, minimum)
    d, steps = _in_blocks(scale, 63)
    dmin, minima = _in_blocks(minimum, 63)
    exact, taken = d * steps, dmin * minima
    numbers = np.clip(np.rint((groups + taken[..., None]) / _safe(exact)[..., None]), 0, most).astype(np.uint8)
    lower = (numbers & 15).reshape(-1, 4, 2, 32)
    parts = [
        _half(d), _half(dmin), _six_bits(steps.astype(np.uint8), minima.astype(np.uint8)),
        (lower[:, :, 0] | (lower[:, :, 1] << 4)).reshape(-1, 128),
    ]  # fmt: skip
    if bits == 5:
        shifts = np.arange(8, dtype=np.uint8)[None, :, None]
        parts.insert(3, np.bitwise_or.reduce((numbers >> 4) << shifts, axis=1))
    return np.concatenate(parts, axis=1)


def _q6_k(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    groups = blocks.reshape(-1, 16, 16)
    d, steps = _in_blocks(np.abs(groups).max(axis=2) / 31, 127)
    numbers = np.clip(np.rint(groups / _safe(d * steps)[..., None]), -32, 31).astype(np.int8) + 32
    numbers = numbers.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = numbers & 15, numbers >> 4
    ql = np.concatenate([low[:, :, 0] | (low[:, :, 2] << 4), low[:, :, 1] | (low[:, :, 3] << 4)], axis=2)
    qh = np.bitwise_or.reduce(high << np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None], axis=2)
    return np.concatenate(
        [ql.reshape(-1, 128), qh.reshape(-1, 64), steps.astype(np.int8).view(np.uint8), _half(d)], axis=1
    )


def _in_blocks(values: NDArray[np.float32], most: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(a float16 for each block [n, 1], whole steps of it [n, groups])."""
    shared = (values.max(axis=1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    return shared, np.clip(np.rint(values / _safe(shared)), 0, most)


def _safe(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(values == 0, np.float32(1), values)


def _half(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return values.astype("<f2").view(np.uint8).reshape(len(values), 2)


def _six_bits(scales: NDArray[np.uint8], minima: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.concatenate(
        [
            scales[:, :4] | ((scales[:, 4:] >> 4) << 6),
            minima[:, :4] | ((minima[:, 4:] >> 4) << 6),
            (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4),
        ],
        axis=1,
    )
