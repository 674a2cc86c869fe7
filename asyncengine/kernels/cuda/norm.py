"""RMS norms, alone or with the residual sum before them, each in one kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.launching import Launcher, starts_early


@triton.jit
def _rms_norm(
    x, branch, weight, total, normed, scale, epsilon,
    x_stride: tl.constexpr, branch_stride: tl.constexpr, width: tl.constexpr, add: tl.constexpr, block: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """One row a program: its numbers stay in registers between the sum of their squares and their scaling."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if add:
        added = tl.load(branch + row * branch_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = (values + added * scale).to(total.dtype.element_ty)
        tl.store(total + row * width + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / width + epsilon)
    tl.store(normed + row * width + columns, (values * inverse * factors).to(normed.dtype.element_ty), mask=inside)


_launcher = Launcher(_rms_norm)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float = 0.0) -> torch.Tensor:
    """Compute `LayerKernels.rms_norm`; the weight has the offset in it. Rows may lie apart; there may be none."""
    assert offset == 0.0
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        _launch(rows, rows, weight, normed, normed, 1.0, epsilon, False)
    return normed


def add_rms_norm(
    residual: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor, epsilon: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Do `LayerKernels.add_rms_norm` of [rows, width]; the weight has the offset in it. The norm is that of the sum
    as it is rounded to the residual's type."""
    assert offset == 0.0
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    if len(residual):
        _launch(residual, branch, weight, total, normed, scale, epsilon, True)
    return total, normed


def _launch(
    x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, total: torch.Tensor, normed: torch.Tensor,
    scale: float, epsilon: float, add: bool,
) -> None:  # fmt: skip
    rows, width = x.shape
    block = 1 << (width - 1).bit_length()
    constants = (x.stride(0), branch.stride(0), width, add, block, starts_early(x.device))
    _launcher(
        (rows, 1, 1), (x, branch, weight, total, normed), (float(scale), float(epsilon)), constants,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
