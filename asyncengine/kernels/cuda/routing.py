"""The choice of experts from a row's logits, and their weights, in one launch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, by_expert: torch.Tensor | None, config: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `layers.routing.route` does, of a softmax or a sigmoid and of experts in one group; `logits` may have
    more columns than there are experts. `config`: a `layers.routing.RouterConfig`."""
    rows, count = len(logits), config.chosen
    chosen = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    weights = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    if rows:
        _route[(rows,)](
            logits, logits if correction is None else correction, logits if by_expert is None else by_expert, chosen,
            weights, logits.stride(0), config.scale, config.least_sum, config.experts,
            triton.next_power_of_2(config.experts), count, triton.next_power_of_2(count), config.scores == "sigmoid",
            correction is not None, by_expert is not None, config.normalised,
        )  # fmt: skip
    return chosen, weights


@triton.jit
def _route(
    logits, correction, by_expert, chosen, weights, stride, scale, least, experts: tl.constexpr, width: tl.constexpr,
    count: tl.constexpr, places: tl.constexpr, sigmoid: tl.constexpr, corrected: tl.constexpr, factors: tl.constexpr,
    normalised: tl.constexpr,
):  # fmt: skip
    """One program for each row, which takes the best expert, then the best of the others, and so on."""
    row = tl.program_id(0).to(tl.int64)
    each, place = tl.arange(0, width), tl.arange(0, places)
    inside = each < experts
    numbers = tl.load(logits + row * stride + each, mask=inside, other=-float("inf")).to(tl.float32)
    if sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-numbers))
    else:
        scores = tl.exp(numbers - tl.max(numbers, 0))
        scores = scores / tl.sum(scores, 0)
    left = scores
    if corrected:
        left += tl.load(correction + each, mask=inside, other=0.0)
    left = tl.where(inside, left, -float("inf"))
    ids = tl.zeros((places,), dtype=tl.int32)
    own = tl.zeros((places,), dtype=tl.float32)
    for turn in range(count):
        best = tl.minimum(tl.argmax(left, 0), experts - 1)  # of numbers that are none, any expert there is
        ids = tl.where(place == turn, best, ids)
        own = tl.where(place == turn, tl.sum(tl.where(each == best, scores, 0.0), 0), own)
        left = tl.where(each == best, -float("inf"), left)
    if normalised:
        own = own / tl.maximum(tl.sum(own, 0), least)
    own = own * scale
    if factors:
        own = own * tl.load(by_expert + ids)
    tl.store(chosen + row * count + place, ids.to(tl.int64), mask=place < count)
    tl.store(weights + row * count + place, own, mask=place < count)
