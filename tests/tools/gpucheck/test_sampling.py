"""Sampling held against itself: right samplers pass, however they compute, and one that forgets something fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncengine.execution.sampling.masks import FilledMasks
from asyncengine.execution.sampling.sampler import Sampled, Sampler
from asyncengine.step import Row
from tools.gpucheck import sampling
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.sampling import KINDS, check_kind

CPU = torch.device("cpu")
ROWS, VOCAB = 16, 4000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "VOCAB", VOCAB)
    monkeypatch.setattr(sampling, "ROWS", ROWS)


def make(device: torch.device) -> Sampler:
    return Sampler(ROWS, VOCAB, device)


class InTorch(Sampler):
    """A sampler that computes with torch's operations."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(ROWS, VOCAB, device)
        self._kernel = None


class Forgets(Sampler):
    """A sampler that forgets everything but the temperature."""

    def sample(self, rows: Sequence[Row], logits: torch.Tensor, _: FilledMasks, last: torch.Tensor) -> Sampled:
        kept = self.__dict__.setdefault("kept", {})
        plain = []
        for row in rows:
            neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
                       "frequency_penalty": 0.0, "logit_bias": {}, "min_tokens": 0}  # fmt: skip
            if row.slot not in kept:
                kept[row.slot] = replace(row.spec, params=row.spec.params.replace(**neutral))
            plain.append(row._replace(spec=kept[row.slot]))
        return super().sample(plain, logits, FilledMasks.none(), last)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ways_to_compute_agree(kind: str) -> None:
    found = check_kind(kind, CPU, 3, InTorch, make)
    assert found.endswith("tokens the same")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("greedy", "temperature")])
def test_what_is_forgotten_is_found(kind: str) -> None:
    with pytest.raises(CheckFailed, match=r"are not those sampled on the CPU|differ from the CPU's"):
        check_kind(kind, CPU, 3, lambda device: Forgets(ROWS, VOCAB, device), make)


@pytest.mark.parametrize("kind", ["greedy", "temperature"])
def test_other_tokens_are_found(kind: str) -> None:
    class Off(Sampler):
        def sample(self, *arguments: Any) -> Sampled:
            found = super().sample(*arguments)
            return replace(found, tokens=torch.cat((found.tokens[:-1], found.tokens[-1:] ^ 1)))

    with pytest.raises(CheckFailed, match="3 of 48 tokens"):
        check_kind(kind, CPU, 3, lambda device: Off(ROWS, VOCAB, device), make)
