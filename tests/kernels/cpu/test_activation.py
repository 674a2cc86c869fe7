"""Gated activations by compiled kernels: torch's numbers over all there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.teams import team_of
from torch.nn.functional import gelu, silu

from asyncengine.kernels.cpu.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul

Function = Callable[[torch.Tensor], torch.Tensor]
FORMS = [(silu_and_mul, silu), (gelu_tanh_and_mul, partial(gelu, approximate="tanh")), (gelu_and_mul, gelu)]
NAMES = ["silu", "gelu_tanh", "gelu"]


@pytest.mark.parametrize(("gated", "activation"), FORMS, ids=NAMES)
def test_accuracy_over_the_whole_range(gated: Function, activation: Function) -> None:
    x = torch.cat((torch.linspace(-120, 120, 40001), torch.linspace(-1, 1, 40001), torch.tensor([1e30, -1e30, 0.0])))
    found = gated(torch.stack((x, torch.ones_like(x))).reshape(1, -1))[0]
    expected = activation(x.double())
    error = (found.double() - expected).abs()
    assert float((error / expected.abs().clamp(min=1.0)).max()) < 3e-7


def test_silu_keeps_its_relative_accuracy() -> None:
    x = torch.linspace(-30, 30, 60001)
    found = silu_and_mul(torch.stack((x, torch.ones_like(x))).reshape(1, -1))[0].double()
    expected = silu(x.double())
    assert float(((found - expected).abs() / expected.abs().clamp(min=1e-30)).max()) < 4e-7


@pytest.mark.parametrize("gated", [form for form, _ in FORMS], ids=NAMES)
def test_what_is_not_finite_shows(gated: Function) -> None:
    both = torch.zeros(4, 2)
    both[:, 1] = 1.0
    both[0, 0], both[1, 1], both[2, 0] = float("nan"), float("inf"), 1.0
    both[1, 0] = 1.0
    assert torch.isfinite(gated(both)).flatten().tolist() == [False, False, True, True]


@pytest.mark.parametrize("gated", [form for form, _ in FORMS], ids=NAMES)
def test_a_row_s_result_is_its_own(gated: Function) -> None:
    """Bit for bit, alone and among others, by one thread and by two."""
    both = torch.randn(33, 1030)
    expected = gated(both)
    for count in (1, 2, 3):
        with team_of(count) as team:
            assert torch.equal(gated(both), expected)
            assert (team.account.pieces > 1) == (count > 1)
            for row in (0, 16, 32):
                assert torch.equal(expected[row : row + 1], gated(both[row : row + 1]))
