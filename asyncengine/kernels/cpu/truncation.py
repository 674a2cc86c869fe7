"""The cut of top-k and top-p in a row of logits: the smallest kept value, found without sorting the row.

`values` is the address of the row's logits over its temperature, `places` that of the largest of each block of them,
`memory` that of working memory of the row's size, `found` that of the result. `maximum` is the largest logit of all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncengine.kernels.cpu.activation import exponential
from asyncengine.kernels.cpu.calls import call
from asyncengine.kernels.cpu.jit import array, pointer, room, serial, serial_in_order

_SINGLE, _WHOLE = np.float32(0), np.int64(0)
BLOCK = 512
"""Tokens of a block."""
FAINT = 80.0
"""A token e^80 times less likely than the likeliest is never drawn."""
_BINS = 4096
_BINS_PER_UNIT = 64
"""The top-p set is looked for among bins of this many to a factor of e, below the likeliest token."""
_SHORT, _LATER = 16, 128
"""Numbers that are not worth another part of the sort; ends of parts that it may put off."""


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
    """Ascending float32 [count], none of them NaN, in their place.

    As quick as `numpy.ndarray.sort`, which takes numba ten times as long to compile (C. A. R. Hoare: Quicksort, 1962;
    short parts are left to one insertion sort at the end: R. Sedgewick, 1978).
    """
    values = array(pointer(memory, _SINGLE), (count,))
    later = room(_LATER, _WHOLE)  # the longer of two parts each time: no more than bits in `count`
    waiting, low, high = 0, 0, count - 1
    while True:
        while high - low >= _SHORT:
            first, middle, last = values[low], values[(low + high) // 2], values[high]
            pivot = max(min(first, middle), min(max(first, middle), last))
            left, right = low, high
            while left <= right:
                while values[left] < pivot:
                    left += 1
                while values[right] > pivot:
                    right -= 1
                if left <= right:
                    kept = values[left]
                    values[left] = values[right]
                    values[right] = kept
                    left, right = left + 1, right - 1
            if right - low > high - left:
                later[waiting], later[waiting + 1] = low, right
                low = left
            else:
                later[waiting], later[waiting + 1] = left, high
                high = right
            waiting += 2
        if waiting == 0:
            break
        waiting -= 2
        low, high = later[waiting], later[waiting + 1]
    for index in range(1, count):
        value, place = values[index], index
        while place > 0 and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


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
    weights, bins, sums = room(BLOCK, _SINGLE), room(BLOCK, np.int32(0)), room(_BINS, np.float64(0))
    for index in range(_BINS):
        sums[index] = 0.0
    faint = maximum - np.float32(FAINT)
    for block in range(len(maxima)):
        if maxima[block] < faint:
            continue
        size = min(BLOCK, len(scaled) - block * BLOCK)
        _weights_and_bins(values + block * (BLOCK * 4), size, maximum, weights, bins)
        for index in range(size):
            sums[bins[index]] += weights[index]
    wanted = _sum(sums) * top_p
    running, end = 0.0, 0
    while end < _BINS - 1 and running + sums[end] < wanted:
        running += sums[end]
        end += 1
    count = 0
    for block in range(len(maxima)):
        if maxima[block] < faint:
            continue
        size = min(BLOCK, len(scaled) - block * BLOCK)
        _weights_and_bins(values + block * (BLOCK * 4), size, maximum, weights, bins)
        for index in range(size):
            if bins[index] == end:
                kept[count] = scaled[block * BLOCK + index]
                count += 1
    if not count:
        result[0] = faint  # rounding alone kept the sum from what was wanted: everything belongs to it
        return
    call(_sort, (memory, count))
    result[0] = _walk(kept[:count], maximum, running, wanted)


@serial_in_order
def _sum(values: NDArray[np.float64]) -> Any:
    total = 0.0
    for index in range(len(values)):
        total += values[index]
    return total


@serial
def _weights_and_bins(
    values: int, size: int, maximum: Any, weights: NDArray[np.float32], bins: NDArray[np.int32]
) -> None:
    scaled = array(pointer(values, _SINGLE), (size,))
    for index in range(size):
        below = min(maximum - scaled[index], np.float32(FAINT))
        weights[index] = exponential(-below) if below < np.float32(FAINT) else np.float32(0)
        bins[index] = min(np.int32(below * np.float32(_BINS_PER_UNIT)), np.int32(_BINS - 1))
