"""Gates of attention's heads: taken out from between the queries, and multiplied with what heads attend to."""

from __future__ import annotations

import pytest
import torch
from support.layer_options import options
from support.teams import team_of

from asyncengine.execution.layers.attention import HeadGate

pytest.importorskip("numba")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "dim", "others"), [(1, 2, 12, 24), (23, 4, 64, 130)])
def test_both_forms_take_the_projection_apart(rows: int, heads: int, dim: int, others: int, dtype: torch.dtype) -> None:
    projected = 3 * torch.randn(rows, 2 * heads * dim + others).to(dtype)
    attended = torch.randn(rows, heads * dim).to(dtype)
    by_head = projected[:, : 2 * heads * dim].view(rows, heads, 2 * dim)
    queries, gates = by_head[:, :, :dim].flatten(1), by_head[:, :, dim:].flatten(1)
    wanted = attended.double() * gates.double().sigmoid()
    for plain in (True, False):
        gate = HeadGate(options(dtype), heads, dim)
        if plain:
            gate.kernels = None
        assert torch.equal(gate.split(projected), torch.cat((queries, projected[:, 2 * heads * dim :]), 1))
        found = gate.multiply(attended, projected)
        assert torch.allclose(found.double(), wanted, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-7)
        with team_of(3):
            alone = torch.cat([gate.multiply(attended[row : row + 1], projected[row : row + 1]) for row in range(rows)])
            assert torch.equal(gate.multiply(attended, projected), found)
        assert torch.equal(alone, found) or plain
