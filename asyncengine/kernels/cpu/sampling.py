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
from asyncengine.kernels.cpu.jit import array, inline, pointer, room, serial, with_gil
from asyncengine.kernels.cpu.team import team_threads, use_team
from asyncengine.kernels.cpu.team_loops import pieces_of
from asyncengine.kernels.cpu.truncation import BLOCK, FAINT, top_k_threshold, top_p_threshold

_LANES = 16
_WORK = 8
"""Bytes that could be read while a logit is looked at."""
_AT_ONCE = 2**18
"""Logits up to which the interpreter's lock is kept, by this thread alone: it takes a millisecond at most."""
_BLOCK_FLAG = 1 << 31
_WHOLE, _SINGLE = np.int64(0), np.float32(0)
_WITHIN = "asyncengine.kernels.cpu"
_FIVE = ", ".join(["int64"] * 5)
_CHOOSE = tuple(f"{_WITHIN}.sampling:{name}:({_FIVE}, {_FIVE})" for name in ("_choose_at_once", "_choose"))
"""Kernels that every request needs, by name (`calls.compile_named`)."""
_DRAW = f"{_WITHIN}.sampling:_draw:void(int64, int64, int64, int64, float32, float32, int64, int64, int64)"
_TOP_P = f"{_WITHIN}.truncation:top_p_threshold:void({_FIVE}, float32, float32)"
_TOP_K = f"{_WITHIN}.truncation:top_k_threshold:void({_FIVE}, float32, int64, float32)"


class SamplerKernel:
    """Chooses one token for each row. Holds working memory: one step at a time."""

    few = 64
    """Rows up to which lists of what they ask for take less time than arrays."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_blocks = -(-vocab_size // BLOCK)
        self._width = 2 * vocab_size + self._num_blocks + 1
        """Numbers of a worker's memory."""
        self._scratch = torch.empty((0, 0), dtype=torch.float32)
        self._few = np.empty(3 * self.few, dtype=np.float32), np.empty(4 * self.few, dtype=np.int64)
        self._few_at = self._few[0].ctypes.data, self._few[1].ctypes.data
        # compiled now rather than in somebody's first step
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
        """The same of up to `few` rows, whose numbers come one behind the other."""
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
    parallel_for(
        _choose_part,
        team,
        pieces_of(rows * vocab * _WORK, rows, team),
        (logits, params, keys, scratch, tokens, best, rows, vocab, width),
    )


_choose_at_once = with_gil(_choose)


@serial
def _choose_part(
    piece: int, pieces: int, worker: int,
    logits: int, params: int, keys: int, scratch: int, tokens: int, best: int, rows: int,
    vocab: int, width: int,
) -> None:  # fmt: skip
    """The rows of one of `pieces`; `width` is the numbers that `scratch` has for a worker."""
    for row in range(rows * piece // pieces, rows * (piece + 1) // pieces):
        _choose_row(
            logits + row * vocab * 4, params + row * 12, keys + row * 32, scratch + worker * width * 4,
            tokens + row * 8, best + row * 4, vocab,
        )  # fmt: skip


@serial
def _choose_row(logits: int, params: int, keys: int, scratch: int, token: int, best: int, vocab: int) -> None:
    """All by address; the parts that take a compiler long are called that way too, so that several may compile them,
    and those last that no request calls that takes the largest (`models.first_kernels` knows which models' do)."""
    blocks = (vocab + BLOCK - 1) // BLOCK
    found, maxima = scratch, scratch + 4
    scaled = maxima + blocks * 4
    kept = scaled + vocab * 4
    chosen, cut = array(pointer(token, _WHOLE), (1,)), array(pointer(found, _SINGLE), (1,))
    call(_largest_of_blocks, (logits, maxima, found, vocab))
    largest = cut[0]
    array(pointer(best, _SINGLE), (1,))[0] = largest
    values, tops = array(pointer(logits, _SINGLE), (vocab,)), array(pointer(maxima, _SINGLE), (blocks,))
    settings, wanted = array(pointer(params, _SINGLE), (3,)), array(pointer(keys, _WHOLE), (4,))
    temperature, top_p, min_p = settings[0], settings[1], settings[2]
    if not np.isfinite(largest):
        chosen[0] = 0
        return
    if temperature == 0:
        chosen[0] = _place_of(values, tops, largest)
        return
    divided = array(pointer(scaled, _SINGLE), (vocab,))
    for index in range(vocab):
        divided[index] = values[index] / temperature
    for block in range(blocks):
        tops[block] /= temperature
    maximum = largest / temperature
    least = max(maximum + np.log(min_p), maximum - np.float32(FAINT))
    if wanted[0] > 0:
        call_rare(top_k_threshold, (scaled, maxima, kept, found, vocab, maximum, wanted[0], top_p))
        least = max(least, cut[0])
    elif top_p < 1:
        call_rare(top_p_threshold, (scaled, maxima, kept, found, vocab, maximum, top_p))
        least = max(least, cut[0])
    call_rare(_draw, (scaled, maxima, token, vocab, maximum, least, wanted[1], wanted[2], wanted[3]))


@serial
def _largest_of_blocks(logits: int, places: int, found: int, vocab: int) -> None:
    """Fills the float32 [blocks] at `places`; `found`: where the largest goes, or NaN if there is one anywhere."""
    values = array(pointer(logits, _SINGLE), (vocab,))
    maxima = array(pointer(places, _SINGLE), ((vocab + BLOCK - 1) // BLOCK,))
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
    array(pointer(found, _SINGLE), (1,))[0] = np.float32(np.nan) if unordered else maximum


@serial
def _place_of(values: NDArray[np.float32], maxima: NDArray[np.float32], maximum: Any) -> int:
    """The first place of the largest value."""
    for block in range(len(maxima)):
        if maxima[block] == maximum:
            for index in range(block * BLOCK, min((block + 1) * BLOCK, len(values))):
                if values[index] == maximum:
                    return index
    return 0


@serial
def _draw(
    values: int, places: int, token: int, vocab: int, maximum: np.float32, least: np.float32, seed_low: int,
    seed_high: int, position: int,
) -> None:  # fmt: skip
    """A token with a value of `least` or more, as likely as its share of the sum of e^value. Goes to `token`."""
    scaled = array(pointer(values, _SINGLE), (vocab,))
    maxima = array(pointer(places, _SINGLE), ((vocab + BLOCK - 1) // BLOCK,))
    low, high, where = np.uint32(seed_low), np.uint32(seed_high), np.uint32(position)
    inner = _mix(_mix(_mix(low ^ np.uint32(0x9E3779B9)) ^ high) ^ where)
    outer = _mix(_mix(_mix(high ^ np.uint32(0x7F4A7C15)) ^ where) ^ low)
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
    """The noise of `sampling.noise`: a function of seed, position and token id alone."""
    bits = _mix(np.uint32(_mix(key ^ inner) + outer))
    return np.float32(-np.log(-np.log((np.float64(bits) + 0.5) * 2.0**-32)))


@inline
def _mix(value: Any) -> Any:
    value = np.uint32(value ^ (value >> np.uint32(16)))
    value = np.uint32(value * np.uint32(0x85EBCA6B))
    value = np.uint32(value ^ (value >> np.uint32(13)))
    value = np.uint32(value * np.uint32(0xC2B2AE35))
    return np.uint32(value ^ (value >> np.uint32(16)))
