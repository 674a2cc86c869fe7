"""Products of a few rows in Triton against torch's, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from asyncengine.kernels.cuda.few_rows import few_rows, pays


@pytest.mark.parametrize(("outputs", "inputs", "rows", "dtype"), [
    (24, 256, 1, torch.bfloat16), (10, 1032, 2, torch.float16), (3, 2056, 3, torch.bfloat16),
    (6, 4096, 4, torch.float16), (6, 4096, 1, torch.bfloat16), (24, 256, 4, torch.float16),
])  # fmt: skip
def test_products(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, inputs + 8).to(dtype)[:, :-8]
    weight, bias = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs).to(dtype)
    assert pays(x, weight)
    for added in (bias, None):
        wanted = linear(x.float(), weight.float(), None if added is None else added.float())
        found = few_rows(x, weight, added)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(few_rows(x, weight, added, dtype=torch.float32), wanted, rtol=1e-4, atol=1e-4)


def test_a_gated_product() -> None:
    x, weight = torch.randn(1, 520), torch.randn(14, 520) / 16
    gate, up = linear(x, weight).chunk(2, dim=-1)
    torch.testing.assert_close(few_rows(x, weight, None, gated=True), silu(gate) * up, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    x, weight = torch.randn(4, 264), torch.randn(9, 264)
    assert torch.equal(few_rows(x, weight, None)[:1], few_rows(x[:1], weight, None))


def test_what_is_left_to_a_library() -> None:
    small, large = torch.empty(8, 4), torch.empty(2**21, 8, device="meta")
    assert not pays(torch.empty(0, 4), small)
    assert not pays(torch.empty(5, 4), small)
    assert not pays(torch.empty(1, 2, 4), small)
    assert not pays(torch.empty(2, 4), small, gated=True)
    assert not pays(torch.empty(2, 8), large)
    assert pays(torch.empty(1, 8), large)
