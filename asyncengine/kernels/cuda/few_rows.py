"""Products of a few rows with a weight as torch keeps it, at the speed at which memory gives the weight.

For one row and a small matrix a library's product spends more time on its start and on adding up parts than on reading
the weight. Here each program makes a few outputs from all of the inputs, so that nothing is left to add up, and many
programs keep many loads under way.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.launching import early

_THREAD_INPUTS = 8
"""Numbers of 16 bits that a thread loads at once."""


@triton.jit
def _inputs(x, k, inside, inputs: tl.constexpr, gated: tl.constexpr):
    """One row of x in float32; gated: silu of its first half times its second, rounded as if it had been stored."""
    values = tl.load(x + k, mask=inside, other=0.0)
    if gated:
        gate = values.to(tl.float32)
        up = tl.load(x + inputs + k, mask=inside, other=0.0).to(tl.float32)
        values = (gate / (1.0 + tl.exp(-gate)) * up).to(values.dtype)
    return values.to(tl.float32)


@triton.jit
def _fetch(weight, n, outputs, inputs: tl.constexpr, lines: tl.constexpr):
    """Have the rows of a program brought to the second-level cache, in lines of 64 numbers."""
    rows = weight + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * inputs
    places = rows + tl.minimum(tl.arange(0, lines) * 64, inputs - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _store(out, row, rows, stride, n, real, total, bias, has_bias: tl.constexpr):
    if has_bias:
        total += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * stride + n, total.to(out.dtype.element_ty), mask=real & (n * 0 + row < rows))


@triton.jit(do_not_specialize=["rows"])
def _sum_rows(
    x, weight, bias, out, rows, x_stride, out_stride, outputs,
    inputs: tl.constexpr, most: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    gated: tl.constexpr, has_bias: tl.constexpr, pdl: tl.constexpr, lines: tl.constexpr,
):  # fmt: skip
    """Up to four rows by multiplying and adding. Rows that are not there are the last one again, and not stored."""
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    real = n < outputs
    starts = weight + n.to(tl.int64)[:, None] * inputs
    if pdl:
        gdc_launch_dependents()
        if lines > 0:
            _fetch(weight, n, outputs, inputs, lines)
        gdc_wait()
    last = rows - 1
    one = tl.zeros([block_n, block_k], tl.float32)
    two = tl.zeros([block_n, block_k], tl.float32)
    three = tl.zeros([block_n, block_k], tl.float32)
    four = tl.zeros([block_n, block_k], tl.float32)
    for begin in tl.static_range(0, inputs, block_k):
        k = begin + tl.arange(0, block_k)
        inside = k < inputs
        w = tl.load(starts + k[None, :], mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        one += w * _inputs(x, k, inside, inputs, gated)[None, :]
        if most > 1:
            two += w * _inputs(x + tl.minimum(last, 1) * x_stride, k, inside, inputs, gated)[None, :]
        if most > 2:
            three += w * _inputs(x + tl.minimum(last, 2) * x_stride, k, inside, inputs, gated)[None, :]
            four += w * _inputs(x + tl.minimum(last, 3) * x_stride, k, inside, inputs, gated)[None, :]
    _store(out, 0, rows, out_stride, n, real, tl.sum(one, 1), bias, has_bias)
    if most > 1:
        _store(out, 1, rows, out_stride, n, real, tl.sum(two, 1), bias, has_bias)
    if most > 2:
        _store(out, 2, rows, out_stride, n, real, tl.sum(three, 1), bias, has_bias)
        _store(out, 3, rows, out_stride, n, real, tl.sum(four, 1), bias, has_bias)


@triton.jit(do_not_specialize=["rows"])
def _dot_rows(
    x, weight, bias, out, rows, x_stride, out_stride, outputs,
    inputs: tl.constexpr, shares: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    gated: tl.constexpr, has_bias: tl.constexpr, pdl: tl.constexpr, lines: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Up to sixteen rows on tensor cores. Each of `shares` warps goes through a share of the inputs by itself."""
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    real = n < outputs
    share = tl.arange(0, shares)
    row = tl.arange(0, 16)
    if pdl:
        gdc_launch_dependents()
        if lines > 0:
            _fetch(weight, n, outputs, inputs, lines)
        gdc_wait()
    total = tl.zeros([shares, 16, block_n], tl.float32)
    for begin in tl.range(0, inputs, shares * block_k, num_stages=stages):
        k = begin + share[:, None] * block_k + tl.arange(0, block_k)[None, :]
        inside = k < inputs
        kept = (row < rows)[None, :, None] & inside[:, None, :]
        left = tl.load(x + row[None, :, None] * x_stride + k[:, None, :], mask=kept, other=0.0)
        if gated:
            gate = left.to(tl.float32)
            up = tl.load(x + inputs + row[None, :, None] * x_stride + k[:, None, :], mask=kept, other=0.0)
            left = (gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)).to(up.dtype)
        places = weight + n.to(tl.int64)[None, :, None] * inputs + k[:, None, :]
        w = tl.load(places, mask=real[None, :, None] & inside[:, None, :], other=0.0)
        total = tl.dot(left, tl.trans(w, 0, 2, 1), total)
    found = tl.sum(total, 0)
    if has_bias:
        found += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)[None, :]
    there = (row < rows)[:, None] & real[None, :]
    tl.store(out + row[:, None] * out_stride + n[None, :], found.to(out.dtype.element_ty), mask=there)


def few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False, kind: str = "dot",
    block: int = 8, warps: int = 4, step: int = 64, stages: int = 4, fetch: bool = True, pdl: bool = True,
) -> torch.Tensor:  # fmt: skip
    rows, (outputs, inputs) = len(x), weight.shape
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    options = early(x.device) if pdl else {"pdl": False}
    lines = triton.next_power_of_2(-(-inputs // 64)) if fetch else 0
    grid = (triton.cdiv(outputs, block),)
    given = (x, weight, x if bias is None else bias, out, rows, x.stride(0), outputs, outputs)
    if kind == "sum":
        _sum_rows[grid](
            *given, inputs=inputs, most=triton.next_power_of_2(rows), block_n=block, block_k=step, gated=gated,
            has_bias=bias is not None, lines=lines, num_warps=warps, **options,
        )  # fmt: skip
    else:
        _dot_rows[grid](
            *given, inputs=inputs, shares=warps, block_n=block, block_k=step, gated=gated, has_bias=bias is not None,
            lines=lines, stages=stages, num_warps=warps, **options,
        )  # fmt: skip
    return out
