"""Products of a few rows with a weight as torch keeps it, at the speed at which memory gives the weight.

For one row and a small matrix a library's product spends more time on its start and on adding partial sums than on
reading the weight. Here each program makes a few outputs from all of the inputs, so that there are no partial sums, and
many programs keep many loads under way.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.launching import Launcher, starts_early

_ROWS, _ELEMENTS = 4, 2**23
"""Most rows, and most elements of a weight that is multiplied with more than one: above, a library's is as fast."""


@triton.jit
def _times(w, x, row, rows, x_stride, k, inside):
    """Weights [outputs, inputs] times the inputs `k` of a row; of the last row where `row` is behind it."""
    values = tl.load(x + tl.minimum(row, rows - 1) * x_stride + k, mask=inside, other=0.0)
    return w * values.to(tl.float32)[None, :]


@triton.jit
def _store(out, row, rows, n, total, bias, outputs: tl.constexpr, has_bias: tl.constexpr):
    inside = n < outputs
    if has_bias:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + n, total.to(out.dtype.element_ty), mask=inside & (n * 0 + row < rows))


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, bias, out, rows,
    x_stride: tl.constexpr, outputs: tl.constexpr, inputs: tl.constexpr, several: tl.constexpr, gated: tl.constexpr,
    has_bias: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One row, or up to four. Gated: one row, with gates in the first half of the weight."""
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    lines = weight + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * inputs
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    one = tl.zeros([block_n, block_k], tl.float32)
    two, three, four = one, one, one
    for begin in tl.static_range(0, inputs, block_k):
        k = begin + tl.arange(0, block_k)
        inside = k < inputs
        w = tl.load(lines + k[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        one += _times(w, x, 0, rows, x_stride, k, inside)
        if gated:
            w = tl.load(lines + outputs * inputs + k[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            two += _times(w, x, 0, rows, x_stride, k, inside)
        elif several:
            two += _times(w, x, 1, rows, x_stride, k, inside)
            three += _times(w, x, 2, rows, x_stride, k, inside)
            four += _times(w, x, 3, rows, x_stride, k, inside)
    total = tl.sum(one, 1)
    if gated:
        total = total / (1.0 + tl.exp(-total)) * tl.sum(two, 1)
    _store(out, 0, rows, n, total, bias, outputs, has_bias)
    if several:
        _store(out, 1, rows, n, tl.sum(two, 1), bias, outputs, has_bias)
        _store(out, 2, rows, n, tl.sum(three, 1), bias, outputs, has_bias)
        _store(out, 3, rows, n, tl.sum(four, 1), bias, outputs, has_bias)


_launch = Launcher(_few_rows)


def pays(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> bool:
    """Whether these are few enough rows (an H200, 26 November 2026: one row of any matrix, four of a small one)."""
    if x.dim() != 2 or not len(x) or x.stride(1) != 1:
        return False
    return len(x) == 1 or (len(x) <= _ROWS and not gated and weight.numel() <= _ELEMENTS)


def few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [rows, inputs] times weight [outputs, inputs] transposed, plus bias, in x's type or `dtype`. Where it `pays`.

    Gated: silu of the first half of the outputs times the second, of one row without bias.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    outputs //= 2 if gated else 1
    block, warps = (4, 4) if inputs <= 2048 else (4, 8) if inputs % 2048 == 0 and inputs <= 8192 else (1, 4)
    out = x.new_empty((rows, outputs), dtype=dtype)
    constants = (
        x.stride(0), outputs, inputs, rows > 1, gated, bias is not None, block, 256 * warps,
        starts_early(x.device),
    )  # fmt: skip
    tensors = (x, weight, x if bias is None else bias, out)
    _launch((-(-outputs // block), 1, 1), tensors, (rows,), constants, num_warps=warps)
    return out
