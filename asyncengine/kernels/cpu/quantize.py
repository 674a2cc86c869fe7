"""Rounding of weights to the whole numbers that `gemm_quantized` multiplies.

8 bits: each output has one scale, its largest weight over 127. 4 bits: every 32 inputs of an output have a scale and a
minimum, taken among a few as those with the least squared error.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.calls import team_kernel
from asyncengine.kernels.cpu.intrinsics import INT64, TAG, emitted
from asyncengine.kernels.cpu.jit import allocates, array, inline, keep, pointer, room, serial, tag_of, widen
from asyncengine.kernels.cpu.panel_form import INT4_GROUP, PANEL, UNIT, int_form
from asyncengine.kernels.cpu.quantized_panels import pack_units
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.vectors import FLOAT, FLOATS, LANES, LONG, WORD, WORDS, constant, load, splat, store

# The innermost part of rounding to 4 bits: one group of inputs of a panel's outputs, an output in each lane.

ENDS = ((0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.05, 0.0), (0.0, 0.05), (0.1, 0.0), (0.0, 0.1))
"""Parts of a group's range by which its ends are drawn in, below and above: the first guesses of its sixteen steps."""
_MOST = 15.0


@emitted(*[INT64] * 6)
def round_group(builder: Any, values: Any, count: Any, present: Any, scales: Any, minima: Any, numbers: Any) -> None:
    """Round the float32 [INT4_GROUP, 16] at `values`, of which the first `count` inputs of the first `present` outputs
    are weights and the rest is 0, to 16 scales and 16 minima of bfloat16 and numbers of 4 bits; all 0 for the rest.
    """
    in_outputs = _below(builder, present)
    best = _best_steps(builder, values)
    for fitted, plane in zip(best, (scales, minima), strict=True):
        half = vectors.narrow(builder, fitted)
        store(builder, builder.select(in_outputs, half, constant(half.type, 0)), plane)
    scale, minimum = best
    inverse = _inverse(builder, scale)
    lines = INT4_GROUP // UNIT * 2
    with cgutils.for_range(builder, LONG(lines)) as loop:
        line = constant(WORDS, 0)
        for position in range(UNIT // 2):
            index = builder.add(builder.mul(loop.index, LONG(UNIT // 2)), LONG(position))
            number = builder.fptosi(_nearest(builder, _value(builder, values, index), minimum, inverse), WORDS)
            is_weight = builder.and_(in_outputs, splat(builder, builder.icmp_signed("<", index, count)))
            kept = builder.select(is_weight, number, constant(WORDS, 0))
            line = builder.or_(line, builder.shl(kept, constant(WORDS, position % 4 * 8 + position // 4 * 4)))
        store(builder, line, builder.add(numbers, builder.mul(loop.index, LONG(vectors.LINE))))


@emitted(*[INT64] * 3, TAG)
def columns(builder: Any, source: Any, stride: Any, target: Any, dtype: Any) -> None:
    """Transpose 16 numbers of each of 16 rows, which are `stride` bytes apart, as float32 [16 numbers, 16 rows]."""
    item = ir.IntType(16) if dtype == numba.types.uint16 else WORD
    rows = [
        load(builder, builder.add(source, builder.mul(stride, LONG(row))), ir.VectorType(item, LANES))
        for row in range(LANES)
    ]
    halves = [
        ir.Constant(WORDS, [lane // 2 + lane % 2 * LANES for lane in range(first, first + LANES)])
        for first in (0, LANES)
    ]
    for _ in range(LANES.bit_length() - 1):  # each turn brings numbers of two rows side by side
        pairs = zip(rows[: LANES // 2], rows[LANES // 2 :], strict=True)
        rows = [builder.shuffle_vector(*pair, half) for pair in pairs for half in halves]
    for column, numbers in enumerate(rows):
        words = builder.shl(builder.zext(numbers, WORDS), constant(WORDS, 16)) if item != WORD else numbers
        store(builder, words, builder.add(target, LONG(column * LANES * 4)))


def _value(builder: Any, start: Any, index: Any) -> Any:
    return load(builder, builder.add(start, builder.mul(index, LONG(LANES * 4))), FLOATS)


def _below(builder: Any, count: Any) -> Any:
    """Lanes that are below a count."""
    lanes = ir.Constant(WORDS, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, WORD)))


def _nearest(builder: Any, value: Any, minimum: Any, inverse: Any) -> Any:
    """The nearest whole numbers of 0 .. 15, as float32."""
    rounded = builder.fmul(builder.fadd(value, minimum), inverse)
    rounded = vectors.call(builder, "llvm.rint.v16f32", FLOATS, [rounded])
    for bound, beyond in ((constant(FLOATS, 0.0), "<"), (constant(FLOATS, _MOST), ">")):
        rounded = builder.select(builder.fcmp_ordered(beyond, rounded, bound), bound, rounded)
    return rounded


def _inverse(builder: Any, scale: Any) -> Any:
    one, zero = constant(FLOATS, 1.0), constant(FLOATS, 0.0)
    return builder.select(builder.fcmp_ordered(">", scale, constant(FLOATS, 1e-30)), builder.fdiv(one, scale), zero)


def _ends(builder: Any, start: Any) -> list[Any]:
    """The least and the largest of each lane."""
    ends = [cgutils.alloca_once_value(builder, _value(builder, start, LONG(0))) for _ in range(2)]
    with cgutils.for_range(builder, LONG(INT4_GROUP)) as loop:
        value = _value(builder, start, loop.index)
        for end, beyond in zip(ends, ("<", ">"), strict=True):
            before = builder.load(end)
            builder.store(builder.select(builder.fcmp_ordered(beyond, value, before), value, before), end)
    return [builder.load(end) for end in ends]


def _best_steps(builder: Any, start: Any) -> list[Any]:
    """Scale and minimum of each lane, numbers of bfloat16: those with the least squared error among what the guesses of
    `ENDS` lead to."""
    low, high = _ends(builder, start)
    span, zero = builder.fsub(high, low), constant(FLOATS, 0.0)
    best = [cgutils.alloca_once_value(builder, zero) for _ in range(2)]
    least = cgutils.alloca_once_value(builder, constant(FLOATS, float("inf")))
    sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(5)]
    guesses = ir.Constant(ir.ArrayType(FLOAT, 2 * len(ENDS)), [x for a, b in ENDS for x in (a, (1 - a - b) / _MOST)])
    guessed = cgutils.global_constant(builder, "ends", guesses)
    with cgutils.for_range(builder, LONG(len(ENDS))) as choice:
        first = builder.mul(choice.index, LONG(2))
        numbers = (builder.gep(guessed, [LONG(0), builder.add(first, LONG(item))]) for item in (0, 1))
        fraction, step = (splat(builder, builder.load(number)) for number in numbers)
        for total in sums:
            builder.store(zero, total)
        guess = builder.fneg(vectors.multiply_add(builder, span, fraction, low)), builder.fmul(span, step)
        fitted = _fitted(builder, start, low, guess, sums[:4])
        inverse, negative = _inverse(builder, fitted[0]), builder.fneg(fitted[0])
        with cgutils.for_range(builder, LONG(INT4_GROUP)) as loop:
            value = _value(builder, start, loop.index)
            number = _nearest(builder, value, fitted[1], inverse)
            error = vectors.multiply_add(builder, number, negative, builder.fadd(value, fitted[1]))
            builder.store(vectors.multiply_add(builder, error, error, builder.load(sums[4])), sums[4])
        total = builder.load(sums[4])
        better = builder.fcmp_ordered("<", total, builder.load(least))
        for cell, candidate in zip((*best, least), (*fitted, total), strict=True):
            builder.store(builder.select(better, candidate, builder.load(cell)), cell)
    return [builder.load(cell) for cell in best]


def _fitted(builder: Any, start: Any, low: Any, guess: Any, sums: list[Any]) -> list[Any]:
    """Scale and minimum that fit best the numbers to which a guess (minimum, scale) rounds, by linear regression:
    rounded to bfloat16. `low`: the least of each lane, which is subtracted first, so that sums do not cancel."""
    minimum, inverse = guess[0], _inverse(builder, guess[1])
    with cgutils.for_range(builder, LONG(INT4_GROUP)) as loop:
        value = _value(builder, start, loop.index)
        number, above = _nearest(builder, value, minimum, inverse), builder.fsub(value, low)
        one = constant(FLOATS, 1.0)
        pairs = ((number, one), (number, number), (above, one), (number, above))
        for total, (left, right) in zip(sums, pairs, strict=True):
            builder.store(vectors.multiply_add(builder, left, right, builder.load(total)), total)
    numbers, squares, aboves, products = (builder.load(total) for total in sums)
    count = constant(FLOATS, float(INT4_GROUP))
    variance = vectors.multiply_add(builder, builder.fneg(numbers), numbers, builder.fmul(count, squares))
    covariance = vectors.multiply_add(builder, builder.fneg(numbers), aboves, builder.fmul(count, products))
    varies = builder.fcmp_ordered(">", variance, constant(FLOATS, 0.0))
    scale = builder.select(varies, builder.fdiv(covariance, variance), constant(FLOATS, 0.0))
    residual = vectors.multiply_add(builder, builder.fneg(scale), numbers, aboves)
    least = builder.fneg(vectors.multiply_add(builder, residual, constant(FLOATS, 1.0 / INT4_GROUP), low))
    return [vectors.widen_halves(builder, vectors.narrow(builder, fitted), "bfloat16") for fitted in (scale, least)]


_KEPT = INT4_GROUP * PANEL
_WORK = 64
"""Bytes that could be read while a weight is rounded."""
_SIZE = np.int32(2**31 - 1)
"""Bits of a float32 without its sign."""


def quantize_rows(
    weight: torch.Tensor, panels: torch.Tensor, row_scales: torch.Tensor | None, bits: int, first: int
) -> None:
    """Round a bfloat16 or float32 weight [n, inputs] into rows `first` to `first + n` of panels of
    `panel_form.int_form`. `row_scales` float32 [outputs] are for 8 bits only.

    `first` is a multiple of `PANEL`; so is n, or these are the last rows.
    """
    weight, form = weight.contiguous(), int_form(bits)
    rows, inputs = weight.shape
    chunks, panel = panels.shape[1], panels[first // PANEL :]
    assert form.chunks(inputs) == chunks
    assert first % PANEL == 0
    assert -(-rows // PANEL) <= len(panel)
    assert (row_scales is not None) == (bits == 8)
    scales = 0 if row_scales is None else row_scales[first:].data_ptr()
    offset = form.planes["minima"][0] if bits == 4 else 0
    _to_panels(
        weight.data_ptr(), panel.data_ptr(), scales, rows, inputs, chunks, form.chunk, form.chunk_bytes, form.head,
        bits, offset, tag_of(weight.dtype), use_team(),
    )  # fmt: skip


@team_kernel(lambda rows, inputs: (-(-rows // PANEL), rows * inputs * _WORK))
@serial
@allocates
def _to_panels(
    begin: int, end: int, weight: int, panels: int, row_scales: int, rows: int, inputs: int, chunks: int,
    chunk: int, chunk_bytes: int, head: int, bits: int, offset: int, dtype: np.generic,
) -> None:  # fmt: skip
    """A panel's numbers never leave the core's own cache between being rounded and being packed."""
    wide = chunks * chunk
    values = array(pointer(weight, dtype), (rows, inputs))
    buffer = np.zeros(PANEL * wide if bits == 8 else 1, np.uint8)
    words = array(pointer(np.int64(buffer.ctypes.data), np.uint32(0)), (PANEL, wide // 4))
    numbers = array(pointer(np.int64(buffer.ctypes.data), np.uint8(0)), (PANEL, wide))
    for panel in range(begin, end):
        panel_start, first = panels + panel * chunks * chunk_bytes, panel * PANEL
        present = min(PANEL, rows - first)
        if bits == 8:
            scales = array(pointer(row_scales, np.float32(0)), (rows,))
            for lane in range(present):
                scales[first + lane] = _row_to_int8(values[first + lane], numbers[lane], inputs)
            for lane in range(present, PANEL):
                for index in range(wide):
                    numbers[lane, index] = 0
        for index in range(chunks):
            target = panel_start + index * chunk_bytes
            if bits == 8:
                pack_units(words, target + head, index * chunk, chunk, bits)
            else:
                _chunk_to_int4(values[first : first + present], index * chunk, chunk, target, offset, target + head)
    keep(buffer)


@inline
def _chunk_to_int4(values: Any, begin: int, chunk: int, scales: int, minima: int, numbers: int) -> None:
    """The groups of a chunk, whose first input is `begin`: `values` [16 outputs at most, inputs]. `minima`: bytes from
    scales to minima."""
    group_values, present, inputs = room(_KEPT, np.float32(0)), values.shape[0], values.shape[1]
    for group in range(chunk // INT4_GROUP):
        first = begin + group * INT4_GROUP
        count = max(min(INT4_GROUP, inputs - first), 0)
        if count == INT4_GROUP and present == PANEL:
            for block in range(INT4_GROUP // PANEL):
                start = np.int64(values[0, first + block * PANEL :].ctypes.data)
                into = np.int64(group_values.ctypes.data) + block * PANEL * PANEL * 4
                columns(start, values.strides[0], into, values[0, 0])
        else:
            for index in range(_KEPT):
                group_values[index] = 0
            for lane in range(present):
                for index in range(count):
                    group_values[index * PANEL + lane] = widen(values[lane, first + index])
        outputs = present if count > 0 else 0
        plane, target = scales + group * PANEL * 2, numbers + group * INT4_GROUP * PANEL // 2
        round_group(np.int64(group_values.ctypes.data), count, outputs, plane, plane + minima, target)


@inline
def _row_to_int8(values: Any, numbers: Any, inputs: int) -> np.float32:
    """The scale of a row whose numbers, 128 above what they stand for, are written."""
    size = np.int32(0)
    for index in range(inputs):
        size = max(size, np.int32(vectors.bits_of(widen(values[index])) & _SIZE))
    largest = vectors.number_of(size)
    factor = np.float32(127) / largest if largest > np.float32(1e-30) else np.float32(0)
    for index in range(inputs):
        numbers[index] = np.int32(np.rint(widen(values[index]) * factor)) + 128
    return np.float32(largest / np.float32(127))
