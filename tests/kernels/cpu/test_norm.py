"""RMS normalisation by compiled kernels: torch's numbers, whatever the rows beside a row and the number of threads."""

from __future__ import annotations

import pytest
import torch
from support.teams import team_of

from asyncengine.kernels.cpu.norm import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
SHAPES = [(1, 1, 64), (1, 3, 48), (5, 7), (2, 3, 4, 16), (1, 40, 1024), (0, 8)]
"""The fifth is split over threads."""


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype]
    return torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype) * 3, torch.randn(shape[-1]).to(dtype)
    expected = torch.nn.functional.rms_norm(x, (shape[-1],), weight, 1e-5)
    weight = weight.float()
    assert close(rms_norm(x, weight, 1e-5), expected)
    assert close(rms_norm(x.transpose(0, -1).contiguous().transpose(0, -1), weight, 1e-5), expected), "strides"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_sum_and_norm(shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> None:
    """The sum is rounded before it is normalised, and neither input is changed."""
    residual, branch = (torch.randn(size).to(dtype) for size in (shape, shape))
    weight = torch.randn(shape[-1])
    before = residual.clone(), branch.clone()
    total, normed = add_rms_norm(residual, branch, scale, weight, 1e-5)
    assert torch.equal(residual, before[0])
    assert torch.equal(branch, before[1])
    assert close(total, residual + branch * scale)
    if scale == 1.0 or dtype == torch.bfloat16:
        assert torch.equal(total, residual + branch * scale)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 96, 512, 1000, 1024])
def test_a_row_s_result_is_its_own(width: int, dtype: torch.dtype) -> None:
    """Bit for bit, alone and among others, by one thread and by two, also after a sum."""
    x, branch = torch.randn(2, 65, width).to(dtype)
    weight = torch.randn(width)
    for count in (1, 2, 3):
        with team_of(count) as team:
            whole, (total, normed) = rms_norm(x, weight, 1e-6), add_rms_norm(x, branch, 1.0, weight, 1e-6)
            assert (team.account.pieces > 2) == (count > 1)
            assert torch.equal(normed, rms_norm(total, weight, 1e-6))
            for row in (0, 31, 64):
                alone = slice(row, row + 1)
                assert torch.equal(whole[alone], rms_norm(x[alone], weight, 1e-6))
                found = add_rms_norm(x[alone], branch[alone], 1.0, weight, 1e-6)
                assert torch.equal(total[alone], found[0])
                assert torch.equal(normed[alone], found[1])
