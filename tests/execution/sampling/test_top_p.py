"""The end of a top-p set, found by torch's operations and by the kernels for GPUs, against its definition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.device_sampling import by_kernels as tokens_by_kernels
from support.device_sampling import device_sampler, rows_of
from support.long import LONG

from asyncengine.execution.sampling.sampler import _by_sorting, kept_threshold
from asyncengine.kernels.cuda.sampling import _LEAST

VOCAB = 3000
Search = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rows() -> torch.Tensor:
    """float32 [9, VOCAB] of all kinds."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn((4, VOCAB), generator=generator)
    masked = normal[0].masked_fill(torch.rand(VOCAB, generator=generator) < 0.99, float("-inf"))
    zeros = torch.where(torch.rand(VOCAB, generator=generator) < 0.5, 0.0, -0.0)
    peak = torch.full((VOCAB,), -30.0).index_fill(0, torch.tensor([7]), 30.0)
    ties = (normal[1] * 2).bfloat16().float()
    return torch.stack([normal[0], normal[1] * 8, normal[2] * 0.01, normal[3] - 1000, masked, zeros, peak, ties, ties])


def by_kernels(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    settings = [{"top_p": share} for share in top_p.tolist()]
    asked = rows_of(len(logits), settings)
    sampler = device_sampler(asked, VOCAB, logits.device)
    tokens_by_kernels(sampler, asked, logits)
    return sampler.states[: len(logits), _LEAST.value].clone()


def assert_is_the_threshold(logits: torch.Tensor, least: torch.Tensor, top_p: torch.Tensor) -> None:
    shares = torch.softmax(logits.double(), dim=-1)
    above = shares.masked_fill(logits <= least[:, None], 0).sum(dim=-1)
    kept = shares.masked_fill(logits < least[:, None], 0).sum(dim=-1)
    assert (logits == least[:, None]).any(dim=-1).all(), "it is one of the row's logits"
    # a logit near -1000 has an error of 6e-5 in float32, and so has its share
    assert (above < top_p + 3e-4).all()
    assert (kept > top_p - 3e-4).all()


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels are compiled: tests/gpu")


SHARES = (1e-6, 0.05, 0.5, 0.9, 0.999, 0.9999999)


@pytest.mark.parametrize("shift", range(len(SHARES)))
def test_the_smallest_set_that_reaches_top_p(shift: int) -> None:
    check(_by_sorting, shift)


@interpreted
@pytest.mark.parametrize("shift", range(len(SHARES)) if LONG else [2])
def test_kernels_find_the_smallest_set(shift: int) -> None:
    check(by_kernels, shift)


def check(search: Search, shift: int) -> None:
    """Rows of all kinds, each with another share."""
    logits = rows()
    top_p = torch.tensor([SHARES[(row + shift) % len(SHARES)] for row in range(len(logits))])
    assert_is_the_threshold(logits, search(logits, top_p), top_p)


def test_rows_with_and_without_top_k_share_a_step() -> None:
    logits = torch.cat([rows()[:2], rows()[:2]])
    top_k, top_p = np.array([0, 5, 3, 0]), torch.tensor([0.6, 1.0, 0.9, 0.3])
    least = kept_threshold(logits, top_k, top_p)
    assert torch.equal(least[0], kept_threshold(logits[:1], top_k[:1], top_p[:1])[0])
    assert least[1] == logits[1].topk(5).values[-1]
    assert torch.equal(least[2], kept_threshold(logits[2:3], top_k[2:3], top_p[2:3])[0])
    assert torch.equal(least[3], _by_sorting(logits[3:], top_p[3:])[0])
