"""GELU by the error function, in vectors (Hendrycks and Gimpel 2016)."""

from __future__ import annotations

from typing import Any

import numba
from numba.core import cgutils
from numba.extending import intrinsic

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.attention_softmax import exp2
from asyncengine.kernels.cpu.vectors import FLOATS, LANES, LONG

_LOG2E = 1.4426950408889634
_TAIL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Abramowitz and Stegun 7.1.26, off by 8e-8 at most."""


def _gelu_row(_: Any, x: Any, width: Any, kind: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count = arguments[:2]
        with cgutils.for_range(builder, builder.udiv(count, LONG(LANES))) as loop:
            at = builder.add(address, builder.mul(loop.index, LONG(LANES * kind.bitwidth // 8)))
            vectors.write(builder, write_gelu(builder, vectors.read(builder, at, kind)), at, kind)
        return context.get_dummy_value()

    return numba.types.void(numba.types.int64, numba.types.int64, kind), generate


def write_gelu(builder: Any, x: Any) -> Any:
    """x times the normal distribution's integral, of sixteen float32; NaN of NaN."""

    def known(value: float) -> Any:
        return vectors.constant(FLOATS, value)

    size = vectors.call(builder, "llvm.fabs.v16f32", FLOATS, [x])
    near = builder.fdiv(
        known(1.0), vectors.multiply_add(builder, size, known(0.3275911 * 0.5**0.5), known(1.0))
    )  # fmt: skip
    tail = known(0.5 * _TAIL[0])
    for term in _TAIL[1:]:
        tail = vectors.multiply_add(builder, tail, near, known(0.5 * term))
    power = exp2(builder, builder.fmul(builder.fmul(size, size), known(-0.5 * _LOG2E)))
    tail = builder.fmul(builder.fmul(tail, near), power)
    whole = builder.fcmp_ordered(">", x, known(0.0))
    return builder.fmul(x, builder.select(whole, builder.fsub(known(1.0), tail), tail))


gelu_row: Any = intrinsic(_gelu_row)
"""gelu_row(address, width, kind), inside kernels: of so many numbers in place, whole vectors of them."""
