"""The top-k and top-p threshold of a row of logits: the smallest kept value, not a set of ids.

Tokens that tie with that value are all kept, so the answer does not depend on how a sort breaks ties.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.device.pinned import Int64Array
from asyncengine.device.transfer import upload

_FIRST_CANDIDATES = 1024
"""A top-p set is looked for among this many tokens before everything is sorted."""
_DIGIT = 16
"""Bits of a logit looked at in one pass over it."""
_MASS = 2**40
"""Probability 1 in fixed point: sums of whole numbers are the same in any order, also with atomic additions."""
_PASS_ELEMENTS = 2**23
"""Logits looked at together; bounds the working memory at some 200 MB."""


def kept_threshold(logits: torch.Tensor, top_k: Int64Array, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit that top-k (0: all), then top-p keep in each row: float32 [rows].

    logits float32 [rows, vocab], top_p float32 [rows] on their device. On a GPU nothing here waits for the device.
    """
    limited, unlimited = np.flatnonzero(top_k), np.flatnonzero(top_k == 0)
    if not unlimited.size:
        return _of_largest(logits, top_k, top_p)
    search = _by_sorting if logits.device.type == "cpu" else by_digits
    if not limited.size:
        return search(logits, top_p)
    least = logits.new_empty(logits.shape[0])
    for chosen, find in ((limited, None), (unlimited, search)):
        index = upload(chosen, logits.device)
        part = (logits[index], top_p[index])
        found = _of_largest(part[0], top_k[chosen], part[1]) if find is None else find(*part)
        least = least.index_copy(0, index, found)
    return least


def _of_largest(logits: torch.Tensor, top_k: Int64Array, top_p: torch.Tensor) -> torch.Tensor:
    """Of top-p over what top-k left."""
    width = min(int(top_k.max()), logits.shape[-1])
    values = logits.topk(width, dim=-1).values
    limits = upload(top_k, logits.device)
    values = values.masked_fill(torch.arange(width, device=logits.device) >= limits[:, None], float("-inf"))
    return _top_p_threshold(values, torch.logsumexp(values, dim=-1), top_p)[0]


def _by_sorting(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Of top-p alone. Looks at the result of a first try, which costs nothing on a CPU."""
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


def by_digits(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Of top-p alone, by radix selection: the probabilities are summed by the upper half of the logits' bits, which
    says in which of 65,536 bins the top-p set ends, then by the lower half of those in that bin.

    A fixed number of passes whatever the distribution, so that the host need not know how it went.
    """
    rows = max(_PASS_ELEMENTS // logits.shape[-1], 1)
    parts = zip(torch.split(logits, rows), torch.split(top_p, rows), strict=True)
    return torch.cat([_by_digits(part, share) for part, share in parts])


def _by_digits(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    logits = logits + 0.0  # -0.0 and 0.0 are one value with two patterns
    shares = torch.softmax(logits, dim=-1).nan_to_num_(0.0)  # a row without a finite logit has no token anyway
    masses = (shares * _MASS).to(torch.int64)
    wanted = (top_p.double() * _MASS).to(torch.int64)
    # rounding may leave all of them together short of the whole
    wanted = torch.minimum(wanted, masses.sum(dim=-1)).clamp_(min=1)
    bits = logits.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) + 2**31  # in the order of the values, from 0
    upper, lower = ordered >> _DIGIT, ordered & (2**_DIGIT - 1)
    end, above = _bin_of(upper, masses, wanted)
    inside = masses.masked_fill_(upper != end[:, None], 0)
    last, _ = _bin_of(lower, inside, wanted - above)
    key = ((end << _DIGIT) | last) - 2**31
    found = key.to(torch.int32)
    return (found ^ ((found >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _bin_of(digits: torch.Tensor, masses: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bin in which the mass, summed from the top, reaches `wanted` [rows]; and the mass of all bins above it."""
    sums = masses.new_zeros((digits.shape[0], 2**_DIGIT)).scatter_add_(1, digits, masses)
    from_top = sums.flip(1).cumsum(dim=1)
    place = torch.searchsorted(from_top, wanted[:, None]).clamp_(max=2**_DIGIT - 1)
    above = from_top.gather(1, place) - sums.flip(1).gather(1, place)
    return 2**_DIGIT - 1 - place[:, 0], above[:, 0]
