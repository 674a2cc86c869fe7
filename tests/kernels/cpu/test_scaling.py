"""Rows multiplied and columns side by side: the bits of torch, by any number of threads."""

from __future__ import annotations

import pytest
import torch
from support.teams import team_of

from asyncengine.execution.layers.kernels import CompiledKernels, LayerKernels

TYPES = [torch.float32, torch.bfloat16]


def every_kind() -> list[LayerKernels]:
    return [CompiledKernels(), LayerKernels()]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_times_factors(threads: int, dtype: torch.dtype) -> None:
    """Rows are scaled in place, in their first columns; or there is a row for each of several factors."""
    x, factors = torch.randn(7, 50).to(dtype), torch.randn(7, 3)
    with team_of(threads, 64):
        compiled, plain = (each.scaled_rows(x, factors) for each in every_kind())
        assert torch.equal(compiled, plain)
        assert compiled.shape == (21, 50)
        first = factors[:, 0].contiguous()
        compiled, plain = (each.scale_rows(x.clone(), first, 33) for each in every_kind())
    assert torch.equal(compiled, plain)
    assert torch.equal(compiled[:, 33:], x[:, 33:])
    assert not torch.equal(compiled[:, :33], x[:, :33])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_columns_side_by_side(threads: int, dtype: torch.dtype) -> None:
    """Columns come from wider rows, from one row for all heads, and from no rows."""
    x, heads = torch.randn(9, 40).to(dtype), torch.randn(9, 4, 11).to(dtype)
    shared = x[:, None, :6].expand(-1, 4, -1)
    cases = [(x[:, 3:20],), (x[:, :7], x, x[:, 39:]), (heads[..., 2:5], shared), (x[:0], x[:0])]
    with team_of(threads, 64):
        for parts in cases:
            compiled, plain = (each.joined(*parts) for each in every_kind())
            assert torch.equal(compiled, plain)
            assert compiled.is_contiguous()
