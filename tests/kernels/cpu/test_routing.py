"""Choosing experts: the compiled form is torch's, equal scores go to the first, and each row is for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.data import cases_of

from asyncengine.execution.layers.routing import RouterConfig, route
from asyncengine.kernels.cpu import routing

FORMS: dict[str, dict[str, Any]] = cases_of(__file__)
EXPERTS = 16


def both(form: str, logits: torch.Tensor, chosen: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The routes by torch and by the kernel."""
    config = RouterConfig(EXPERTS, chosen, **FORMS[form])
    generator = torch.Generator().manual_seed(1)
    correction = 0.3 * torch.randn(EXPERTS, generator=generator) if config.correction else None
    factors = torch.rand(EXPERTS, generator=generator) if config.by_expert else None
    settings = routing.RouteSettings(
        EXPERTS, chosen, config.scores == "sigmoid", config.groups, config.groups_kept, config.normalised,
        config.least_sum, config.scale, config.spread if config.scores == "sparsemixer" else -1.0,
        config.groups_by_best,
    )  # fmt: skip
    wider = torch.nn.functional.pad(logits, (0, 3), value=99.0)  # the last columns are no experts'
    return [route(logits, correction, factors, config), routing.route(wider, correction, factors, settings)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [0, 1, 7, 700])
def test_equals_torch(form: str, rows: int) -> None:
    """700 rows are so many that the interpreter's lock is let go of."""
    logits = 2 * torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(rows))
    (ids, weights), (own, its_weights) = both(form, logits)
    assert torch.equal(ids, own)
    torch.testing.assert_close(its_weights, weights, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_for_itself(form: str) -> None:
    logits = torch.randn(9, EXPERTS)
    together = both(form, logits)[1]
    for row in range(9):
        for whole, part in zip(together, both(form, logits[row : row + 1].clone())[1], strict=True):
            assert torch.equal(whole[row : row + 1], part)


def test_of_equal_scores_the_first() -> None:
    logits = torch.zeros(2, EXPERTS)
    logits[1, [4, 9, 12]] = 1.0
    for ids, _ in both("softmax", logits):
        assert ids.tolist() == [[0, 1, 2], [4, 9, 12]]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_chooses_experts_there_are(form: str) -> None:
    """Each once, and weights say so; other rows do not notice."""
    logits = torch.randn(3, EXPERTS)
    expected = both(form, logits)[1]
    logits[1] = torch.nan
    for ids, weights in both(form, logits):
        assert len(set(ids[1].tolist())) == 3
        assert 0 <= int(ids.min()) <= int(ids.max()) < EXPERTS
        assert not weights[1].isfinite().any()
    assert torch.equal(ids[0], expected[0][0])
    assert torch.equal(weights[2], expected[1][2])


def test_sparsemixer() -> None:
    """The share of the best among those near it; then of the next without it."""
    config = RouterConfig(4, 2, "sparsemixer", spread=0.1)
    logits = torch.tensor([[1.0, 0.9, 0.2, -3.0]])
    settings = routing.RouteSettings(4, 2, False, 1, 1, True, 0.0, 1.0, spread=0.1)
    share = float(torch.tensor([1.0, 0.9]).softmax(0)[0])
    for ids, weights in (route(logits, None, None, config), routing.route(logits, None, None, settings)):
        assert ids.tolist() == [[0, 1]]
        assert weights[0].tolist() == pytest.approx([share, 1.0])
