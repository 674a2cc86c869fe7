"""The top-k and top-p threshold of a row of logits: the smallest kept value, not a set of ids.

Tokens that tie with that value are all kept, so the answer does not depend on how a sort breaks ties.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncengine.execution.device.transfer import Int64Array, upload

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
