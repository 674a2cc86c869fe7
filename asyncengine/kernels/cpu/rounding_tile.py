"""The innermost part of rounding to 4 bits: one group of inputs of a panel's outputs, an output in each lane.

Side by side in lanes, outputs need no sums across a vector, and each one's errors are added input after input: the
scale that is chosen is the same whatever vectors the CPU has. The numbers come out in the places that a panel has for
them (`panel_form`).
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from asyncengine.kernels.cpu.panel_form import GROUP, UNIT
from asyncengine.kernels.cpu.vectors import (
    FLOATS,
    LANES,
    LINE,
    LONG,
    WORD,
    WORDS,
    call,
    constant,
    load,
    multiply_add,
    narrow,
    splat,
    store,
    widen_halves,
)

SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, -1.15, -1.05, -0.95)
"""Candidates of the scale by which the largest weight is -8; negative: the largest is +7 or so."""
_LEAST, _MOST = -8.0, 7.0


def _round_group(_: Any, values: Any, count: Any, present: Any, scales: Any, numbers: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, inputs, outputs, plane, target = arguments
        there = _below(builder, outputs)
        largest = _largest(builder, start)
        best = narrow(builder, _best_scale(builder, start, largest))
        store(builder, builder.select(there, best, constant(best.type, 0)), plane)
        scale = widen_halves(builder, best, "bfloat16")
        inverse = _inverse(builder, scale)
        lines = GROUP // UNIT * 2
        with cgutils.for_range(builder, LONG(lines)) as loop:
            line = constant(WORDS, 0)
            for place in range(UNIT // 2):
                index = builder.add(builder.mul(loop.index, LONG(UNIT // 2)), LONG(place))
                rounded = _nearest(builder, builder.fmul(_value(builder, start, index), inverse))
                number = builder.add(builder.fptosi(rounded, WORDS), constant(WORDS, -int(_LEAST)))
                known = builder.and_(there, splat(builder, builder.icmp_signed("<", index, inputs)))
                kept = builder.select(known, number, constant(WORDS, 0))
                line = builder.or_(line, builder.shl(kept, constant(WORDS, place % 4 * 8 + place // 4 * 4)))
            store(builder, line, builder.add(target, builder.mul(loop.index, LONG(LINE))))
        return context.get_dummy_value()

    return numba.types.void(*[numba.types.int64] * 5), generate


round_group: Any = intrinsic(_round_group)
"""round_group(values, count, present, scales, numbers), inside kernels, all addresses but `count` and `present`: the
float32 [GROUP, 16] at `values`, of which the first `count` inputs of the first `present` outputs are there and the rest
is 0, as 16 scales of bfloat16 and 4-bit numbers, 8 above what they stand for; 0 for what is not there."""


def _columns(_: Any, source: Any, stride: Any, target: Any, kind: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, step, end = arguments[:3]
        item = ir.IntType(16) if kind == numba.types.uint16 else WORD
        rows = [
            load(builder, builder.add(start, builder.mul(step, LONG(row))), ir.VectorType(item, LANES))
            for row in range(LANES)
        ]
        halves = [
            ir.Constant(WORDS, [place // 2 + place % 2 * LANES for place in range(first, first + LANES)])
            for first in (0, LANES)
        ]
        for _ in range(LANES.bit_length() - 1):  # each turn brings numbers of two rows side by side
            pairs = zip(rows[: LANES // 2], rows[LANES // 2 :], strict=True)
            rows = [builder.shuffle_vector(*pair, half) for pair in pairs for half in halves]
        for column, numbers in enumerate(rows):
            words = builder.shl(builder.zext(numbers, WORDS), constant(WORDS, 16)) if item != WORD else numbers
            store(builder, words, builder.add(end, LONG(column * LANES * 4)))
        return context.get_dummy_value()

    return numba.types.void(*[numba.types.int64] * 3, kind), generate


columns: Any = intrinsic(_columns)
"""columns(source, stride, target, kind), inside kernels: 16 numbers of each of 16 rows, which are `stride` bytes apart,
as float32 [16 numbers, 16 rows] at `target`."""


def _value(builder: Any, start: Any, index: Any) -> Any:
    return load(builder, builder.add(start, builder.mul(index, LONG(LANES * 4))), FLOATS)


def _below(builder: Any, count: Any) -> Any:
    """Lanes that are below a count."""
    lanes = ir.Constant(WORDS, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, WORD)))


def _nearest(builder: Any, floats: Any) -> Any:
    """The nearest whole numbers of -8 .. 7."""
    found = call(builder, "llvm.rint.v16f32", FLOATS, [floats])
    for bound, beyond in ((constant(FLOATS, _LEAST), "<"), (constant(FLOATS, _MOST), ">")):
        found = builder.select(builder.fcmp_ordered(beyond, found, bound), bound, found)
    return found


def _inverse(builder: Any, scale: Any) -> Any:
    size = call(builder, "llvm.fabs.v16f32", FLOATS, [scale])
    one, zero = constant(FLOATS, 1.0), constant(FLOATS, 0.0)
    return builder.select(builder.fcmp_ordered(">", size, constant(FLOATS, 1e-30)), builder.fdiv(one, scale), zero)


def _largest(builder: Any, start: Any) -> Any:
    """The largest of each lane by size, with its sign; of equal ones the first. Bits of float32 without their sign are
    in the order of their size."""
    found, size = (cgutils.alloca_once_value(builder, constant(WORDS, 0)) for _ in range(2))
    with cgutils.for_range(builder, LONG(GROUP)) as loop:
        bits = builder.bitcast(_value(builder, start, loop.index), WORDS)
        own, before = builder.and_(bits, constant(WORDS, 0x7FFFFFFF)), builder.load(size)
        larger = builder.icmp_signed(">", own, before)
        builder.store(builder.select(larger, bits, builder.load(found)), found)
        builder.store(builder.select(larger, own, before), size)
    return builder.bitcast(builder.load(found), FLOATS)


def _best_scale(builder: Any, start: Any, largest: Any) -> Any:
    """The scale with the least squared error in each lane, among those that `SHRINK` gives, rounded to bfloat16."""
    first = builder.fdiv(largest, constant(FLOATS, _LEAST))
    best = cgutils.alloca_once_value(builder, constant(FLOATS, 0.0))
    least = cgutils.alloca_once_value(builder, constant(FLOATS, float("inf")))
    error = cgutils.alloca_once(builder, FLOATS)
    factors = ir.Constant(ir.ArrayType(ir.FloatType(), len(SHRINK)), SHRINK)
    known = cgutils.global_constant(builder, "shrink", factors)
    with cgutils.for_range(builder, LONG(len(SHRINK))) as choice:
        factor = builder.load(builder.gep(known, [LONG(0), choice.index]))
        scale = builder.fmul(first, splat(builder, factor))
        scale = widen_halves(builder, narrow(builder, scale), "bfloat16")
        inverse, negative = _inverse(builder, scale), builder.fneg(scale)
        builder.store(constant(FLOATS, 0.0), error)
        with cgutils.for_range(builder, LONG(GROUP)) as loop:
            value = _value(builder, start, loop.index)
            missing = multiply_add(builder, _nearest(builder, builder.fmul(value, inverse)), negative, value)
            builder.store(multiply_add(builder, missing, missing, builder.load(error)), error)
        total = builder.load(error)
        better = builder.fcmp_ordered("<", total, builder.load(least))
        builder.store(builder.select(better, scale, builder.load(best)), best)
        builder.store(builder.select(better, total, builder.load(least)), least)
    return builder.load(best)
