"""Products of a few rows in Triton against torch's, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from support.few_row_products import check_products

from asyncengine.kernels.cuda.few_rows import pays


@pytest.mark.parametrize(("outputs", "inputs", "rows", "dtype"), [
    (24, 256, 1, torch.bfloat16), (10, 1032, 2, torch.float16), (3, 2056, 3, torch.bfloat16),
    (6, 4096, 4, torch.float16), (6, 4096, 1, torch.bfloat16), (24, 256, 4, torch.float16),
    (14, 520, 1, torch.float32), (9, 264, 4, torch.float32),
])  # fmt: skip
def test_products(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    check_products(outputs, inputs, rows, dtype, 1e-4 if dtype == torch.float32 else 1e-2, "cpu")


def test_what_is_left_to_a_library() -> None:
    small, large = torch.empty(8, 4), torch.empty(2**21, 8, device="meta")
    assert not pays(torch.empty(0, 4), small)
    assert not pays(torch.empty(5, 4), small)
    assert not pays(torch.empty(1, 2, 4), small)
    assert not pays(torch.empty(2, 4), small, gated=True)
    assert not pays(torch.empty(2, 8), large)
    assert pays(torch.empty(1, 8), large)
