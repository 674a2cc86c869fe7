"""The parts of a draw: random numbers as a stateless function of (seed, position, token id), and what is kept.

Nothing is drawn from a generator, so a token does not depend on batch neighbours, slots, chunking, preemption or
padding, and replaying a step gives the same token (the idea of vLLM's model runner V2). The mixing function is the
finalizer of MurmurHash3 (Austin Appleby, public domain); arithmetic is in int64, masked to 32 bits.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

from asyncengine.execution.device.transfer import Int64Array, upload

Integers = TypeVar("Integers", torch.Tensor, Int64Array)

_MASK = 0xFFFFFFFF
BLOCK_FLAG = 1 << 31
"""Set in an id to name a block of tokens rather than a token; the two draw independent numbers."""


AGAIN_FLAG = 1 << 30
"""Set in the id of a token that is drawn in the place of another one at the same position."""


def _mix(value: Integers) -> Integers:
    """A bijection of [0, 2**32) in which each input bit flips each output bit half of the time."""
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & _MASK
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & _MASK
    return value ^ (value >> 16)


def noise_keys(seed_low: Int64Array, seed_high: Int64Array, positions: Int64Array) -> Int64Array:
    """int64 [2, rows]: the part of every random number that depends on seed and position [rows] alone.

    The halves of the seed are in [0, 2**32). On the host, which knows them all: on a device it would be a hundred
    small kernels a step.
    """
    where = positions & _MASK
    inner = _mix(_mix(_mix(seed_low ^ 0x9E3779B9) ^ seed_high) ^ where)
    outer = _mix(_mix(_mix(seed_high ^ 0x7F4A7C15) ^ where) ^ seed_low)
    return np.stack((inner, outer))


def uniform_bits(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 values in [0, 2**32) of the shape of `ids` [rows, n], which are in [0, 2**32). keys: `noise_keys`."""
    inner, outer = keys
    return _mix((_mix(ids ^ inner[:, None]) + outer[:, None]) & _MASK)


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, of the shape of `ids`; always finite. keys: `noise_keys`.

    argmax(logits + noise) over ids is a draw from softmax(logits) (Gumbel 1954).
    """
    bits = uniform_bits(keys, ids)
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


# The top-k and top-p threshold of a row of logits: the smallest kept value, not a set of ids. Tokens that tie with that
# value are all kept, so the answer does not depend on how a sort breaks ties.

_FIRST_CANDIDATES = 1024
"""A top-p set is looked for among this many tokens before everything is sorted."""


def kept_threshold(logits: torch.Tensor, top_k: Int64Array, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit that top-k (0: all), then top-p keep in each row: float32 [rows].

    logits float32 [rows, vocab], top_p float32 [rows] on their device.
    """
    limited, unlimited = np.flatnonzero(top_k), np.flatnonzero(top_k == 0)
    if not unlimited.size:
        return _of_largest(logits, top_k, top_p)
    if not limited.size:
        return _by_sorting(logits, top_p)
    least = logits.new_empty(logits.shape[0])
    for chosen in (limited, unlimited):
        index = upload(chosen, logits.device)
        part = (logits[index], top_p[index])
        found = _of_largest(part[0], top_k[chosen], part[1]) if chosen is limited else _by_sorting(*part)
        least = least.index_copy(0, index, found)
    return least


def _of_largest(logits: torch.Tensor, top_k: Int64Array, top_p: torch.Tensor) -> torch.Tensor:
    """Thresholds of top-p over the tokens that top-k left."""
    width = min(int(top_k.max()), logits.shape[-1])
    values = logits.topk(width, dim=-1).values
    limits = upload(top_k, logits.device)
    values = values.masked_fill(torch.arange(width, device=logits.device) >= limits[:, None], float("-inf"))
    return _top_p_threshold(values, torch.logsumexp(values, dim=-1), top_p)[0]


def _by_sorting(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Find the threshold of top-p alone. Looks at what a first try gave; a GPU without kernels has to wait for it."""
    totals = torch.logsumexp(logits, dim=-1)
    width = min(_FIRST_CANDIDATES, logits.shape[-1])
    least, reached = _top_p_threshold(logits.topk(width, dim=-1).values, totals, top_p)
    short = reached < top_p
    if width < logits.shape[-1] and bool(short.any()):
        index = torch.nonzero(short)[:, 0]
        values = logits[index].sort(dim=-1, descending=True).values
        least = least.index_copy(0, index, _top_p_threshold(values, totals[index], top_p[index])[0])
    return least


def _top_p_threshold(
    values: torch.Tensor, totals: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest value of the smallest set of `values` (descending, [rows, n]) whose probability reaches `top_p`.

    Also the probability of all of them. `totals` [rows] is the logarithm that normalises; -inf values do not count.
    """
    probabilities = torch.exp(values - totals[:, None])
    running = probabilities.cumsum(dim=-1)
    outside = (running - probabilities >= top_p[:, None]) | torch.isneginf(values)
    outside[:, 0] = False
    return values.masked_fill(outside, float("inf")).amin(dim=-1), running[:, -1]
