"""Where top-k and top-p cut a row of logits: the smallest kept value, found without sorting the row.

`values` is the address of the row's logits over its temperature, `places` that of the largest of each block of them,
`memory` that of working memory of the row's size, `found` that of the result. `maximum` is the largest logit of all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncengine.kernels.cpu.activation import exponential
from asyncengine.kernels.cpu.calls import call
from asyncengine.kernels.cpu.jit import array, pointer, serial

_SINGLE = np.float32(0)
BLOCK = 512
"""Tokens of a block."""
FAINT = 80.0
"""What is e^80 times less likely than the likeliest token is never drawn."""
_BINS = 4096
_BINS_PER_UNIT = 64
"""The top-p set is looked for among bins of this many to a factor of e, below the likeliest token."""


@serial
def top_k_threshold(
    values: int, places: int, memory: int, found: int, vocab: int, maximum: np.float32, top_k: int, top_p: np.float32
) -> None:
    """The smallest value that top-k, then top-p over what that left, keep."""
    scaled, kept = array(pointer(values, _SINGLE), (vocab,)), array(pointer(memory, _SINGLE), (vocab,))
    maxima = array(pointer(places, _SINGLE), ((vocab + BLOCK - 1) // BLOCK,))
    result = array(pointer(found, _SINGLE), (1,))
    floor = np.float32(-np.inf)
    if top_k <= len(maxima):  # as many blocks reach this as tokens are wanted, so the answer is no smaller
        for block in range(len(maxima)):
            kept[block] = maxima[block]
        call(_sort, (memory, len(maxima)))
        floor = kept[len(maxima) - top_k]
    count = 0
    for block in range(len(maxima)):
        if maxima[block] >= floor:
            for index in range(block * BLOCK, min((block + 1) * BLOCK, len(scaled))):
                if scaled[index] >= floor:
                    kept[count] = scaled[index]
                    count += 1
    call(_sort, (memory, count))
    ordered = kept[:count]
    smallest = ordered[count - top_k]
    if top_p >= 1:
        result[0] = smallest
        return
    total: Any = 0.0
    for index in range(count - top_k, count):
        total += exponential(ordered[index] - maximum)
    result[0] = _walk(ordered[count - top_k :], maximum, 0.0, top_p * total)


@serial
def _sort(memory: int, count: int) -> None:
    """Ascending float32 [count], in their place."""
    array(pointer(memory, _SINGLE), (count,)).sort()


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
    values: int, places: int, memory: int, found: int, vocab: int, maximum: np.float32, top_p: np.float32
) -> None:
    """The smallest value that top-p keeps: by bins of likelihood, then exactly inside the bin where it ends."""
    scaled, kept = array(pointer(values, _SINGLE), (vocab,)), array(pointer(memory, _SINGLE), (vocab,))
    maxima = array(pointer(places, _SINGLE), ((vocab + BLOCK - 1) // BLOCK,))
    result = array(pointer(found, _SINGLE), (1,))
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
        result[0] = faint  # rounding alone kept the sum from what was wanted: everything belongs to it
        return
    call(_sort, (memory, count))
    result[0] = _walk(kept[:count], maximum, running, wanted)


@serial
def _weights_and_bins(
    scaled: NDArray[np.float32], maximum: Any, weights: NDArray[np.float32], bins: NDArray[np.int32]
) -> None:
    for index in range(len(scaled)):
        below = min(maximum - scaled[index], np.float32(FAINT))
        weights[index] = exponential(-below) if below < np.float32(FAINT) else np.float32(0)
        bins[index] = min(np.int32(below * np.float32(_BINS_PER_UNIT)), np.int32(_BINS - 1))
