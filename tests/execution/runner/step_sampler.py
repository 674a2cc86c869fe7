"""A sampler of graphs in torch: what kernels on a device would do with what lies in memory when they run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from asyncengine.execution.runner import model_runner
from asyncengine.execution.sampling.sampler import Sampler


class TorchStepSampler:
    """A `StepSampler` that knows the parameters of slots as they were when it was refreshed last."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._known = copy.copy(sampler)
        self.refreshed = self.sampled = 0

    def refresh(self) -> None:
        self.refreshed += 1
        self._known._params = copy.deepcopy(self._sampler._params)

    def sample(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor,
        best: torch.Tensor,
    ) -> None:  # fmt: skip
        self.sampled += 1
        assert slots.dtype == positions.dtype == tokens.dtype == torch.int64
        assert best.dtype == torch.float32
        nobody = len(self._known._params.temperature)
        greedy = torch.where(slots == nobody, 0, slots)  # padding rows may sample as they like
        found = self._known._choose(greedy.numpy(), positions.numpy(), logits)
        tokens.copy_(found[0])
        best.copy_(found[1])


def sample_in_graphs(monkeypatch: pytest.MonkeyPatch) -> list[TorchStepSampler]:
    """Let all runners that are made from now on sample in graphs, and get their samplers."""
    made: list[TorchStepSampler] = []

    def make(*arguments: Any) -> Sampler:
        sampler = Sampler(*arguments)
        sampler.on_device = TorchStepSampler(sampler)
        made.append(sampler.on_device)
        return sampler

    monkeypatch.setattr(model_runner, "Sampler", make)
    return made
