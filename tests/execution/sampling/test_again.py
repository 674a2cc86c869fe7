"""Tokens that stand in for a drawn one: another draw, of the same distribution and from the same random numbers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from asyncengine.execution.sampling.sampler import MOST, drawn_again
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams

LOGITS = torch.tensor([1.0, -math.inf, 3.0, 2.0, 2.5, -1.0])


def spec(seed: int = 0, **params: Any) -> RequestSpec:
    return RequestSpec(1, (1, 2, 3), SamplingParams(**params), 64, seed=seed)


def test_a_greedy_request_takes_the_likeliest_that_is_allowed() -> None:
    assert drawn_again(LOGITS, spec(temperature=0), 5) == [2, 4, 3, 0, 5]
    many = torch.zeros(500)
    assert drawn_again(many.index_fill(0, torch.tensor([70]), 1.0), spec(temperature=0), 5)[0] == 70
    assert len(drawn_again(many, spec(temperature=0), 5)) == MOST


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.5}])
def test_what_truncation_leaves_out_comes_last(cut: dict[str, Any]) -> None:
    firsts = set()
    for seed in range(60):
        found = drawn_again(LOGITS, spec(seed, **cut), 3)
        assert sorted(found[:2]) == [2, 4]
        assert found[2:] == [3, 0, 5]
        firsts.add(found[0])
    assert firsts == {2, 4}


def test_the_order_is_that_of_draws_without_replacement_and_depends_on_seed_and_position_alone() -> None:
    temperature, count = 0.8, 4000
    found = [drawn_again(LOGITS, spec(seed, temperature=temperature), seed % 7) for seed in range(count)]
    assert found[0] == drawn_again(LOGITS, spec(0, temperature=temperature), 0)
    shares = torch.softmax(LOGITS / temperature, dim=0)
    firsts = Counter(ids[0] for ids in found)
    for token, share in enumerate(shares.tolist()):
        assert abs(firsts[token] / count - share) < 4 * math.sqrt(share * (1 - share) / count) + 1e-9
    others = Counter(ids[1] for ids in found if ids[0] == 2)
    rest = shares.index_fill(0, torch.tensor([2]), 0.0)
    for token, share in enumerate((rest / rest.sum()).tolist()):
        assert abs(others[token] / firsts[2] - share) < 4 * math.sqrt(share * (1 - share) / firsts[2]) + 1e-9
