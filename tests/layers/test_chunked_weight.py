"""Matrices that stay as they are stored on a GPU: each form against what it stands for, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from support.forwards import relative_error
from support.stored_matrices import FORMS, RandomMatrix

pytest.importorskip("triton")

from asyncengine.layers.chunked_weight import ChunkedWeight
from asyncengine.layers.stored import StoredForm

CPU = torch.device("cpu")
DTYPES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def loaded(
    name: str, outputs: int, inputs: int, dtype: torch.dtype, ordered: bool = False
) -> tuple[ChunkedWeight, torch.Tensor]:
    matrix = RandomMatrix(name, outputs, inputs, ordered=ordered)
    weight = ChunkedWeight(outputs, inputs, StoredForm(name, FORMS[name], ordered), dtype, CPU)
    weight.load(0, matrix)
    return weight, matrix.dense()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_products_of_each_form(name: str, dtype: torch.dtype) -> None:
    """One row, few, some and many, whose inputs and outputs lie apart, with a bias and without."""
    weight, dense = loaded(name, 40, 256, dtype)
    for rows in (0, 1, 3, 5, 70):
        if dtype == torch.bfloat16 and rows == 5:
            continue  # the interpreter's tl.dot multiplies the bits of bfloat16
        x = torch.randn(rows, 300).to(dtype)[:, 40:296]
        bias = torch.randn(40) if rows % 2 else None
        out = torch.full((rows, 100), 7.0, dtype=dtype)
        found = weight.multiply(x, bias, out[:, 8:48])
        expected = torch.nn.functional.linear(x.float(), dense, bias)
        if rows:
            assert relative_error(expected, found.float()) < DTYPES[dtype], rows
        assert (out[:, :8] == 7).all()
        assert (out[:, 48:] == 7).all()
