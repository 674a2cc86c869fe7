"""Both ways to the end of a top-p set, by sorting (CPU) and by digits (GPU), against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncengine.sampling import top_p as top_p_module
from asyncengine.sampling.top_p import kept_threshold

VOCAB = 3000


def rows() -> torch.Tensor:
    """float32 [9, VOCAB] of all kinds."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn((4, VOCAB), generator=generator)
    masked = normal[0].masked_fill(torch.rand(VOCAB, generator=generator) < 0.99, float("-inf"))
    zeros = torch.where(torch.rand(VOCAB, generator=generator) < 0.5, 0.0, -0.0)
    peak = torch.full((VOCAB,), -30.0).index_fill(0, torch.tensor([7]), 30.0)
    ties = (normal[1] * 2).bfloat16().float()
    return torch.stack([normal[0], normal[1] * 8, normal[2] * 0.01, normal[3] - 1000, masked, zeros, peak, ties, ties])


def assert_is_the_threshold(logits: torch.Tensor, least: torch.Tensor, top_p: torch.Tensor) -> None:
    shares = torch.softmax(logits.double(), dim=-1)
    above = shares.masked_fill(logits <= least[:, None], 0).sum(dim=-1)
    kept = shares.masked_fill(logits < least[:, None], 0).sum(dim=-1)
    assert (logits == least[:, None]).any(dim=-1).all(), "it is one of the row's logits"
    # a logit near -1000 has an error of 6e-5 in float32, and so has its share
    assert (above < top_p + 3e-4).all()
    assert (kept > top_p - 3e-4).all()


@pytest.mark.parametrize("search", [top_p_module._by_sorting, top_p_module.by_digits])
@pytest.mark.parametrize("share", [1e-6, 0.05, 0.5, 0.9, 0.999, 0.9999999])
def test_the_smallest_set_that_reaches_top_p(share: float, search: object) -> None:
    logits = rows()
    top_p = torch.full((len(logits),), share)
    assert_is_the_threshold(logits, search(logits, top_p), top_p)  # type: ignore[operator]


def test_both_ways_agree() -> None:
    logits = torch.randn((40, VOCAB), generator=torch.Generator().manual_seed(5)) * 3
    top_p = torch.rand(40, generator=torch.Generator().manual_seed(6))
    differ = top_p_module._by_sorting(logits, top_p) != top_p_module.by_digits(logits, top_p)
    assert differ.sum() <= 1, "but for rounding at the edge"


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, top_p = rows(), torch.full((9,), 0.8)
    together = top_p_module.by_digits(logits, top_p)
    monkeypatch.setattr(top_p_module, "_PASS_ELEMENTS", 2 * VOCAB + 1)
    assert torch.equal(top_p_module.by_digits(logits, top_p), together)


def test_rows_without_a_finite_logit_harm_nobody() -> None:
    logits = rows()[:4]
    alone = top_p_module.by_digits(logits, torch.full((4,), 0.7))
    logits[1], logits[2] = float("nan"), float("-inf")
    found = top_p_module.by_digits(logits, torch.full((4,), 0.7))
    assert torch.equal(found[[0, 3]], alone[[0, 3]])


def test_rows_with_and_without_top_k_share_a_step() -> None:
    logits = torch.cat([rows()[:2], rows()[:2]])
    top_k, top_p = np.array([0, 5, 3, 0]), torch.tensor([0.6, 1.0, 0.9, 0.3])
    least = kept_threshold(logits, top_k, top_p)
    assert torch.equal(least[0], kept_threshold(logits[:1], top_k[:1], top_p[:1])[0])
    assert least[1] == logits[1].topk(5).values[-1]
    assert torch.equal(least[2], kept_threshold(logits[2:3], top_k[2:3], top_p[2:3])[0])
    assert torch.equal(least[3], top_p_module._by_sorting(logits[3:], top_p[3:])[0])
