"""The choice of experts in Triton, by its interpreter: those of torch's operations, also of equal and odd numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncengine.execution.layers.routing import RouterConfig, route
from asyncengine.kernels.cuda import grouped_experts as kernels

PLAIN = RouterConfig(24, 4)
CONFIGS = {
    "softmax": PLAIN, "own weights": replace(PLAIN, normalised=False, scale=2.5), "one": RouterConfig(9, 1, "sigmoid"),
    "sigmoid": replace(PLAIN, scores="sigmoid", least_sum=1e-20, scale=0.3), "all": RouterConfig(5, 5),
    "many": RouterConfig(128, 8), "least sum": replace(PLAIN, scores="sigmoid", least_sum=3.5),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "vectors", "more"),
    [("softmax", False, 0), ("softmax", True, 1), ("own weights", True, 0), ("one", False, 1), ("sigmoid", True, 0),
     ("sigmoid", False, 1), ("all", True, 1), ("many", False, 0), ("many", True, 1), ("least sum", False, 0)],
)  # fmt: skip
def test_chooses_as_torch(name: str, vectors: bool, more: int) -> None:
    config = CONFIGS[name]
    generator = torch.Generator().manual_seed(config.experts)
    logits = torch.randn(17, config.experts + more, generator=generator)
    logits[:, config.experts :] = 100.0  # no expert's
    logits[3, : config.experts] = 1.0
    logits[4, :2] = logits[4].max() + 1
    correction = torch.randn(config.experts, generator=generator) if vectors else None
    by_expert = torch.rand(config.experts, generator=generator) if vectors else None
    ids, weights = kernels.route(logits, correction, by_expert, config)
    wanted, expected = route(logits[:, : config.experts], correction, by_expert, config)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_rows_without_numbers_choose_some_expert_and_spoil_no_other() -> None:
    logits = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    wanted = kernels.route(logits, None, None, PLAIN)
    logits[1] = torch.nan
    ids, weights = kernels.route(logits, None, None, PLAIN)
    assert bool(((ids >= 0) & (ids < 24)).all())
    for found, expected in zip((ids, weights), wanted, strict=True):
        assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert kernels.route(logits[:0], None, None, PLAIN)[0].shape == (0, 4)
