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
def gelu_row(builder: Any, address: Any, width: Any, dtype: Any) -> None:
    """Apply GELU in place to `width` numbers, a multiple of `LANES`."""
    with cgutils.for_range(builder, builder.udiv(width, LONG(LANES))) as loop:
        at = builder.add(address, builder.mul(loop.index, LONG(LANES * dtype.bitwidth // 8)))
        vectors.write(builder, write_gelu(builder, vectors.read(builder, at, dtype)), at, dtype)


def write_gelu(builder: Any, x: Any) -> Any:
    """GELU of sixteen float32, x times the normal distribution's integral (Hendrycks and Gimpel 2016); NaN of NaN."""

    def floats(value: float) -> Any:
        return vectors.constant(FLOATS, value)

    magnitude = vectors.call(builder, "llvm.fabs.v16f32", FLOATS, [x])
    t = builder.fdiv(floats(1.0), vectors.multiply_add(builder, magnitude, floats(0.3275911 * 0.5**0.5), floats(1.0)))
    tail = floats(0.5 * _TAIL[0])
    for term in _TAIL[1:]:
        tail = vectors.multiply_add(builder, tail, t, floats(0.5 * term))
    density = exp2(builder, builder.fmul(builder.fmul(magnitude, magnitude), floats(-0.5 * _LOG2E)))
    tail = builder.fmul(builder.fmul(tail, t), density)
    positive = builder.fcmp_ordered(">", x, floats(0.0))
    return builder.fmul(x, builder.select(positive, builder.fsub(floats(1.0), tail), tail))


_WORK = 16
"""Bytes that could be read while an element is computed."""
_SILU, _GELU_TANH, _GELU, _RELU, _RELU2, _CLIP, _XIELU = range(7)
_NAMES = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "clip", "xielu")
UNGATED = 16
"""The offset of the ids of activations of every number; those below it are of one half, and gate the other."""


def _gated(activation: int, gate_up: torch.Tensor) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    *outer, width = gate_up.shape
    width //= 2
    out = torch.empty((*outer, width), dtype=gate_up.dtype)
    rows = out.numel() // width
    code = gate_code(activation, gate_up.dtype)
    gate(gate_up.data_ptr(), out.data_ptr(), rows, width, code, tag_of(gate_up.dtype), use_team())
    return out


silu_and_mul = partial(_gated, _SILU)
"""[..., 2 * width] -> [..., width]: x / (1 + exp(-x)) of the first half, rounded to its type, times the second."""
gelu_tanh_and_mul = partial(_gated, _GELU_TANH)
"""The same with GELU by its approximation with tanh."""
gelu_and_mul = partial(_gated, _GELU)
"""The same with GELU by the error function."""


def elementwise(name: str, parameters: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function that overwrites a contiguous tensor with an activation of its numbers and returns it. None if `name`
    is not one of `_NAMES`. `parameters`: float32, as `layers.kernels.PARAMETRIC` describes them for that name."""
    return partial(_activated, _NAMES.index(name), parameters) if name in _NAMES else None


def _activated(activation: int, parameters: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    width, constants = x.shape[-1], 0 if parameters is None else parameters.data_ptr()
    activate(x.data_ptr(), x.numel() // width, width, activation, constants, tag_of(x.dtype), use_team())
    return x


def gate_code(activation: int, dtype: torch.dtype) -> int:
    """The `code` of a gated activation for `gate`. A gated GELU, which few models have, is a function of its own, whose
    code is its address: it is compiled now if need be."""
    return address_of(_name_of_gate(activation, dtype)) if activation in (_GELU_TANH, _GELU) else activation


@cache
def _name_of_gate(activation: int, dtype: torch.dtype) -> str:
    rows = gate_by_gelu_tanh if activation == _GELU_TANH else gate_by_gelu
    return name_of(rows, (*(numba.types.int64,) * 5, numba.typeof(tag_of(dtype))))


def activation_id(function: object) -> int | None:
    """The id of a function that was made here, for `gate_code` or with `UNGATED` added; None for any other function."""
    if not isinstance(function, partial):
        return None
    activation: int = function.args[0] if function.args else -1
    return activation if function.func is _gated else activation + UNGATED if function.func is _activated else None


@inline
def exponential(x: np.float32) -> np.float32:
    """e^x within a relative error of 2e-7; x is clamped to -87 .. 88, so that the result is finite and normal."""
    x = np.float32(-87) if x < np.float32(-87) else x
    x = np.float32(88) if x > np.float32(88) else x
    exponent = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    # ln 2 in two parts, the first of few bits: their products with a whole number lose nothing
    remainder = (x - exponent * np.float32(0.693359375)) + exponent * np.float32(2.12194440e-4)
    mantissa = _series(remainder) * remainder * remainder + remainder + np.float32(1)
    result: np.float32 = mantissa * number_of((np.int32(exponent) + np.int32(127)) << np.int32(23))
    return result


@inline
def _series(x: np.float32) -> np.float32:
    """(e^x - 1 - x) / x^2, for x from -0.35 to 0.35."""
    # written out: the compiler does not unroll a loop over coefficients, which takes three to eight times as long
    power = np.float32(1.9875691500e-4)
    power = power * x + np.float32(1.3981999507e-3)
    power = power * x + np.float32(8.3334519073e-3)
    power = power * x + np.float32(4.1665795894e-2)
    power = power * x + np.float32(1.6666665459e-1)
    return power * x + np.float32(5.0000001201e-1)


@inline
def _xielu(x: np.float32, alpha_p: np.float32, alpha_n: np.float32, beta: np.float32, eps: np.float32) -> np.float32:
    """`layers.xielu`. Near 0, e^x - 1 - x is a product: the difference would have no digits left."""
    clipped = eps if x > eps else x
    difference = exponential(clipped) - np.float32(1) - clipped
    difference = _series(clipped) * clipped * clipped if clipped > np.float32(-0.34) else difference
    negative = (difference + (clipped - x)) * (alpha_n + beta)
    return (alpha_p * x * x if x > np.float32(0) else negative) + beta * x


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
    magnitude = abs(x)
    t = np.float32(1) / (np.float32(1) + np.float32(0.3275911 * 0.70710678) * magnitude)
    tail = np.float32(0.5 * 1.061405429)
    tail = tail * t + np.float32(0.5 * -1.453152027)
    tail = tail * t + np.float32(0.5 * 1.421413741)
    tail = tail * t + np.float32(0.5 * -0.284496736)
    tail = tail * t + np.float32(0.5 * 0.254829592)
    tail = tail * t * exponential(np.float32(-0.5) * magnitude * magnitude)
    return x * (np.float32(1) - tail if x > np.float32(0) else tail)


@inline
def _gate_rows(activation: Any, first: int, last: int, gate_up: int, out: int, width: int, dtype: np.generic) -> None:
    halves = array(pointer(gate_up, dtype), (last, 2, width))
    results = array(pointer(out, dtype), (last, width))
    for row in range(first, last):
        for index in range(width):
            gate = widen(narrow(activation(widen(halves[row, 0, index])), dtype))
            results[row, index] = narrow(gate * widen(halves[row, 1, index]), dtype)


@team_kernel(lambda rows, width: (rows, rows * width * _WORK))
@serial_in_order
def gate(first: int, last: int, gate_up: int, out: int, rows: int, width: int, code: int, dtype: np.generic) -> None:
    """One of the gated activations above, by address, of rows [first, last); `code`: from `gate_code`."""
    if code != _SILU:
        call(code, (first, last, gate_up, out, width, dtype))
    else:
        _gate_rows(silu, first, last, gate_up, out, width, dtype)


@serial_in_order
def gate_by_gelu_tanh(first: int, last: int, gate_up: int, out: int, width: int, dtype: np.generic) -> None:
    """Gated GELU, by its approximation with tanh, of rows [first, last); called by its address (`gate_code`)."""
    _gate_rows(_gelu_tanh, first, last, gate_up, out, width, dtype)


@serial_in_order
def gate_by_gelu(first: int, last: int, gate_up: int, out: int, width: int, dtype: np.generic) -> None:
    """Gated GELU, by the error function, of rows [first, last); called by its address."""
    _gate_rows(_gelu, first, last, gate_up, out, width, dtype)


@team_kernel(lambda rows, width: (rows, rows * width * _WORK))
@serial_in_order
def activate(
    first: int, last: int, x: int, rows: int, width: int, activation: int, parameters: int, dtype: np.generic
) -> None:
    """One of the activations above of every number, in place, by address, of rows [first, last)."""
    values, constants = array(pointer(x, dtype), (last, width)), array(pointer(parameters, np.float32(0)), (4,))
    for row in range(first, last):
        if activation == _SILU:
            for index in range(width):
                values[row, index] = narrow(silu(widen(values[row, index])), dtype)
        elif activation == _GELU_TANH:
            for index in range(width):
                values[row, index] = narrow(_gelu_tanh(widen(values[row, index])), dtype)
        elif activation == _GELU and width % LANES == 0:
            gelu_row(x + row * width * size_of(dtype), width, dtype)
        elif activation == _GELU:
            for index in range(width):
                values[row, index] = narrow(_gelu(widen(values[row, index])), dtype)
        elif activation == _CLIP:
            for index in range(width):
                value, limit = widen(values[row, index]), constants[0]
                value = limit if value > limit else -limit if value < -limit else value
                values[row, index] = narrow(value, dtype)
        elif activation == _XIELU:
            for index in range(width):
                value = _xielu(widen(values[row, index]), constants[0], constants[1], constants[2], constants[3])
                values[row, index] = narrow(value, dtype)
        else:
            for index in range(width):
                value = widen(values[row, index])
                value = np.float32(0) if value < np.float32(0) else value
                values[row, index] = narrow(value * value if activation == _RELU2 else value, dtype)


@team_kernel(lambda rows, width: (rows, rows * width * _WORK))
@serial_in_order
def gate_clamped(
    first: int, last: int, gate_up: int, out: int, rows: int, width: int, alpha: np.float32, limit: np.float32,
    dtype: np.generic,
) -> None:  # fmt: skip
    """[rows, 2 * width] -> [rows, width]: g / (1 + exp(-alpha g)) * (u + 1) of neighbours g and u (gpt-oss), by
    address. g is at most `limit`, u within -limit .. limit."""
    pairs = array(pointer(gate_up, dtype), (last, width, 2))
    results = array(pointer(out, dtype), (last, width))
    for row in range(first, last):
        for index in range(width):
            gate_value, up = widen(pairs[row, index, 0]), widen(pairs[row, index, 1])
            # comparisons with NaN are false, and the operand that each keeps then is the number itself: NaN stays NaN
            gate_value = limit if gate_value > limit else gate_value
            up = limit if up > limit else -limit if up < -limit else up
            gate_value = gate_value / (np.float32(1) + exponential(-alpha * gate_value))
            results[row, index] = narrow(gate_value * (up + np.float32(1)), dtype)
