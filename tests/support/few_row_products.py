"""Products of a few rows by a kernel against torch's, interpreted on a CPU or compiled on a GPU."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu


def check_products(outputs: int, inputs: int, rows: int, dtype: torch.dtype, near: float, device: str) -> None:
    """With a bias and without, rounded and in float32, gated, and of a row alone. Raises `AssertionError`."""
    from asyncengine.kernels.cuda.few_rows import few_rows, pays

    x = torch.randn(rows, inputs + 8, device=device).to(dtype)[:, :-8]
    weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    assert pays(x, weight)
    for added in (None, bias):
        wanted = linear(x.float(), weight.float(), None if added is None else added.float())
        found = few_rows(x, weight, added)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted, rtol=near, atol=near)
        torch.testing.assert_close(few_rows(x, weight, added, dtype=torch.float32), wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(few_rows(x[:1], weight, added), found[:1])
    if outputs % 2 == 0:
        gate, up = linear(x[:1].float(), weight.float()).chunk(2, dim=-1)
        gated = few_rows(x[:1], weight, None, gated=True)
        torch.testing.assert_close(gated.float(), silu(gate) * up, rtol=near, atol=near)
