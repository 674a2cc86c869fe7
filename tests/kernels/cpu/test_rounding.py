"""Rounding of weights to 8 and 4 bits, against the rule written in numpy, with every kind of last panel and group."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncengine.execution.layers.weight_forms import QuantizedWeight
from asyncengine.kernels.cpu.panel_form import INT4_GROUP
from asyncengine.kernels.cpu.quantize import ENDS

SIZES = [(16, 64), (16, 128), (48, 320), (50, 200), (33, 64), (7, 72), (1, 1), (16, 1000), (17, 8)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_int4_takes_the_steps_of_least_error(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = made_up(outputs, inputs).to(dtype)
    found = rounded(weight, 4).reshape(outputs, inputs)
    for row in range(outputs):
        for begin in range(0, inputs, INT4_GROUP):
            group = weight[row, begin : begin + INT4_GROUP].float().numpy()
            own = found[row, begin : begin + INT4_GROUP]
            errors = [squared(as_int4(group, *ends) - group) for ends in ENDS]
            # the zeros that fill up a last group have a part in the choice
            bound = min(errors) if len(group) == INT4_GROUP else max(errors)
            assert squared(own - group) <= bound * (1 + 1e-3) + 1e-60, (row, begin)
            assert len(np.unique(own)) <= 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_int8_takes_the_largest_of_a_row(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = made_up(outputs, inputs).to(dtype)
    rows, found = weight.float().numpy(), rounded(weight, 8)
    scales = np.abs(rows).max(axis=1, keepdims=True).astype(np.float64) / 127
    scales[scales <= 1e-30 / 127] = 0  # so small a row becomes 0
    wanted = np.rint(rows / np.where(scales == 0, np.inf, scales)) * scales
    close = np.abs(found - wanted) <= 1e-6 * np.abs(wanted)
    tied = np.abs(found - wanted) <= 1.0001 * scales  # half-way between two
    halfway = np.abs(np.abs(found - rows) / np.where(scales == 0, 1, scales) - 0.5) < 1e-4
    assert (close | (tied & halfway)).all()


def made_up(outputs: int, inputs: int) -> torch.Tensor:
    """Weights with a row of zeros, ties of both signs in both orders, one large number, and very small ones."""
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.02
    for row, sign in ((1, 1.0), (2, -1.0)):
        if outputs > row and inputs > 3:
            weight[row, 0], weight[row, 2] = 0.5 * sign, -0.5 * sign
    if outputs > 5:
        weight[0] = 0
        weight[3, inputs // 2] = 100
        weight[4] *= 1e-38
        weight[5] = weight[5].abs()
    return weight


def rounded(weight: torch.Tensor, bits: int) -> NDArray[np.float32]:
    """The numbers that the rounded weight stands for."""
    form = QuantizedWeight(*weight.shape, bits, weight.dtype)
    form.load(0, weight)
    out = torch.empty(weight.shape)
    form.read_rows(torch.arange(len(weight)), out)
    return out.numpy()


def squared(error: NDArray[np.float32]) -> float:
    return float((error.astype(np.float64) ** 2).sum())


def as_int4(group: NDArray[np.float32], below: float, beyond: float) -> NDArray[np.float32]:
    """A group in the steps that fit its numbers best, once they are rounded to sixteen steps between its ends, which
    are drawn in by those parts of its range."""
    whole = np.zeros(INT4_GROUP, dtype=np.float32)
    whole[: len(group)] = group
    low, span = whole.min(), whole.max() - whole.min()
    scale, least = span * np.float32((1 - below - beyond) / 15), low + span * np.float32(below)
    for _ in range(2):
        steps = np.clip(np.rint((whole - least) * (1 / scale if scale > 1e-30 else 0)), 0, 15).astype(np.float64)
        given = scale, least
        if np.ptp(steps) > 0:
            scale, least = np.polyfit(steps, whole.astype(np.float64), 1)
        else:
            scale, least = 0.0, whole.mean(dtype=np.float64)
        scale, least = (float(torch.tensor(number).bfloat16()) for number in (scale, least))
    found: NDArray[np.float32] = (steps * given[0] + given[1]).astype(np.float32)
    return found[: len(group)]
