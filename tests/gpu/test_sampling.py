"""The sampling kernels compiled, for real vocabularies: the CPU's tokens, unless rounding may have chosen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.device_sampling import SETTINGS, by_cpu, by_kernels, device_sampler, rows_of

from asyncengine.sampling.masks import FilledMasks
from asyncengine.sampling.noise import gumbel, noise_keys
from asyncengine.sampling.sampler import Sampler
from asyncengine.sampling.top_p import kept_threshold
from asyncengine.step import Row

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
VOCAB = 151_936
BLOCK = 512


def logits_of(kind: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(rows)
    if kind == "flat":
        return torch.randn((rows, VOCAB), device="cuda").to(dtype)
    ranks = torch.rand((rows, VOCAB), device="cuda").argsort(dim=1) + 1
    return (20 - 1.5 * torch.log(ranks.float())).to(dtype)


def gap(row: Row, logits: torch.Tensor, tokens: list[int]) -> float:
    """How far two tokens, of which the device chose one and the CPU the other, are apart before the choice."""
    params, seed = row.spec.params, row.spec.seed
    assert params.temperature, "greedy rows never differ"
    scaled = logits.float().cpu() / params.temperature
    limits = kept_threshold(scaled[None], np.array([params.top_k]), torch.tensor([params.top_p]))
    least = max(limits.item(), scaled.max().item() + math.log(max(params.min_p, 1e-37)))
    kept = scaled.double().masked_fill(scaled < least - 1e-6, float("-inf"))
    position = row.start + row.num_scheduled
    keys = noise_keys(*(np.array([number]) for number in (seed & 0xFFFFFFFF, seed >> 32, position)))
    blocks, ids = torch.tensor(tokens) // BLOCK, torch.tensor(tokens)
    if blocks[0] != blocks[1]:
        ids, kept = blocks | 1 << 31, torch.stack([kept[block * BLOCK :][:BLOCK].logsumexp(0) for block in blocks])
    else:
        kept = kept[ids]
    scores = kept + gumbel(torch.from_numpy(keys), ids[None])[0]
    return float((scores[0] - scores[1]).abs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["flat", "peaked"])
def test_the_tokens_are_those_of_the_cpu(kind: str, dtype: torch.dtype) -> None:
    rows = rows_of(16 * len(SETTINGS))
    logits = logits_of(kind, len(rows), dtype)
    tokens, best = by_kernels(device_sampler(rows, VOCAB, logits.device, len(rows)), rows, logits)
    wanted, largest = by_cpu(rows, logits)
    assert torch.equal(best, largest)
    differ = (tokens != wanted).nonzero()[:, 0].tolist()
    far = {
        row: (tokens[row].item(), wanted[row].item(), apart)
        for row in differ
        if (apart := gap(rows[row], logits[row], [tokens[row].item(), wanted[row].item()])) > 1e-3
    }
    assert len(differ) <= 3, (differ, [rows[row].spec.params for row in differ])
    assert not far


def test_the_same_in_a_graph_again_and_again_and_in_any_company() -> None:
    rows = rows_of(64)
    logits = logits_of("flat", 64, torch.bfloat16)
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
    logits = (logits_of("flat", 6, torch.float32) * 3).round() / 3
    tokens, _ = by_kernels(device_sampler(rows, VOCAB, logits.device), rows, logits)
    assert tokens.tolist() == by_cpu(rows, logits)[0].tolist()


def test_penalties_bias_and_masks() -> None:
    settings = [{"repetition_penalty": 1.5}, {"presence_penalty": 2.0, "logit_bias": {7: 30.0}}, {}, {"top_k": 5}]
    rows = rows_of(12, [{"temperature": 0.0, **fields} for fields in settings])
    logits = logits_of("flat", 12, torch.float32)
    logits[:, 1] += 9.0  # what each row has seen, its own last token, too
    words = torch.randint(-(2**31), 2**31, (6, -(-VOCAB // 32))).to(torch.int32)
    masks = FilledMasks([0, 1, 3, 4, 7, 11], words | 2, {}, [])
    last = torch.randint(VOCAB, (12,))
    found, wanted = (
        Sampler(12, VOCAB, device).sample(rows, logits.to(device), masks, last.to(device))
        for device in (logits.device, torch.device("cpu"))
    )
    assert found.tokens.tolist() == wanted.tokens.tolist()
    torch.testing.assert_close(found.best.cpu(), wanted.best, rtol=1e-5, atol=1e-5)
    assert not torch.equal(wanted.best, logits.amax(dim=1).cpu())
