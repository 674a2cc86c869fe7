"""Grouped experts on a real GPU: near a float64 reference, the same in a CUDA graph, and as the loop over experts."""

from __future__ import annotations

import pytest
import torch
from support.forwards import relative_error
from support.grouped_experts import ERROR, make_mixture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [
    (1, 1, 2, 16, 8), (1, 8, 16, 2048, 768), (5, 3, 7, 64, 33), (16, 8, 128, 256, 192), (70, 2, 5, 136, 72),
    (300, 2, 3, 320, 448),
]  # fmt: skip


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "count", "experts", "width", "inner"), SHAPES)
def test_near_the_exact_sum(
    rows: int, count: int, experts: int, width: int, inner: int, dtype: torch.dtype, bounded: bool
) -> None:
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
