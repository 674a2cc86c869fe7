"""Sampling for GPUs, in Triton's interpreter, against the CPU's: the same tokens from the same noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.device_sampling import SETTINGS, by_cpu, by_kernels, device_sampler, rows_of

from asyncengine.kernels.cuda import row_sampler as module

CPU = torch.device("cpu")


def random_logits(rows: int, vocab: int, scale: float = 2.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn((rows, vocab), generator=torch.Generator().manual_seed(vocab)) * scale).to(dtype)


@pytest.mark.parametrize(("vocab", "dtype"), [(7, torch.float32), (513, torch.float16), (1100, torch.bfloat16)])
def test_the_tokens_are_those_of_the_cpu(vocab: int, dtype: torch.dtype) -> None:
    rows = rows_of(len(SETTINGS) if vocab > 1000 else len(SETTINGS) // 2, SETTINGS[vocab % 2 :: 1 + (vocab < 1000)])
    logits = random_logits(len(rows), vocab, dtype=dtype)
    logits[::5, : vocab // 2] = float("-inf")
    tokens, best = by_kernels(device_sampler(rows, vocab, CPU), rows, logits)
    wanted, largest = by_cpu(rows, logits)
    assert tokens.tolist() == wanted.tolist()
    assert torch.equal(best, largest)


def test_ties_are_kept_together() -> None:
    settings: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 40, "top_p": 0.3}, {"temperature": 0.0}]
    rows = rows_of(8, settings)
    logits = (random_logits(8, 1100) * 2).round() / 2
    logits[4:] = 3.0
    tokens, _ = by_kernels(device_sampler(rows, 1100, CPU), rows, logits)
    assert tokens.tolist() == by_cpu(rows, logits)[0].tolist()


def test_more_candidates_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits of the row are read again."""
    rows = rows_of(3, [{"top_k": 300}, {"top_p": 0.8}, {"top_k": 300, "top_p": 0.8}])
    logits = random_logits(3, 1100)
    wanted = by_kernels(device_sampler(rows, 1100, CPU), rows, logits)
    monkeypatch.setattr(module, "_ROOM", 16)
    monkeypatch.setattr(module, "_NARROWINGS", 1)
    found = by_kernels(device_sampler(rows, 1100, CPU), rows, logits)
    assert found[0].tolist() == wanted[0].tolist() == by_cpu(rows, logits)[0].tolist()


def test_a_row_does_not_depend_on_its_neighbours_or_its_slot() -> None:
    rows = rows_of(len(SETTINGS))[4:16:3]
    logits = random_logits(len(rows), 600, dtype=torch.bfloat16)
    together, _ = by_kernels(device_sampler(rows, 600, CPU), rows, logits)
    in_parts, _ = by_kernels(device_sampler(rows, 600, CPU, most=3), rows, logits)
    moved = [row._replace(slot=20 - row.slot) for row in rows][::-1]
    backwards, _ = by_kernels(device_sampler(moved, 600, CPU), moved, logits.flip(0))
    assert together.tolist() == in_parts.tolist() == backwards.tolist()[::-1]


def test_rows_without_a_token_say_so_and_harm_nobody() -> None:
    """Each kind has two rows, of which one has a NaN, nothing but -inf, or an inf."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}]
    rows = rows_of(10, kinds)
    logits = random_logits(10, 600)
    sampler = device_sampler(rows, 600, CPU)
    right, _ = by_kernels(sampler, rows, logits)
    for row in (0, 3):
        logits[row, 599], logits[row + 1] = float("nan"), float("-inf")
    logits[2, 3] = float("inf")
    tokens, best = by_kernels(sampler, rows, logits)
    assert [math.isfinite(value) for value in best.tolist()] == [False] * 5 + [True] * 5
    assert best[[1, 4]].tolist() == [float("-inf")] * 2
    assert tokens.tolist() == [0] * 5 + right[5:].tolist()


def test_the_slot_of_padding_is_greedy() -> None:
    rows = rows_of(2)
    logits = random_logits(2, 600)
    sampler = device_sampler(rows, 600, CPU)
    padding = [row._replace(slot=2) for row in rows]
    assert by_kernels(sampler, padding, logits)[0].tolist() == logits.argmax(dim=1).tolist()
