"""Products of a few rows in Triton against torch's, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from asyncengine.kernels.cuda.few_rows import few_rows


@pytest.mark.parametrize("kind", ["sum", "dot"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 256), (20, 328)])
@pytest.mark.parametrize("gated", [False, True])
def test_products(kind: str, rows: int, outputs: int, inputs: int, gated: bool) -> None:
    if kind == "sum" and rows > 4:
        return
    dtype = torch.float16 if kind == "dot" else torch.bfloat16  # whose bits the interpreter would multiply
    x = torch.randn(rows, inputs * (2 if gated else 1) + 8).to(dtype)[:, :-8]
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    inner = silu(x[:, :inputs].float()) * x[:, inputs:].float() if gated else x
    for added in (bias, None):
        found = few_rows(x, weight, added, gated, kind, step=256 if kind == "sum" else 64)
        wanted = linear(inner.to(x.dtype).float(), weight.float(), None if added is None else added.float())
        torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=0.1)
