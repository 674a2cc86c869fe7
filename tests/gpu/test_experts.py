"""Grouped experts on a real GPU: near a float64 reference, the same in a CUDA graph, and as the loop over experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.engines import captured
from support.forwards import relative_error
from support.grouped_experts import ERROR, make_mixture

from asyncengine.execution.layers.routing import RouterConfig, route

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

HALF = torch.bfloat16
CASES = [
    ((1, 1, 2, 16, 8), HALF, False), ((1, 8, 16, 2048, 768), HALF, False), ((5, 3, 7, 64, 33), HALF, True),
    ((16, 8, 128, 256, 192), HALF, False), ((70, 2, 5, 136, 72), HALF, False), ((300, 2, 3, 320, 448), HALF, False),
    ((300, 2, 3, 320, 448), torch.float16, True), ((5, 3, 7, 64, 33), torch.float32, False),
    ((70, 2, 5, 136, 72), torch.float32, True), ((300, 2, 3, 320, 448), torch.float32, False),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype", "bounded"), CASES)
def test_near_the_exact_sum(shape: tuple[int, ...], dtype: torch.dtype, bounded: bool) -> None:
    """Shapes are (rows, chosen, experts, width, inner)."""
    rows, count, experts, width, inner = shape
    mixture = make_mixture(rows, count, experts, width, inner, dtype, "cuda", bounded=bounded)
    found = mixture.by_kernels()
    assert found.dtype == dtype
    assert relative_error(mixture.exactly().cpu(), found.cpu()) < ERROR[dtype]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "count"), [(128, 8), (9, 2)])
def test_chooses_as_torch(experts: int, count: int, scores: Any) -> None:
    from asyncengine.kernels.cuda import grouped_experts as kernels

    config = RouterConfig(experts, count, scores, normalised=scores == "softmax", scale=1.5)
    logits = torch.randn(300, experts + 1, generator=torch.Generator().manual_seed(1)).cuda()
    logits[3, :experts] = 1.0
    vectors = (None, None) if scores == "softmax" else torch.rand(2, experts).cuda().unbind()
    ids, weights = kernels.route(logits, *vectors, config)
    wanted, expected = route(logits[:, :experts], *vectors, config)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    logits[:] = torch.nan
    assert int(kernels.route(logits, *vectors, config)[0].max()) < experts


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_graph_holds_any_choice(rows: int) -> None:
    """It is captured with all rows at one expert, and replayed with rows that chose at random."""
    mixture = make_mixture(rows, 4, 16, 256, 128, torch.bfloat16, "cuda", bounded=False)
    expected, chosen = mixture.by_kernels(), mixture.chosen.clone()
    mixture.chosen.copy_(torch.arange(4, device="cuda").expand(rows, 4))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mixture.by_kernels()
    torch.cuda.current_stream().wait_stream(stream)
    graph, found = captured(mixture.by_kernels)
    mixture.chosen.copy_(chosen)
    graph.replay()
    assert torch.equal(found, expected)
