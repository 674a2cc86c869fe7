"""From logits to tokens on a CPU: the largest, and a draw from what top-k, top-p and min-p keep, a row at a time.

The choice is that of `sampling.sampler`, number for number of noise: Gumbel-max over blocks of tokens, then over the
tokens of the winning block. What differs is the way there. The largest logit of every block is known after one pass
over a row, and most of the others look only at blocks that can matter: a top-k of 20 reads 20 of 300 blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.kernels.cpu.activation import exponential
from asyncengine.kernels.cpu.calls import call, call_rare, parallel_for
from asyncengine.kernels.cpu.jit import array, inline, pointer, room, serial, serial_in_order, with_gil
from asyncengine.kernels.cpu.team import team_threads, use_team
from asyncengine.kernels.cpu.team_loops import pieces_of

_WHOLE, _SINGLE = np.int64(0), np.float32(0)

# The cut of top-k and top-p in a row of logits: the smallest kept value, found without sorting the row.

BLOCK = 512
"""Tokens of a block."""
FAINT = 80.0
"""A token e^80 times less likely than the likeliest is never drawn."""
_BINS = 4096
_BINS_PER_UNIT = 64
"""The top-p set is looked for among bins of this many to a factor of e, below the likeliest token."""
_SHORT, _LATER = 16, 128
"""Numbers of a range that is left to the insertion sort; room for the ends of ranges that are sorted later."""


@serial
def top_k_threshold(
    values: int, block_maxima: int, memory: int, threshold: int, vocab: int, maximum: np.float32, top_k: int,
    top_p: np.float32,
) -> None:  # fmt: skip
    """Store to `threshold` the smallest value that top-k, then top-p over what that left, keep."""
    scaled, candidates = array(pointer(values, _SINGLE), (vocab,)), array(pointer(memory, _SINGLE), (vocab,))
    maxima = array(pointer(block_maxima, _SINGLE), ((vocab + BLOCK - 1) // BLOCK,))
    result = array(pointer(threshold, _SINGLE), (1,))
    floor = np.float32(-np.inf)
    if top_k <= len(maxima):  # as many blocks reach this as tokens are wanted, so the answer is no smaller
        for block in range(len(maxima)):
            candidates[block] = maxima[block]
        call(_sort, (memory, len(maxima)))
        floor = candidates[len(maxima) - top_k]
    count = 0
    for block in range(len(maxima)):
        if maxima[block] >= floor:
            for index in range(block * BLOCK, min((block + 1) * BLOCK, len(scaled))):
                if scaled[index] >= floor:
                    candidates[count] = scaled[index]
                    count += 1
    call(_sort, (memory, count))
    ordered = candidates[:count]
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
    """Sort float32 [count], none of them NaN, ascending and in place.

    As quick as `numpy.ndarray.sort`, which takes numba ten times as long to compile (C. A. R. Hoare: Quicksort, 1962;
    short parts are left to one insertion sort at the end: R. Sedgewick, 1978).
    """
    values = array(pointer(memory, _SINGLE), (count,))
    deferred = room(_LATER, _WHOLE)  # the longer of two ranges each time: no more of them than bits in `count`
    num_deferred, low, high = 0, 0, count - 1
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
                    swapped = values[left]
                    values[left] = values[right]
                    values[right] = swapped
                    left, right = left + 1, right - 1
            if right - low > high - left:
                deferred[num_deferred], deferred[num_deferred + 1] = low, right
                low = left
            else:
                deferred[num_deferred], deferred[num_deferred + 1] = left, high
                high = right
            num_deferred += 2
        if num_deferred == 0:
            break
        num_deferred -= 2
        low, high = deferred[num_deferred], deferred[num_deferred + 1]
    for index in range(1, count):
        value, position = values[index], index
        while position > 0 and values[position - 1] > value:
            values[position] = values[position - 1]
            position -= 1
        values[position] = value


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
    values: int, block_maxima: int, memory: int, threshold: int, vocab: int, maximum: np.float32, top_p: np.float32
) -> None:
    """The smallest value that top-p keeps: by bins of likelihood, then exactly inside the bin where it ends."""
    scaled, candidates = array(pointer(values, _SINGLE), (vocab,)), array(pointer(memory, _SINGLE), (vocab,))
    maxima = array(pointer(block_maxima, _SINGLE), ((vocab + BLOCK - 1) // BLOCK,))
    result = array(pointer(threshold, _SINGLE), (1,))
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
                candidates[count] = scaled[block * BLOCK + index]
                count += 1
    if not count:
        result[0] = faint  # only rounding kept the sum below its target: every token belongs to the set
        return
    call(_sort, (memory, count))
    result[0] = _walk(candidates[:count], maximum, running, wanted)


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


_LANES = 16
_WORK = 8
"""Bytes that could be read while a logit is looked at."""
_AT_ONCE = 2**18
"""Logits up to which the interpreter's lock is kept, by this thread alone: it takes a millisecond at most."""
_BLOCK_FLAG = 1 << 31
_WITHIN = "asyncengine.kernels.cpu"
_FIVE = ", ".join(["int64"] * 5)
_CHOOSE = tuple(f"{_WITHIN}.sampling:{name}:({_FIVE}, {_FIVE})" for name in ("_choose_at_once", "_choose"))
"""Kernels that every request needs, by name (`calls.compile_named`)."""
_DRAW = f"{_WITHIN}.sampling:_draw:void(int64, int64, int64, int64, float32, float32, int64, int64, int64)"
_TOP_P = f"{_WITHIN}.sampling:top_p_threshold:void({_FIVE}, float32, float32)"
_TOP_K = f"{_WITHIN}.sampling:top_k_threshold:void({_FIVE}, float32, int64, float32)"


class SamplerKernel:
    """Chooses one token for each row. Holds working memory: one step at a time."""

    few = 64
    """Rows up to which flat lists of their parameters take less time than arrays."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_blocks = -(-vocab_size // BLOCK)
        self._width = 2 * vocab_size + self._num_blocks + 1
        """Numbers of a worker's memory."""
        self._scratch = torch.empty((0, 0), dtype=torch.float32)
        self._few = np.empty(3 * self.few, dtype=np.float32), np.empty(4 * self.few, dtype=np.int64)
        self._few_at = self._few[0].ctypes.data, self._few[1].ctypes.data
        # compiled now rather than in a request's first step
        self.choose(torch.zeros((1, vocab_size)), np.zeros((1, 3), np.float32), np.zeros((1, 4), np.int64))

    @staticmethod
    def names(*, draws: bool, top_k: bool, top_p: bool) -> tuple[list[str], list[str]]:
        """(names of the kernels of requests that ask for this, of all others)."""
        rare = ((_TOP_P, top_p), (_DRAW, draws), (_TOP_K, top_k))
        needed = [*_CHOOSE, *(name for name, wanted in rare if wanted)]
        return needed, [name for name, wanted in rare if not wanted]

    def choose(
        self, logits: torch.Tensor, params: NDArray[np.float32], keys: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens int64 [rows], largest logits float32 [rows]) of logits [rows, vocab] of any float type.

        params float32 [rows, 3]: temperature (0: the largest logit's token), top-p, min-p; keys int64 [rows, 4]: top-k
        (0: all), both halves of the seed, position. A row whose largest logit is not finite gets token 0, and NaN for
        that logit if it has one anywhere.
        """
        return self._choose(logits, params.ctypes.data, keys.ctypes.data)

    def choose_few(
        self, logits: torch.Tensor, params: Sequence[float], keys: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`choose` for up to `few` rows, whose params and keys come as flat lists, row by row."""
        numbers, whole = self._few
        numbers[: len(params)] = params
        whole[: len(keys)] = keys
        return self._choose(logits, *self._few_at)

    def _choose(self, logits: torch.Tensor, params: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.float().contiguous()
        rows = logits.shape[0]
        *_, workers = team_threads()
        if self._scratch.shape[0] < workers:
            self._scratch = torch.empty((workers, self._width), dtype=torch.float32)
        # not torch.empty, which lets go of the interpreter's lock
        tokens, best = torch.from_numpy(np.empty(rows, np.int64)), torch.from_numpy(np.empty(rows, np.float32))
        choose, team = (_choose_at_once, 0) if logits.numel() <= _AT_ONCE else (_choose, use_team())
        choose(
            logits.data_ptr(), params, keys, self._scratch.data_ptr(), tokens.data_ptr(), best.data_ptr(), rows,
            self._vocab_size, self._width, team,
        )  # fmt: skip
        return tokens, best


@serial
def _choose(
    logits: int, params: int, keys: int, scratch: int, tokens: int, best: int, rows: int, vocab: int, width: int,
    team: int,
) -> None:  # fmt: skip
    pieces = pieces_of(rows * vocab * _WORK, rows, team)
    parallel_for(_choose_rows, team, pieces, (logits, params, keys, scratch, tokens, best, rows, vocab, width))


_choose_at_once = with_gil(_choose)


@serial
def _choose_rows(
    piece: int, pieces: int, worker: int,
    logits: int, params: int, keys: int, scratch: int, tokens: int, best: int, rows: int, vocab: int, width: int,
) -> None:  # fmt: skip
    """The rows of one of `pieces`; `width` is the numbers that `scratch` has for a worker."""
    for row in range(rows * piece // pieces, rows * (piece + 1) // pieces):
        _choose_row(
            logits + row * vocab * 4, params + row * 12, keys + row * 32, scratch + worker * width * 4,
            tokens + row * 8, best + row * 4, vocab,
        )  # fmt: skip


@serial
def _choose_row(logits: int, params: int, keys: int, scratch: int, token: int, best: int, vocab: int) -> None:
    """Choose one row's token. Functions that compile slowly are called by address: several processes compile them, and
    last those that greedy requests do not call (`models.first_kernels` knows which models' requests are greedy)."""
    blocks = (vocab + BLOCK - 1) // BLOCK
    result, maxima = scratch, scratch + 4
    scaled = maxima + blocks * 4
    kept = scaled + vocab * 4
    chosen, cut = array(pointer(token, _WHOLE), (1,)), array(pointer(result, _SINGLE), (1,))
    call(_largest_of_blocks, (logits, maxima, result, vocab))
    largest = cut[0]
    array(pointer(best, _SINGLE), (1,))[0] = largest
    values, tops = array(pointer(logits, _SINGLE), (vocab,)), array(pointer(maxima, _SINGLE), (blocks,))
    settings, wanted = array(pointer(params, _SINGLE), (3,)), array(pointer(keys, _WHOLE), (4,))
    temperature, top_p, min_p = settings[0], settings[1], settings[2]
    if not np.isfinite(largest):
        chosen[0] = 0
        return
    if temperature == 0:
        chosen[0] = _first_index_of(values, tops, largest)
        return
    scaled_logits = array(pointer(scaled, _SINGLE), (vocab,))
    for index in range(vocab):
        scaled_logits[index] = values[index] / temperature
    # division by a positive number keeps the order, so these are still the maxima of their blocks
    for block in range(blocks):
        tops[block] /= temperature
    maximum = largest / temperature
    least = max(maximum + np.log(min_p), maximum - np.float32(FAINT))
    if wanted[0] > 0:
        call_rare(top_k_threshold, (scaled, maxima, kept, result, vocab, maximum, wanted[0], top_p))
        least = max(least, cut[0])
    elif top_p < 1:
        call_rare(top_p_threshold, (scaled, maxima, kept, result, vocab, maximum, top_p))
        least = max(least, cut[0])
    call_rare(_draw, (scaled, maxima, token, vocab, maximum, least, wanted[1], wanted[2], wanted[3]))


@serial
def _largest_of_blocks(logits: int, block_maxima: int, result: int, vocab: int) -> None:
    """Fill float32 [blocks] at `block_maxima`; to `result` goes the largest of all, or NaN if there is one anywhere."""
    values = array(pointer(logits, _SINGLE), (vocab,))
    maxima = array(pointer(block_maxima, _SINGLE), ((vocab + BLOCK - 1) // BLOCK,))
    lanes = room(_LANES, _SINGLE)
    unordered = 0
    maximum = np.float32(-np.inf)
    for block in range(len(maxima)):
        begin, end = block * BLOCK, min((block + 1) * BLOCK, len(values))
        for lane in range(_LANES):
            lanes[lane] = np.float32(-np.inf)
        whole = begin + (end - begin) // _LANES * _LANES
        for start in range(begin, whole, _LANES):
            for lane in range(_LANES):
                value = values[start + lane]
                unordered += np.isnan(value)
                lanes[lane] = value if value > lanes[lane] else lanes[lane]
        for index in range(whole, end):
            value = values[index]
            unordered += np.isnan(value)
            lanes[0] = value if value > lanes[0] else lanes[0]
        greatest = lanes[0]
        for lane in range(1, _LANES):
            greatest = max(greatest, lanes[lane])
        maxima[block] = greatest
        maximum = max(maximum, greatest)
    array(pointer(result, _SINGLE), (1,))[0] = np.float32(np.nan) if unordered else maximum


@serial
def _first_index_of(values: NDArray[np.float32], maxima: NDArray[np.float32], maximum: Any) -> int:
    """The index of the first value that equals `maximum`, the largest."""
    for block in range(len(maxima)):
        if maxima[block] == maximum:
            for index in range(block * BLOCK, min((block + 1) * BLOCK, len(values))):
                if values[index] == maximum:
                    return index
    return 0


@serial
def _draw(
    values: int, block_maxima: int, token: int, vocab: int, maximum: np.float32, least: np.float32, seed_low: int,
    seed_high: int, position: int,
) -> None:  # fmt: skip
    """A token with a value of `least` or more, as likely as its share of the sum of e^value. Goes to `token`."""
    scaled = array(pointer(values, _SINGLE), (vocab,))
    maxima = array(pointer(block_maxima, _SINGLE), ((vocab + BLOCK - 1) // BLOCK,))
    low, high, position_bits = np.uint32(seed_low), np.uint32(seed_high), np.uint32(position)
    # the same hash as in `sampling.sampler` and the GPU's kernel: a seed gives the same noise on every device
    inner = _mix(_mix(_mix(low ^ np.uint32(0x9E3779B9)) ^ high) ^ position_bits)
    outer = _mix(_mix(_mix(high ^ np.uint32(0x7F4A7C15)) ^ position_bits) ^ low)
    winner, top = 0, np.float32(-np.inf)
    for block in range(len(maxima)):
        if maxima[block] < least:
            continue
        total = _sum_kept(values + block * (BLOCK * 4), min(BLOCK, vocab - block * BLOCK), maximum, least)
        score = np.float32(np.log(total)) + _gumbel(np.uint32(block | _BLOCK_FLAG), inner, outer)
        if score > top:
            winner, top = block, score
    chosen, top = winner * BLOCK, np.float32(-np.inf)
    for index in range(winner * BLOCK, min((winner + 1) * BLOCK, len(scaled))):
        if scaled[index] >= least:
            score = scaled[index] + _gumbel(np.uint32(index), inner, outer)
            if score > top:
                chosen, top = index, score
    array(pointer(token, _WHOLE), (1,))[0] = chosen


@serial
def _sum_kept(start: int, size: int, maximum: Any, least: Any) -> Any:
    values = array(pointer(start, _SINGLE), (size,))
    total = np.float32(0)
    for index in range(size):
        total += exponential(values[index] - maximum) if values[index] >= least else np.float32(0)
    return total


@inline
def _gumbel(key: Any, inner: Any, outer: Any) -> Any:
    """The noise of `sampling.sampler`: a function of seed, position and token id alone."""
    bits = _mix(np.uint32(_mix(key ^ inner) + outer))
    return np.float32(-np.log(-np.log((np.float64(bits) + 0.5) * 2.0**-32)))


@inline
def _mix(value: Any) -> Any:
    value = np.uint32(value ^ (value >> np.uint32(16)))
    value = np.uint32(value * np.uint32(0x85EBCA6B))
    value = np.uint32(value ^ (value >> np.uint32(13)))
    value = np.uint32(value * np.uint32(0xC2B2AE35))
    return np.uint32(value ^ (value >> np.uint32(16)))
