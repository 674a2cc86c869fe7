"""Grouped experts on a real GPU: near a float64 reference, the same in a CUDA graph, and as the loop over experts."""

from __future__ import annotations

import pytest
import torch
from support.forwards import relative_error
from support.grouped_experts import ERROR, make_mixture

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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mixture.by_kernels()
    mixture.chosen.copy_(chosen)
    graph.replay()
    assert torch.equal(found, expected)
