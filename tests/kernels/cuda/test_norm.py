"""RMS norms in Triton against torch's, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm as reference

from asyncengine.kernels.cuda.qk_norm_rope import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted.to(dtype), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 40), (2, 1024), (0, 32)])
def test_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, width).to(dtype), torch.rand(width) + 0.5
    close(rms_norm(x, weight, 1e-6), reference(x.float(), (width,), weight, 1e-6), dtype)


def test_norm_of_parts_of_wider_rows() -> None:
    """Rows of two dimensions are read where they lie; heads are copied first."""
    merged, weight = torch.randn(5, 96), torch.rand(32) + 0.5
    close(rms_norm(merged[:, 32:64], weight, 1e-6), reference(merged[:, 32:64], (32,), weight, 1e-6), torch.float32)
    heads = merged[:, 32:].view(5, 2, 32)
    close(rms_norm(heads, weight, 1e-6), reference(heads, (32,), weight, 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_sum_and_norm(scale: float, dtype: torch.dtype) -> None:
    residual, branch = torch.randn(3, 72).to(dtype), torch.randn(3, 80).to(dtype)[:, :72]
    before, weight = residual.clone(), torch.rand(72) + 0.5
    total, normed = add_rms_norm(residual, branch, scale, weight, 1e-5)
    close(total, residual.float() + branch.float() * scale, dtype)
    close(normed, reference(total.float(), (72,), weight, 1e-5), dtype)
    assert torch.equal(residual, before)
