"""Rows with parameters of all kinds, sampled by the kernels for GPUs and by the CPU's sampler."""

from __future__ import annotations

from typing import Any

import torch
from support.data import cases_of

from asyncengine.execution.sampling.device_sampler import DeviceSampler
from asyncengine.execution.sampling.logit_processors import SlotParams
from asyncengine.execution.sampling.masks import FilledMasks
from asyncengine.execution.sampling.sampler import Sampler
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Row

SETTINGS: list[dict[str, Any]] = cases_of(__file__)


def rows_of(count: int, settings: list[dict[str, Any]] = SETTINGS) -> list[Row]:
    """Each in a slot of its own, with a seed and at a position of its own."""
    rows = []
    for index in range(count):
        own = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **settings[index % len(settings)]}
        spec = RequestSpec(index + 1, (1, 2), SamplingParams(**own), 2**40, seed=index * 7919 + (index << 40))
        rows.append(Row(spec, index, 0, 2 + index, [1] * (2 + index), False, [], True))
    return rows


def by_cpu(rows: list[Row], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, largest logits)."""
    sampler = Sampler(len(rows), logits.shape[1], torch.device("cpu"))
    last = torch.zeros(len(rows), dtype=torch.int64)
    found = sampler.sample(rows, logits.cpu(), FilledMasks.none(), last)
    return found.tokens, found.best.float()


def device_sampler(rows: list[Row], vocab: int, device: torch.device, most: int = 64) -> DeviceSampler:
    """One that has been told what `rows` ask for, and takes `most` at a time."""
    params = SlotParams(max(row.slot for row in rows) + 1, vocab)
    params.update(rows)
    sampler = DeviceSampler(params, most, vocab, device)
    sampler.refresh()
    return sampler


def by_kernels(sampler: DeviceSampler, rows: list[Row], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, largest logits) on the host."""
    device = logits.device
    slots = torch.tensor([row.slot for row in rows], device=device)
    positions = torch.tensor([row.start + row.num_scheduled for row in rows], device=device)
    tokens = torch.full((len(rows),), -1, device=device)
    best = torch.full((len(rows),), -1.0, device=device)
    sampler.sample(logits, slots, positions, tokens, best)
    return tokens.cpu(), best.cpu()
