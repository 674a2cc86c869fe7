"""Matrices that stay as they are stored on a GPU: each form against what it stands for, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from support.bfloat16_dots import with_bfloat16_dots
from support.forwards import relative_error
from support.stored_matrices import FORMS, FloatMatrix, RandomMatrix

pytest.importorskip("triton")

from asyncengine.execution.layers.stored import NumberForm, StoredForm
from asyncengine.execution.layers.stored_weight import ChunkedWeight

CPU = torch.device("cpu")
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bfloat16_dots(monkeypatch)


def loaded(matrix: RandomMatrix) -> ChunkedWeight:
    outputs, inputs = matrix.shape
    form = StoredForm(matrix.name, matrix.form, matrix.order is not None)
    weight = ChunkedWeight(outputs, inputs, form, CPU)
    weight.load(0, matrix)
    return weight


def check(weight: ChunkedWeight, dense: torch.Tensor, rows: int, dtype: torch.dtype = torch.float32) -> None:
    """Rows of x and of the result lie apart; a bias for odd numbers of them."""
    outputs, inputs = dense.shape
    x = torch.randn(rows, inputs + 48).to(dtype)[:, 16 : 16 + inputs]
    bias = torch.randn(outputs) if rows % 2 else None
    out = torch.full((rows, outputs + 24), 7.0, dtype=dtype)
    found = weight.multiply(x, bias, out[:, 8 : 8 + outputs])
    expected = torch.nn.functional.linear(x.float(), dense, bias)
    assert relative_error(expected, found.float()) < LIMITS[dtype], rows
    assert (out[:, :8] == 7).all()
    assert (out[:, 8 + outputs :] == 7).all()


@pytest.mark.parametrize("name", FORMS)
def test_products_of_each_form(name: str) -> None:
    """Products by each kernel, and rows looked up, are the dense matrix's. Blocks of 64 rows are tried below."""
    matrix = RandomMatrix(name, 24, 256)
    weight, dense = loaded(matrix), matrix.dense()
    for rows in (1, 3, 9, 17):
        check(weight, dense, rows)
    ids, out = torch.tensor([23, 3, 23]), torch.empty(3, 256)
    weight.read_rows(ids, out)
    assert relative_error(dense[ids], out) < 1e-6
    assert weight.multiply(torch.empty(0, 256), None).shape == (0, 24)


@pytest.mark.parametrize("rows", [0, 1, 8])
def test_a_gate_within_the_product(rows: int) -> None:
    """The gate is part of the product for few rows, narrow chunks and matrices without an order."""
    matrix, x = RandomMatrix("Q4_0", 44, 96), torch.randn(rows, 96)
    found = loaded(matrix).multiply_gated(x)
    assert found is not None
    gate, up = (x @ matrix.dense().T).chunk(2, dim=1)
    assert found.shape == (rows, 22)
    assert relative_error(torch.nn.functional.silu(gate) * up, found) < 1e-5 or not rows
    assert loaded(matrix).multiply_gated(torch.randn(9, 96)) is None
    ordered = RandomMatrix("gptq8", 24, 256, ordered=True)
    assert loaded(ordered).multiply_gated(torch.randn(rows, 256)) is None


class OddMatrix(RandomMatrix):
    """One whose numbers are in a form of its own."""

    def __init__(self, form: NumberForm, outputs: int, inputs: int) -> None:
        FORMS["odd"] = form
        try:
            super().__init__("odd", outputs, inputs)
        finally:
            del FORMS["odd"]


@pytest.mark.parametrize(
    ("form", "inputs"),
    [
        (NumberForm(4, 32), 96),  # half a chunk is filled up
        (NumberForm(4, 128, "zeros"), 128),
        (NumberForm(8, 64, "minima"), 192),  # and tiles of chunks are
        (NumberForm(4, 256, "zeros"), 512),  # a group becomes two
    ],
)
def test_sizes_that_fill_no_chunk(form: NumberForm, inputs: int) -> None:
    matrix = OddMatrix(form, 21, inputs)
    for rows in (1, 5, 17, 65):
        check(loaded(matrix), matrix.dense(), rows)


@pytest.mark.parametrize(("inputs", "shared"), [(256, 128), (192, 32), (320, 128), (256, 0)])
def test_floats_of_eight_bits_stay_what_they_are(inputs: int, shared: int) -> None:
    matrix = FloatMatrix(21, inputs, shared)
    weight = loaded(matrix)
    assert weight.nbytes <= 21 * (-(-inputs // 128) * 128 + 4 + (4 * -(-inputs // shared) if shared else 0))
    for rows in (1, 17, 65):
        check(weight, matrix.dense(), rows)
    check(weight, matrix.dense(), 2, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 17, 65])
def test_inputs_in_an_order_of_their_own(rows: int) -> None:
    matrix = RandomMatrix("gptq8", 24, 256, ordered=True)
    weight, ids, out = loaded(matrix), torch.tensor([3, 0]), torch.empty(2, 256)
    check(weight, matrix.dense(), rows)
    weight.read_rows(ids, out)
    assert relative_error(matrix.dense()[ids], out) < 1e-6
