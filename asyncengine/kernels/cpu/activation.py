"""Gated activations: the activation of one half of a merged product times the other half.

The exponential is a polynomial, as in Cephes: it costs a few instructions for sixteen numbers at once, where a call to
the mathematical library is made for each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.attention_softmax import exp2
from asyncengine.kernels.cpu.calls import address_of, call, name_of, team_kernel
from asyncengine.kernels.cpu.intrinsics import INT64, TAG, emitted
from asyncengine.kernels.cpu.jit import array, inline, narrow, pointer, serial_in_order, tag_of, widen
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.vectors import FLOATS, LANES, LONG, number_of, size_of

_LOG2E = 1.4426950408889634
_TAIL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Abramowitz and Stegun 7.1.26, off by 8e-8 at most."""


@emitted(INT64, INT64, TAG)
def gelu_row(builder: Any, address: Any, width: Any, kind: Any) -> None:
    """GELU of so many numbers in place, whole vectors of them."""
    with cgutils.for_range(builder, builder.udiv(width, LONG(LANES))) as loop:
        at = builder.add(address, builder.mul(loop.index, LONG(LANES * kind.bitwidth // 8)))
        vectors.write(builder, write_gelu(builder, vectors.read(builder, at, kind)), at, kind)


def write_gelu(builder: Any, x: Any) -> Any:
    """x times the normal distribution's integral (Hendrycks and Gimpel 2016), of sixteen float32; NaN of NaN."""

    def known(value: float) -> Any:
        return vectors.constant(FLOATS, value)

    size = vectors.call(builder, "llvm.fabs.v16f32", FLOATS, [x])
    near = builder.fdiv(known(1.0), vectors.multiply_add(builder, size, known(0.3275911 * 0.5**0.5), known(1.0)))
    tail = known(0.5 * _TAIL[0])
    for term in _TAIL[1:]:
        tail = vectors.multiply_add(builder, tail, near, known(0.5 * term))
    power = exp2(builder, builder.fmul(builder.fmul(size, size), known(-0.5 * _LOG2E)))
    tail = builder.fmul(builder.fmul(tail, near), power)
    whole = builder.fcmp_ordered(">", x, known(0.0))
    return builder.fmul(x, builder.select(whole, builder.fsub(known(1.0), tail), tail))


_WORK = 16
"""Bytes that could be read while an element is computed."""
_SILU, _GELU_TANH, _GELU, _RELU, _RELU2, _CLIP, _XIELU = range(7)
_NAMES = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "clip", "xielu")
UNGATED = 16
"""An offset of the number of an activation that applies to every number and not to one half."""


def _gated(activation: int, both: torch.Tensor) -> torch.Tensor:
    both = both.contiguous()
    *outer, width = both.shape
    width //= 2
    out = torch.empty((*outer, width), dtype=both.dtype)
    rows = out.numel() // width
    code = gate_code(activation, both.dtype)
    gate(both.data_ptr(), out.data_ptr(), rows, width, code, tag_of(both.dtype), use_team())
    return out


silu_and_mul = partial(_gated, _SILU)
"""[..., 2 * width] -> [..., width]: x / (1 + exp(-x)) of the first half, rounded to its type, times the second."""
gelu_tanh_and_mul = partial(_gated, _GELU_TANH)
"""The same with GELU by its approximation with tanh."""
gelu_and_mul = partial(_gated, _GELU)
"""The same with GELU by the error function."""


def in_place(name: str, parameters: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """One of `_NAMES` of every number of a contiguous tensor, which is overwritten and given back; None: another.

    `parameters`: what `layers.kernels.PARAMETRIC` says of that name, float32.
    """
    return partial(_activated, _NAMES.index(name), parameters) if name in _NAMES else None


def _activated(activation: int, parameters: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    width, own = x.shape[-1], 0 if parameters is None else parameters.data_ptr()
    activate(x.data_ptr(), x.numel() // width, width, activation, own, tag_of(x.dtype), use_team())
    return x


def gate_code(activation: int, dtype: torch.dtype) -> int:
    """The number as kernels take it: of a gated GELU, which few models have, the address of what computes rows of that
    type; compiled now if need be."""
    return address_of(_name_of_gate(activation, dtype)) if activation in (_GELU_TANH, _GELU) else activation


@cache
def _name_of_gate(activation: int, dtype: torch.dtype) -> str:
    rows = gate_by_gelu_tanh if activation == _GELU_TANH else gate_by_gelu
    return name_of(rows, (*(numba.types.int64,) * 5, numba.typeof(tag_of(dtype))))


def activation_id(between: object) -> int | None:
    """The number by which one of these is known (`gate_code`); None: it is none of them."""
    if not isinstance(between, partial):
        return None
    number: int = between.args[0] if between.args else -1
    return number if between.func is _gated else number + UNGATED if between.func is _activated else None


@inline
def exponential(x: np.float32) -> np.float32:
    """e^x to 2e-7 of itself, for x from -87 to 88; the nearest of those beyond."""
    x = np.float32(-87) if x < np.float32(-87) else x
    x = np.float32(88) if x > np.float32(88) else x
    whole = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    # ln 2 in two parts, the first of few bits: their products with a whole number lose nothing
    rest = (x - whole * np.float32(0.693359375)) + whole * np.float32(2.12194440e-4)
    power = _series(rest) * rest * rest + rest + np.float32(1)
    found: np.float32 = power * number_of((np.int32(whole) + np.int32(127)) << np.int32(23))
    return found


@inline
def _series(x: np.float32) -> np.float32:
    """(e^x - 1 - x) / x^2, for x from -0.35 to 0.35."""
    power = np.float32(1.9875691500e-4)
    power = power * x + np.float32(1.3981999507e-3)
    power = power * x + np.float32(8.3334519073e-3)
    power = power * x + np.float32(4.1665795894e-2)
    power = power * x + np.float32(1.6666665459e-1)
    return power * x + np.float32(5.0000001201e-1)


@inline
def _xielu(x: np.float32, up: np.float32, down: np.float32, beta: np.float32, epsilon: np.float32) -> np.float32:
    """`layers.xielu`. Near 0, e^x - 1 - x is a product: the difference would have no digits left."""
    least = epsilon if x > epsilon else x
    apart = exponential(least) - np.float32(1) - least
    apart = _series(least) * least * least if least > np.float32(-0.34) else apart
    below = (apart + (least - x)) * (down + beta)
    return (up * x * x if x > np.float32(0) else below) + beta * x


@inline
def silu(x: np.float32) -> np.float32:
    """x / (1 + e^-x)."""
    return x / (np.float32(1) + exponential(-x))


@inline
def _gelu_tanh(x: np.float32) -> np.float32:
    """0.5 x (1 + tanh(y)) is x / (1 + exp(-2 y))."""
    return x / (np.float32(1) + exponential(np.float32(-1.59576912) * (x + np.float32(0.044715) * x * x * x)))


@inline
def _gelu(x: np.float32) -> np.float32:
    """x times the normal distribution's integral, whose tail is Abramowitz and Stegun's 7.1.26, off by 8e-8 at most."""
    size = abs(x)
    near = np.float32(1) / (np.float32(1) + np.float32(0.3275911 * 0.70710678) * size)
    tail = np.float32(0.5 * 1.061405429)
    tail = tail * near + np.float32(0.5 * -1.453152027)
    tail = tail * near + np.float32(0.5 * 1.421413741)
    tail = tail * near + np.float32(0.5 * -0.284496736)
    tail = tail * near + np.float32(0.5 * 0.254829592)
    tail = tail * near * exponential(np.float32(-0.5) * size * size)
    return x * (np.float32(1) - tail if x > np.float32(0) else tail)


@inline
def _gate_rows(activation: Any, first: int, last: int, both: int, out: int, width: int, kind: np.generic) -> None:
    halves = array(pointer(both, kind), (last, 2, width))
    results = array(pointer(out, kind), (last, width))
    for row in range(first, last):
        for index in range(width):
            gate = widen(narrow(activation(widen(halves[row, 0, index])), kind))
            results[row, index] = narrow(gate * widen(halves[row, 1, index]), kind)


@team_kernel(lambda rows, width: (rows, rows * width * _WORK))
@serial_in_order
def gate(first: int, last: int, both: int, out: int, rows: int, width: int, code: int, kind: np.generic) -> None:
    """One of the gated activations above, by address; `code` is what `gate_code` says."""
    if code != _SILU:
        call(code, (first, last, both, out, width, kind))
    else:
        _gate_rows(silu, first, last, both, out, width, kind)


@serial_in_order
def gate_by_gelu_tanh(first: int, last: int, both: int, out: int, width: int, kind: np.generic) -> None:
    """Rows `first` to `last`, for `gate_code`."""
    _gate_rows(_gelu_tanh, first, last, both, out, width, kind)


@serial_in_order
def gate_by_gelu(first: int, last: int, both: int, out: int, width: int, kind: np.generic) -> None:
    """The same with GELU by the error function."""
    _gate_rows(_gelu, first, last, both, out, width, kind)


@team_kernel(lambda rows, width: (rows, rows * width * _WORK))
@serial_in_order
def activate(
    first: int, last: int, x: int, rows: int, width: int, activation: int, parameters: int, kind: np.generic
) -> None:
    """One of the activations above of every number, in place, by address."""
    numbers, known = array(pointer(x, kind), (last, width)), array(pointer(parameters, np.float32(0)), (4,))
    for row in range(first, last):
        if activation == _SILU:
            for index in range(width):
                numbers[row, index] = narrow(silu(widen(numbers[row, index])), kind)
        elif activation == _GELU_TANH:
            for index in range(width):
                numbers[row, index] = narrow(_gelu_tanh(widen(numbers[row, index])), kind)
        elif activation == _GELU and width % LANES == 0:
            gelu_row(x + row * width * size_of(kind), width, kind)
        elif activation == _GELU:
            for index in range(width):
                numbers[row, index] = narrow(_gelu(widen(numbers[row, index])), kind)
        elif activation == _CLIP:
            for index in range(width):
                number, limit = widen(numbers[row, index]), known[0]
                number = limit if number > limit else -limit if number < -limit else number
                numbers[row, index] = narrow(number, kind)
        elif activation == _XIELU:
            for index in range(width):
                number = _xielu(widen(numbers[row, index]), known[0], known[1], known[2], known[3])
                numbers[row, index] = narrow(number, kind)
        else:
            for index in range(width):
                number = widen(numbers[row, index])
                number = np.float32(0) if number < np.float32(0) else number
                numbers[row, index] = narrow(number * number if activation == _RELU2 else number, kind)


@team_kernel(lambda rows, width: (rows, rows * width * _WORK))
@serial_in_order
def gate_clamped(
    first: int, last: int, both: int, out: int, rows: int, width: int, alpha: np.float32, limit: np.float32,
    kind: np.generic,
) -> None:  # fmt: skip
    """[rows, 2 * width] -> [rows, width]: g / (1 + exp(-alpha g)) * (u + 1) of neighbours g and u (gpt-oss), by
    address. g is at most `limit`, u within -limit .. limit."""
    pairs = array(pointer(both, kind), (last, width, 2))
    results = array(pointer(out, kind), (last, width))
    for row in range(first, last):
        for index in range(width):
            gate_value, up = widen(pairs[row, index, 0]), widen(pairs[row, index, 1])
            # written so that what is no number stays so
            gate_value = limit if gate_value > limit else gate_value
            up = limit if up > limit else -limit if up < -limit else up
            gate_value = gate_value / (np.float32(1) + exponential(-alpha * gate_value))
            results[row, index] = narrow(gate_value * (up + np.float32(1)), kind)
