"""The noise of each sampler (torch's, the compiled one, Triton's) is number for number that of the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.device_sampling import by_cpu, by_kernels, device_sampler

from asyncengine.execution.sampling import sampler as module
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Row

from . import reference_sampler as reference

SEEDS = (7, 1 << 32, 2**64 - 1)
POSITIONS = (2, 70_000)
PAIRS = ((0, 1), (3, 511), (600, 601), (5, 520))
"""Tokens that a draw is between: of the first block, of the second, and of either."""
VOCAB = 700
NEAR = 1e-4
PARAMS = SamplingParams(temperature=1.0, top_p=1.0, top_k=0)


def noise_of(seed: int, position: int, token: int, other: int) -> float:
    """The number that decides: the token's own within a block, its block's between two."""
    flag = 1 << 31
    key = token if token // reference.BLOCK == other // reference.BLOCK else token // reference.BLOCK | flag
    return reference.noise(seed, position, key)


@pytest.mark.parametrize("form", ["torch", "compiled", "triton"])
def test_numbers_are_the_reference_s(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other token leads by just less than the difference of both numbers, then by just more: so the difference is
    known to a ten-thousandth."""
    if form == "triton" and torch.cuda.is_available():
        pytest.skip("tests/gpu has it compiled")
    if form == "torch":
        monkeypatch.setattr(module, "compiler_missing", lambda *_: "as without numba")
    rows, logits, wanted = [], torch.full((2 * 24, VOCAB), float("-inf")), []
    for seed, position, (token, other) in itertools.product(SEEDS, POSITIONS, PAIRS):
        lead = noise_of(seed, position, token, other) - noise_of(seed, position, other, token)
        for tip in (-NEAR, NEAR):
            logits[len(rows), [token, other]] = torch.tensor([0.0, lead + tip])
            spec = RequestSpec(len(rows) + 1, (1,), PARAMS, 2**40, seed=seed)
            rows.append(Row(spec, len(rows), position - 1, 1, [1] * position, False, [], True))
            wanted.append(other if tip > 0 else token)
    found, _ = (
        by_kernels(device_sampler(rows, VOCAB, logits.device), rows, logits)
        if form == "triton"
        else by_cpu(rows, logits)
    )
    assert found.tolist() == wanted
