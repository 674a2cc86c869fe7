"""RMS norms, alone, with the residual sum before them or with a gate, each in one kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

from typing import Literal

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


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float, size: int, *,
    norm: Literal["gated", "before gate"] | None = "before gate", activation: Literal["silu", "sigmoid"] = "silu",
    scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """x [rows, width], float32, normalised by groups of `size` and multiplied by the activated gate, in that order or,
    "gated", the other; None: not normalised. [rows, width] in the gate's dtype, times `scale`.

    `gate` [rows, width], whose rows may be part of longer ones. `weight` [width], or [size]: that of every group.
    """
    (rows, width), block = x.shape, triton.next_power_of_2(size)
    out = torch.empty((rows, width), dtype=gate.dtype, device=x.device)
    _gated_norm[(rows, width // size)](
        x, gate, weight, out, gate.stride(0), epsilon, scale, width, size, norm, activation == "silu",
        len(weight) == size, block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out


@triton.jit
def _gated_norm(
    x, gate, weight, out, gate_stride, epsilon, scale, width: tl.constexpr, size: tl.constexpr, norm: tl.constexpr,
    silu: tl.constexpr, shared: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One group of a row a program."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside, column = place < size, tl.program_id(1) * size + place
    values = tl.load(x + row * width + column, mask=inside, other=0.0)
    gates = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gates))
    if silu:
        factor *= gates
    if norm == "gated":
        values *= factor
    if norm is not None:
        values *= tl.rsqrt(tl.sum(values * values, 0) / size + epsilon)
        values *= tl.load(weight + (place if shared else column), mask=inside, other=0.0).to(tl.float32)
    if norm != "gated":
        values *= factor
    tl.store(out + row * width + column, (values * scale).to(out.dtype.element_ty), mask=inside)
