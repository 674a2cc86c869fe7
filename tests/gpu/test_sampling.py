"""The sampling kernels compiled, for real vocabularies: what gpucheck does not compare with the CPU."""

from __future__ import annotations

import pytest
import torch
from support.device_sampling import by_cpu, by_kernels, device_sampler, rows_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
VOCAB = 151_936


def flat_logits(rows: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn((rows, VOCAB), device="cuda").to(dtype)


def test_the_same_in_a_graph_again_and_again_and_in_any_company() -> None:
    rows = rows_of(64)
    logits = flat_logits(64, torch.bfloat16)
    sampler = device_sampler(rows, VOCAB, logits.device)
    wanted, _ = by_kernels(sampler, rows, logits)
    slots, positions = torch.arange(64, device="cuda"), torch.arange(2, 66, device="cuda")
    tokens, best = torch.zeros(64, dtype=torch.int64, device="cuda"), torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample(logits, slots, positions, tokens, best)
    for _ in range(5):
        tokens.fill_(-1)
        graph.replay()
        assert tokens.tolist() == wanted.tolist()
    alone = [by_kernels(sampler, [row], logits[row.slot : row.slot + 1])[0].item() for row in rows]
    assert alone == wanted.tolist()


def test_rows_that_no_bracket_helps() -> None:
    """More candidates than there is room for: nearly all logits the same, or a top-k of half the vocabulary."""
    rows = rows_of(6, [{"top_k": 80_000}, {"top_p": 0.5}, {"top_k": 80_000, "top_p": 0.5}])
    logits = (flat_logits(6, torch.float32) * 3).round() / 3
    tokens, _ = by_kernels(device_sampler(rows, VOCAB, logits.device), rows, logits)
    assert tokens.tolist() == by_cpu(rows, logits)[0].tolist()
