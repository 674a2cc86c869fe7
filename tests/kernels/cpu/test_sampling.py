"""The compiled choice against the sampler in torch: the same tokens from the same noise, whatever the parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.device_sampling import SETTINGS
from support.teams import team_of

from asyncengine.execution.sampling.sampler import draw, kept_threshold, noise_keys
from asyncengine.kernels.cpu import sampling
from asyncengine.kernels.cpu.sampling import SamplerKernel


def columns(count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    """The arguments of `choose` for `count` rows that differ in seed and position."""
    params = np.array([[temperature, top_p, min_p]] * count, dtype=np.float32)
    keys = np.array([[top_k, 9 + row, row * 7 % 5, 100 + row] for row in range(count)], dtype=np.int64)
    return params, keys


def by_torch(logits: torch.Tensor, params: Any, keys: Any) -> list[int]:
    temperature, top_p, min_p = (torch.from_numpy(column.copy()) for column in params.T)
    scaled = logits.float() / temperature[:, None]
    least = torch.maximum(scaled.amax(dim=-1) + torch.log(min_p), kept_threshold(scaled, keys[:, 0], top_p))
    noise = torch.from_numpy(noise_keys(*keys.T[1:]))
    tokens: list[int] = draw(scaled, least, noise).tolist()
    return tokens


@pytest.mark.parametrize("vocab", [7, 512, 513, 6000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fields", [own for own in SETTINGS if own.get("temperature") != 0.0], ids=str)
def test_the_tokens_are_those_of_the_sampler_in_torch(fields: dict[str, Any], dtype: torch.dtype, vocab: int) -> None:
    logits = (torch.randn((60, vocab), generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype)
    logits[::7, : vocab // 2] = float("-inf")
    fields = {**fields, "top_k": fields.get("top_k", 0) if fields.get("top_k", 0) < vocab else 0}
    params, keys = columns(60, **fields)
    tokens, best = SamplerKernel(vocab).choose(logits, params, keys)
    assert tokens.tolist() == by_torch(logits, params, keys)
    assert torch.equal(best, logits.float().amax(dim=-1))


def test_rows_without_a_token_say_so_and_harm_nobody() -> None:
    logits = torch.randn((6, 900), generator=torch.Generator().manual_seed(2))
    params, keys = columns(6, top_p=0.8)
    alone, _ = SamplerKernel(900).choose(logits, params, keys)
    logits[1, 899], logits[2], logits[4, 3] = float("nan"), float("-inf"), float("inf")
    tokens, best = SamplerKernel(900).choose(logits, params, keys)
    assert [math.isfinite(value) for value in best.tolist()] == [True, False, False, True, False, True]
    assert math.isnan(best[1])
    assert tokens[[1, 2, 4]].tolist() == [0, 0, 0]
    assert tokens[[0, 3, 5]].tolist() == alone[[0, 3, 5]].tolist()


def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((40, 3000), generator=torch.Generator().manual_seed(4))
    params, keys = columns(40, top_k=50, top_p=0.9)
    chooser = SamplerKernel(3000)
    together = chooser.choose(logits, params, keys)[0].tolist()
    alone = [int(chooser.choose(*(part[row : row + 1] for part in (logits, params, keys)))[0]) for row in range(40)]
    assert together == alone
    monkeypatch.setattr(sampling, "_AT_ONCE", 0)  # few logits are not worth sharing
    with team_of(3) as team:
        assert chooser.choose(logits, params, keys)[0].tolist() == alone
        assert team.account.pieces > 1
