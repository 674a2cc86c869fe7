"""One head of a query or key before attention: its norm, and its rotation.

The norm's weight is float32 and its result is rounded once; the rotation's roundings are where the modules of
transformers have them, after each operation of theirs.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.jit import array, narrow, pointer, serial_in_order, widen
from asyncengine.kernels.cpu.vectors import FLOATS, LANES, LONG, WORDS, load, square_sum, store

_HALF = numba.types.uint16
_HALVES = ir.VectorType(ir.IntType(16), LANES)


@serial_in_order
def prepare_head(
    source: int, out: int, dim: int, norm: int, epsilon: np.float32, cos: int, sin: int, rotary: int, kind: Any
) -> None:
    """Normalise by the root of the mean square (`norm` 0: not), then rotate the first `rotary` dimensions by halves."""
    scale = np.float32(1)
    if norm != 0:
        scale = np.float32(1) / np.sqrt(square_sum(source, dim, kind) / np.float32(dim) + epsilon)
    if dim % LANES == 0 and rotary % (2 * LANES) == 0:
        _rotate_vectors(source, out, dim, norm, scale, cos, sin, rotary, kind)
    else:
        _rotate_numbers(source, out, dim, norm, scale, cos, sin, rotary, kind)


@serial_in_order
def _rotate_numbers(
    source: int, out: int, dim: int, norm: int, scale: np.float32, cos: int, sin: int, rotary: int, kind: Any
) -> None:
    values, results = array(pointer(source, kind), (dim,)), array(pointer(out, kind), (dim,))
    if norm != 0:
        weights = array(pointer(norm, np.float32(0)), (dim,))
        for index in range(dim):
            results[index] = narrow(widen(values[index]) * scale * weights[index], kind)
    else:
        for index in range(dim):
            results[index] = values[index]
    half = rotary // 2
    cosines, sines = array(pointer(cos, kind), (rotary,)), array(pointer(sin, kind), (rotary,))
    for index in range(half):
        first, second = widen(results[index]), widen(results[index + half])
        cosine_part = narrow(first * widen(cosines[index]), kind)
        sine_part = narrow(-second * widen(sines[index]), kind)
        results[index] = narrow(widen(cosine_part) + widen(sine_part), kind)
        cosine_part = narrow(second * widen(cosines[index + half]), kind)
        sine_part = narrow(first * widen(sines[index + half]), kind)
        results[index + half] = narrow(widen(cosine_part) + widen(sine_part), kind)


def _rotate(
    _: Any, source: Any, out: Any, dim: Any, norm: Any, scale: Any, cos: Any, sin: Any, rotary: Any, kind: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        normed = builder.icmp_signed("!=", arguments[3], LONG(0))
        with builder.if_else(normed) as (then, otherwise):
            with then:
                _write_rotation(builder, kind, True, *arguments[:8])
            with otherwise:
                _write_rotation(builder, kind, False, *arguments[:8])
        return context.get_dummy_value()

    whole = numba.types.int64
    return numba.types.void(whole, whole, whole, whole, numba.types.float32, whole, whole, whole, kind), generate


def _write_rotation(
    builder: Any, kind: Any, normed: bool, source: Any, out: Any, dim: Any, norm: Any, scale: Any, cos: Any, sin: Any,
    rotary: Any,
) -> None:  # fmt: skip
    factor = vectors.splat(builder, scale)

    def place(base: Any, index: Any) -> Any:
        return builder.add(base, builder.mul(index, LONG(kind.bitwidth // 8)))

    def read(base: Any, index: Any) -> Any:
        return _read(builder, place(base, index), kind)

    def normal(index: Any) -> Any:
        own = read(source, index)
        if not normed:
            return own
        weights = load(builder, builder.add(norm, builder.mul(index, LONG(4))), FLOATS)
        return _rounded(builder, builder.fmul(builder.fmul(own, factor), weights), kind)

    def product(left: Any, base: Any, index: Any) -> Any:
        return _rounded(builder, builder.fmul(left, read(base, index)), kind)

    half = builder.lshr(rotary, LONG(1))
    with cgutils.for_range(builder, builder.udiv(half, LONG(LANES))) as loop:
        low = builder.mul(loop.index, LONG(LANES))
        high = builder.add(low, half)
        first, second = normal(low), normal(high)
        minus = builder.fsub(ir.Constant(FLOATS, [-0.0] * LANES), second)
        _write(builder, builder.fadd(product(first, cos, low), product(minus, sin, low)), place(out, low), kind)
        _write(builder, builder.fadd(product(second, cos, high), product(first, sin, high)), place(out, high), kind)
    rest = builder.udiv(builder.sub(dim, rotary), LONG(LANES))
    with cgutils.for_range(builder, rest) as loop:
        index = builder.add(rotary, builder.mul(loop.index, LONG(LANES)))
        _write(builder, normal(index), place(out, index), kind)


def _read(builder: Any, address: Any, kind: Any) -> Any:
    if kind != _HALF:
        return load(builder, address, FLOATS)
    return _widened(builder, load(builder, address, _HALVES))


def _write(builder: Any, floats: Any, address: Any, kind: Any) -> None:
    store(builder, vectors.narrow(builder, floats) if kind == _HALF else floats, address)


def _rounded(builder: Any, floats: Any, kind: Any) -> Any:
    return _widened(builder, vectors.narrow(builder, floats)) if kind == _HALF else floats


def _widened(builder: Any, halves: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(halves, WORDS), vectors.constant(WORDS, 16)), FLOATS)


_rotate_vectors: Any = intrinsic(_rotate)
"""`_rotate_numbers` in vectors, where `dim` is a multiple of sixteen and `rotary` one of thirty-two."""
