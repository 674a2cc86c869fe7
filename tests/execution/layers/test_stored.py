"""Quantized matrices as they are stored: the numbers they stand for, ranges of their rows, and their bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncengine.execution.layers.slots import TensorSlot
from asyncengine.execution.layers.stored import GroupedRows, NumberForm, RowRange, bytes_of, dense, dequantize
from asyncengine.execution.layers.weight_forms import DenseWeight


def test_every_part_of_a_form() -> None:
    """Numbers are those of the module's formula, one by one."""
    generator = np.random.default_rng(0)
    inputs, group, block = 512, 32, 256
    numbers = generator.integers(0, 16, (3, inputs), dtype=np.uint8)
    scales, minima = generator.normal(size=(2, 3, inputs // block)).astype(np.float32)
    steps, minimum_steps = generator.integers(0, 64, (2, 3, inputs // group)).astype(np.int8)
    row_scales = generator.normal(size=3).astype(np.float32)
    form = NumberForm(4, group, "minima", block)
    found = dequantize(GroupedRows(numbers, scales, steps, None, minima, minimum_steps, row_scales), form)
    for row in range(3):
        for place in (0, 31, 32, 255, 256, 511):
            of_block, of_group = place // block, place // group
            scale = np.float64(scales[row, of_block]) * steps[row, of_group]
            minimum = np.float64(minima[row, of_block]) * minimum_steps[row, of_group]
            wanted = row_scales[row] * (scale * numbers[row, place] - minimum)
            assert abs(float(found[row, place]) - wanted) < 1e-5 * max(1.0, abs(wanted))


def test_zeros_tables_and_middles() -> None:
    numbers = np.array([[0, 3, 9, 15] * 4], dtype=np.uint8)
    scales = np.array([[2.0]], dtype=np.float32)
    middle = dequantize(GroupedRows(numbers, scales), NumberForm(4, 16))
    assert middle[0, :4].tolist() == [-16.0, -10.0, 2.0, 14.0]
    zeros = GroupedRows(numbers, scales, zeros=np.array([[3]], dtype=np.uint8))
    assert dequantize(zeros, NumberForm(4, 16, "zeros"))[0, :4].tolist() == [-6.0, 0.0, 12.0, 24.0]
    table = tuple(range(-100, 60, 10))
    assert dequantize(GroupedRows(numbers, scales), NumberForm(4, 16, "table", table=table))[0, 1] == 2.0 * -70


class _Reversed:
    """A matrix whose inputs lie in the opposite order."""

    name, shape, form = "test", (64, 16), NumberForm(8, 0)
    order = np.arange(15, -1, -1)

    def __init__(self) -> None:
        self.released: list[tuple[int, int]] = []

    def rows(self, first: int, last: int) -> GroupedRows:
        numbers = np.tile(np.arange(128, 144, dtype=np.uint8), (last - first, 1))
        return GroupedRows(numbers, row_scales=np.arange(first, last, dtype=np.float32))

    def release(self, first: int, last: int) -> None:
        self.released.append((first, last))


def test_forms_and_slots_take_one_as_any_other_tensor() -> None:
    matrix = _Reversed()
    wanted = torch.arange(64.0)[:, None] * torch.arange(15.0, -1.0, -1.0)
    assert torch.equal(dense(matrix), wanted)
    weight = DenseWeight(64, 16, torch.float32, torch.device("cpu"))
    weight.load(0, matrix)
    assert torch.equal(weight.weight, wanted)
    assert matrix.released == [(0, 64)]
    target = torch.zeros(64, 16)
    TensorSlot.into(target).load(matrix)
    assert torch.equal(target, wanted)


def test_a_range_of_rows_is_a_matrix() -> None:
    matrix = _Reversed()
    part = RowRange(matrix, 16, 48)
    assert part.shape == (32, 16)
    assert torch.equal(dense(part), dense(matrix)[16:48])
    part.release(8, 32)
    assert matrix.released == [(24, 48)]


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        (NumberForm(4, 128), 4.125), (NumberForm(8, 0), 8.0), (NumberForm(4, 128, "zeros"), 4.1875),
        (NumberForm(4, 32, "minima", 256), 4.625), (NumberForm(8, 32, scale_dtype="float32"), 9.0),
    ],
)  # fmt: skip
def test_bytes_of_a_form(form: NumberForm, bits: float) -> None:
    """Bits of a number with its share of scales: what the check of memory counts."""
    assert bytes_of(form, 8192) == 1024 * bits
