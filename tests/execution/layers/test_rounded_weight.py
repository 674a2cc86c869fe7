"""Weights that are rounded to 8 and 4 bits on a GPU, by Triton's interpreter: the same numbers as on a CPU."""

from __future__ import annotations

import pytest
import torch
from support.forwards import relative_error
from support.stored_matrices import RandomMatrix

pytest.importorskip("triton")

from asyncengine.execution.layers.options import RoundedWeight
from asyncengine.execution.layers.weight_forms import QuantizedWeight

CPU = torch.device("cpu")
SIZES = [(16, 64), (48, 320), (50, 200), (33, 64), (7, 72), (1, 1), (17, 8), (5, 1000)]


def drawn(outputs: int, inputs: int) -> torch.Tensor:
    """Rows of all sizes; one of zeros, and a group of zeros in another."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    weight *= torch.exp2(torch.randint(-12, 3, (outputs, 1), generator=generator).float())
    weight[outputs // 2] = 0
    weight[0, 64:128] = 0
    return weight.bfloat16()


def as_read(weight: RoundedWeight | QuantizedWeight) -> torch.Tensor:
    out = torch.empty(weight.outputs, weight.inputs)
    weight.read_rows(torch.arange(weight.outputs), out)
    return out


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_numbers_are_those_of_a_cpu(outputs: int, inputs: int, bits: int) -> None:
    given = drawn(outputs, inputs)
    known = QuantizedWeight(outputs, inputs, bits, torch.bfloat16)
    found = RoundedWeight(outputs, inputs, bits, CPU)
    for weight in (known, found):
        weight.load(0, given)
    expected, own = as_read(known), as_read(found)
    # where two scales err alike, or a number lies half-way, sums in another order may choose the other
    differ = ((expected - own).abs() > 1e-6 * expected.abs()).float().mean()
    assert differ < 0.01
    errors = [float((each - given.float()).square().sum()) for each in (expected, own)]
    assert errors[1] <= errors[0] * (1 + 1e-4)
    assert found.name == f"int{bits}"
    assert found.takes(0) is None


@pytest.mark.parametrize("bits", [8, 4])
def test_products_however_rows_come(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come in parts that begin anywhere, are rounded a few at once, or are of a quantized matrix."""
    given = drawn(50, 200)
    whole, parts = (RoundedWeight(50, 200, bits, CPU) for _ in range(2))
    whole.load(0, given)
    monkeypatch.setattr("asyncengine.execution.layers.options._AT_ONCE", 1000)
    for first, last in ((37, 50), (0, 3), (3, 37)):
        parts.load(first, given[first:last])
    assert torch.equal(as_read(parts), as_read(whole))
    for rows in (0, 1, 5, 65):
        x = torch.randn(rows, 200)
        assert relative_error(x @ as_read(whole).T, parts.multiply(x, None)) < 1e-5 or not rows
    stored = RandomMatrix("w8a8", 50, 256)
    weight = RoundedWeight(50, 256, bits, CPU)
    weight.load(0, stored)
    assert relative_error(stored.dense(), as_read(weight)) < (0.01 if bits == 8 else 0.12)
