"""Low-rank deltas by compiled kernels: torch's numbers, whatever the rows beside a row and the number of threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.teams import team_of

from asyncengine.kernels.cpu.lora import Factors, RowGroups, add_deltas

SLOTS, RANK = 5, 13
WIDTHS = {"one": [300], "q, k and v": [256, 48, 32], "odd widths": [129, 7], "narrow": [3]}
INPUTS = (7, 64, 300)
ROWS = [2, -1, 0, 2, 4, -1, 2, 1]
"""Slot 3 is used by nobody, slot 1 changes the first part only, slot 4 nothing at all."""
RANKS = {0: 13, 1: 3, 2: 8, 3: 5, 4: 0}
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make(inputs: int, widths: Sequence[int], dtype: torch.dtype) -> tuple[Factors, list[torch.Tensor]]:
    """Factors with NaN wherever there is nothing to be read, and each slot's delta [inputs, outputs] in float32."""
    a = torch.full((SLOTS, len(widths), RANK, inputs), float("nan"), dtype=dtype)
    b = torch.full((SLOTS, RANK, sum(widths)), float("nan"), dtype=dtype)
    ranks = np.zeros((SLOTS, len(widths)), dtype=np.int64)
    deltas = []
    for slot, rank in RANKS.items():
        columns, end = [], 0
        for part, width in enumerate(widths):
            own = 0 if slot == 1 and part else rank
            ranks[slot, part] = own
            a[slot, part, :own] = random(own, inputs, dtype=dtype) * inputs**-0.5
            b[slot, :own, end : end + width] = random(own, width, dtype=dtype)
            columns.append(a[slot, part, :own].float().T @ b[slot, :own, end : end + width].float())
            end += width
        deltas.append(torch.cat(columns, dim=1))
    return Factors(a, b, ranks, widths), deltas


def expected(x: torch.Tensor, y: torch.Tensor, slots: Sequence[int], deltas: list[torch.Tensor]) -> torch.Tensor:
    total = y.to(torch.float32, copy=True)
    for row, slot in enumerate(slots):
        if slot >= 0:
            total[row] += x[row].float() @ deltas[slot]
    return total.to(y.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_equals_torch(inputs: int, widths: list[int], dtype: torch.dtype) -> None:
    """Sums may also go into float32, as logits are. Rows and columns that no adapter changes keep their bits."""
    factors, deltas = make(inputs, widths, dtype)
    x = random(len(ROWS), inputs, dtype=dtype)
    for out in {dtype, torch.float32}:
        y = random(len(ROWS), sum(widths), dtype=out)
        before, wanted = y.clone(), expected(x, y, ROWS, deltas)
        add_deltas(x, y, factors, RowGroups(np.array(ROWS)))
        tolerance = 1e-5 if out == torch.float32 else 1e-2
        torch.testing.assert_close(y, wanted, rtol=tolerance, atol=tolerance)
        same = (y == before).all(dim=1).tolist()
        assert same == [slot in (-1, 4) for slot in ROWS]
        assert torch.equal(y[7, widths[0] :], before[7, widths[0] :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [300, 64, 7])
def test_the_rows_of_a_prompt_get_what_each_gets_alone(inputs: int, dtype: torch.dtype) -> None:
    """Several rows by several of a factor at once, and more of them than are taken at a time."""
    factors, deltas = make(inputs, [256, 130, 32], dtype)
    slots = [0] * 70 + [-1, 2, 1] + [2] * 5 + [0] * 66
    x, y = random(len(slots), inputs, dtype=dtype), random(len(slots), 418, dtype=dtype)
    wanted, whole = expected(x, y, slots, deltas), y.clone()
    add_deltas(x, whole, factors, RowGroups(np.array(slots)))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(whole, wanted, rtol=tolerance, atol=tolerance)
    with team_of(3):
        found = y.clone()
        add_deltas(x, found, factors, RowGroups(np.array(slots)))
    assert torch.equal(found, whole)
    for row in (0, 3, 63, 64, 69, 70, 71, 72, 75, 80, len(slots) - 1):
        alone = y[row : row + 1].clone()
        add_deltas(x[row : row + 1], alone, factors, RowGroups(np.array(slots[row : row + 1])))
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(value: float, dtype: torch.dtype) -> None:
    factors, _ = make(64, [130, 7], dtype)
    x, y = random(len(ROWS), 64, dtype=dtype), random(len(ROWS), 137, dtype=dtype)
    x[3, 5] = value
    add_deltas(x, y, factors, RowGroups(np.array(ROWS)))
    assert torch.isfinite(y).all(dim=1).tolist() == [row != 3 for row in range(len(ROWS))]
