"""Where top-k and top-p cut a row of logits: the smallest kept value, found without sorting the row.

`scaled` are the row's logits over its temperature, `maxima` the largest of each block of them, `maximum` the largest of
all, and `kept` is working memory of the row's size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncengine.kernels.cpu.activation import exponential
from asyncengine.kernels.cpu.jit import serial

BLOCK = 512
"""Tokens of a block."""
FAINT = 80.0
"""What is e^80 times less likely than the likeliest token is never drawn."""
_BINS = 4096
_BINS_PER_UNIT = 64
"""The top-p set is looked for among bins of this many to a factor of e, below the likeliest token."""


@serial
def top_k_threshold(
    scaled: NDArray[np.float32],
    maxima: NDArray[np.float32],
    kept: NDArray[np.float32],
    maximum: Any,
    top_k: int,
    top_p: Any,
) -> Any:
    """The smallest value that top-k, then top-p over what that left, keep."""
    floor = np.float32(-np.inf)
    if top_k <= len(maxima):  # as many blocks reach this as tokens are wanted, so the answer is no smaller
        floor = np.sort(maxima)[len(maxima) - top_k]
    count = 0
    for block in range(len(maxima)):
        if maxima[block] >= floor:
            for index in range(block * BLOCK, min((block + 1) * BLOCK, len(scaled))):
                if scaled[index] >= floor:
                    kept[count] = scaled[index]
                    count += 1
    ordered = np.sort(kept[:count])
    smallest = ordered[count - top_k]
    if top_p >= 1:
        return smallest
    total: Any = 0.0
    for index in range(count - top_k, count):
        total += exponential(ordered[index] - maximum)
    return _walk(ordered[count - top_k :], maximum, 0.0, top_p * total)


@serial
def _walk(ordered: NDArray[np.float32], maximum: Any, running: Any, wanted: Any) -> Any:
    """The smallest of ascending values that is needed for their weights, from the top, to reach `wanted`."""
    least = ordered[-1]
    for index in range(len(ordered) - 1, -1, -1):
        if running >= wanted:
            break
        least = ordered[index]
        running += exponential(least - maximum)
    return least


@serial
def top_p_threshold(
    scaled: NDArray[np.float32],
    maxima: NDArray[np.float32],
    kept: NDArray[np.float32],
    maximum: Any,
    top_p: Any,
) -> Any:
    """The smallest value that top-p keeps: by bins of likelihood, then exactly inside the bin where it ends."""
    weights, sums = np.empty(BLOCK, dtype=np.float32), np.zeros(_BINS, dtype=np.float64)
    bins = np.empty(BLOCK, dtype=np.int32)
    faint = maximum - np.float32(FAINT)
    for block in range(len(maxima)):
        if maxima[block] < faint:
            continue
        size = min(BLOCK, len(scaled) - block * BLOCK)
        _weights_and_bins(scaled[block * BLOCK : block * BLOCK + size], maximum, weights, bins)
        for index in range(size):
            sums[bins[index]] += weights[index]
    wanted = sums.sum() * top_p
    running, end = 0.0, 0
    while end < _BINS - 1 and running + sums[end] < wanted:
        running += sums[end]
        end += 1
    count = 0
    for block in range(len(maxima)):
        if maxima[block] < faint:
            continue
        size = min(BLOCK, len(scaled) - block * BLOCK)
        _weights_and_bins(scaled[block * BLOCK : block * BLOCK + size], maximum, weights, bins)
        for index in range(size):
            if bins[index] == end:
                kept[count] = scaled[block * BLOCK + index]
                count += 1
    if not count:
        return faint  # rounding alone kept the sum from what was wanted: everything belongs to it
    return _walk(np.sort(kept[:count]), maximum, running, wanted)


@serial
def _weights_and_bins(
    scaled: NDArray[np.float32], maximum: Any, weights: NDArray[np.float32], bins: NDArray[np.int32]
) -> None:
    for index in range(len(scaled)):
        below = min(maximum - scaled[index], np.float32(FAINT))
        weights[index] = exponential(-below) if below < np.float32(FAINT) else np.float32(0)
        bins[index] = min(np.int32(below * np.float32(_BINS_PER_UNIT)), np.int32(_BINS - 1))
