"""The softmax of attention, a row and a block of keys at a time, in float32 vectors.

Exponentials have base 2: the factor log2(e) goes into the scores' scale. None of this lets a NaN become a number, so a
query or key with one shows in the result.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.attention_tiles import BLOCK
from asyncengine.kernels.cpu.intrinsics import FLOAT32, INT64, TAG, emitted
from asyncengine.kernels.cpu.vectors import FLOAT, FLOATS, LANES, LONG, WORD, WORDS, load, store

LOG2E = 1.4426950408889634
_POWERS = (1.0, 0.6931471825, 0.2402264625, 0.05550328642, 0.009618489072, 0.001339993207, 0.0001534580952)
"""2 ** x on [-1/2, 1/2], relative error 2e-9: least squares reweighted until the errors were level."""
FEW = 32
"""Keys of a block that are computed where it has no more, as in a short text."""


@emitted(INT64, FLOAT32, FLOAT32)
def softcap(builder: Any, scores: Any, scale: Any, cap: Any) -> None:
    """scores = cap * tanh(score * scale / cap) * log2(e), for one row of a block."""
    ratio = vectors.splat(builder, builder.fdiv(scale, cap))
    back = vectors.splat(builder, builder.fmul(cap, FLOAT(LOG2E)))
    with cgutils.for_range(builder, LONG(BLOCK // LANES)) as loop:
        block = builder.add(scores, builder.mul(loop.index, LONG(4 * LANES)))
        store(builder, builder.fmul(_tanh(builder, builder.fmul(load(builder, block, FLOATS), ratio)), back), block)


@emitted(*[INT64] * 5, FLOAT32, *[INT64] * 3, TAG)
def softmax(
    builder: Any, key_count: Any, scores: Any, out: Any, low: Any, high: Any, scale: Any, maximum: Any, total: Any,
    decay: Any, operand: Any,
) -> None:  # fmt: skip
    """One block of an online softmax: scores become weights 2 ** (score * scale - maximum), 0 outside keys [low, high).

    `maximum`, `total` and `decay` are addresses of one float each: the maximum so far and the sum of weights, brought
    up to date, and the factor by which everything summed before this block must shrink. Weights go to `out`, in
    `operand` (float32 for int16): of all keys of a block, or of the first `FEW` where `key_count` is at most that.
    """
    with builder.if_else(builder.icmp_signed("<=", key_count, LONG(FEW))) as (few, more):
        for count, branch in ((FEW, few), (BLOCK, more)):
            with branch:
                _write_weights(builder, operand, count, scores, out, low, high, scale, maximum, total, decay)


def _write_weights(
    builder: Any, operand: Any, count: int, scores: Any, out: Any, low: Any, high: Any, scale: Any, maximum: Any,
    total: Any, decay: Any,
) -> None:  # fmt: skip
    """Write the weights of the first `count` keys. Sums of fewer are those of more, as `_reduce` adds halves: the
    others are zeros."""
    factor = vectors.splat(builder, scale)
    scaled = []
    for first in range(0, count, LANES):
        block = load(builder, builder.add(scores, LONG(4 * first)), FLOATS)
        scaled.append(cgutils.alloca_once_value(builder, builder.fmul(block, factor)))
    all_seen = builder.and_(
        builder.icmp_signed("<=", low, LONG(0)), builder.icmp_signed(">=", high, LONG(count))
    )  # most blocks, but for a query's last
    with builder.if_then(builder.not_(all_seen)):
        _hide(builder, scaled, low, high)
    blocks = [builder.load(block) for block in scaled]
    old_maximum = load(builder, maximum, FLOAT)
    new_maximum = _greater(builder, _reduce(builder, blocks, _greater), old_maximum)
    correction = exp2(builder, vectors.splat(builder, builder.fsub(old_maximum, new_maximum)))
    shift = vectors.splat(builder, new_maximum)
    weights = [exp2(builder, builder.fsub(block, shift)) for block in blocks]
    for index, vector in enumerate(weights):
        size = 2 if operand == numba.types.uint16 else 4
        vectors.write(builder, vector, builder.add(out, LONG(size * LANES * index)), operand)
    correction = builder.extract_element(correction, WORD(0))
    block_sum = _reduce(builder, weights, lambda builder, left, right: builder.fadd(left, right))
    store(builder, builder.fadd(builder.fmul(load(builder, total, FLOAT), correction), block_sum), total)
    store(builder, new_maximum, maximum)
    store(builder, correction, decay)


@emitted(*[INT64] * 6)
def quantize_weights(builder: Any, weights: Any, tiles: Any, scales: Any, count: Any, out: Any, scale: Any) -> None:
    """Quantize `weights`, float32, of the keys of `count` tiles, times their values' scales, which lie `scales` bytes
    into each tile of values: `out`, int16, times `scale`, one float32 that makes the largest 32,767."""
    with cgutils.for_range(builder, count) as loop:
        row = builder.add(weights, builder.mul(loop.index, LONG(4 * LANES)))
        tile = load(builder, builder.add(tiles, builder.mul(loop.index, LONG(8))), LONG)
        weight = load(builder, row, FLOATS)
        scaled = builder.fmul(weight, load(builder, builder.add(tile, scales), FLOATS))
        # the scale of a key that is not seen may be left from another sequence, and 0 times infinity is NaN
        unseen = builder.fcmp_ordered("==", weight, vectors.constant(FLOATS, 0.0))
        scaled = builder.select(unseen, weight, scaled)
        store(builder, scaled, row)
    largest = _magnitude(builder, weights, count)
    store(builder, builder.fmul(largest, FLOAT(1 / 32767)), scale)
    nonzero = builder.fcmp_ordered(">", largest, FLOAT(1e-30))
    factor = vectors.splat(builder, builder.select(nonzero, builder.fdiv(FLOAT(32767.0), largest), FLOAT(0.0)))
    with cgutils.for_range(builder, count) as loop:
        scaled = load(builder, builder.add(weights, builder.mul(loop.index, LONG(4 * LANES))), FLOATS)
        number = vectors.call(builder, "llvm.rint.v16f32", FLOATS, [builder.fmul(scaled, factor)])
        shorts = builder.trunc(builder.fptosi(number, WORDS), vectors.HALF_WORDS)
        store(builder, shorts, builder.add(out, builder.mul(loop.index, LONG(2 * LANES))))


@emitted(INT64, INT64, result=FLOAT32)
def magnitude(builder: Any, numbers: Any, count: Any) -> Any:
    """The largest absolute value of `count` float32, cut to a multiple of sixteen; NaN if one of them is."""
    return _magnitude(builder, numbers, builder.udiv(count, LONG(LANES)))


def _magnitude(builder: Any, numbers: Any, count: Any) -> Any:
    """The same for `count` vectors. Without the sign, the bits of a NaN are larger than those of any number."""
    largest = cgutils.alloca_once_value(builder, vectors.constant(WORDS, 0))
    with cgutils.for_range(builder, count) as loop:
        words = load(builder, builder.add(numbers, builder.mul(loop.index, LONG(4 * LANES))), WORDS)
        words = builder.and_(words, vectors.constant(WORDS, 0x7FFFFFFF))
        builder.store(_more(builder, words, builder.load(largest)), largest)
    return builder.bitcast(_reduce(builder, [builder.load(largest)], _more), FLOAT)


@emitted(INT64, INT64, TAG)
def hadamard_lanes(builder: Any, source: Any, out: Any, dtype: Any) -> None:
    """out, float32, = sixteen numbers times the Hadamard matrix, by rounds of sums and differences of pairs."""
    numbers = vectors.read(builder, source, dtype)
    for distance in (1, 2, 4, 8):
        partners = ir.Constant(WORDS, [lane ^ distance for lane in range(LANES)])
        sign = ir.Constant(FLOATS, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
        swapped = builder.shuffle_vector(numbers, numbers, partners)
        numbers = vectors.multiply_add(builder, numbers, sign, swapped)
    store(builder, numbers, out)


def _more(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", left, right), left, right)


@emitted(INT64, FLOAT32, INT64, INT64, TAG)
def store_scaled(builder: Any, values: Any, factor: Any, out: Any, count: Any, dtype: Any) -> None:
    """out = values * factor, for `count` float32, a multiple of sixteen; `out` is of `dtype`."""
    factors = vectors.splat(builder, factor)
    with cgutils.for_range(builder, builder.udiv(count, LONG(LANES))) as loop:
        vector = load(builder, builder.add(values, builder.mul(loop.index, LONG(4 * LANES))), FLOATS)
        target = builder.add(out, builder.mul(loop.index, LONG(dtype.bitwidth // 8 * LANES)))
        vectors.write(builder, builder.fmul(vector, factors), target, dtype)


def _hide(builder: Any, scaled: list[Any], low: Any, high: Any) -> None:
    """Set the scores of all keys outside [low, high) to minus infinity."""
    bounds = [vectors.splat(builder, builder.trunc(bound, WORD)) for bound in (low, high)]
    hidden = vectors.constant(FLOATS, float("-inf"))
    for vector, block in enumerate(scaled):
        index = ir.Constant(WORDS, list(range(vector * LANES, (vector + 1) * LANES)))
        seen = builder.and_(builder.icmp_signed(">=", index, bounds[0]), builder.icmp_signed("<", index, bounds[1]))
        builder.store(builder.select(seen, builder.load(block), hidden), block)


def _greater(builder: Any, left: Any, right: Any) -> Any:
    """The greater of two; `right` where `left` is no number."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _reduce(builder: Any, blocks: list[Any], join: Any) -> Any:
    """Reduce all lanes of all vectors to one number, joining two by two."""
    while len(blocks) > 1:
        half = len(blocks) // 2
        blocks = [join(builder, left, right) for left, right in zip(blocks[:half], blocks[half:], strict=True)]
    (total,) = blocks
    count = LANES
    while count > 1:
        count //= 2
        lane_type = ir.VectorType(WORD, count)
        halves = [ir.Constant(lane_type, list(range(first, first + count))) for first in (0, count)]
        total = join(builder, *(builder.shuffle_vector(total, total, half) for half in halves))
    return builder.extract_element(total, WORD(0))


def exp2(builder: Any, x: Any) -> Any:
    """2 ** x within 2e-7 of itself for x from -126 on, 0 below, NaN of NaN."""
    smallest = vectors.constant(FLOATS, -126.0)
    if vectors.WIDE:  # lanes below -126 are masked out: a subnormal result costs the CPU some hundred cycles
        whole = vectors.call(builder, "llvm.rint.v16f32", FLOATS, [x])
        seen = builder.fcmp_unordered(">=", x, smallest)
        return vectors.scale_by_power(builder, _power(builder, builder.fsub(x, whole)), whole, seen)
    magic = vectors.constant(FLOATS, 12582912.0)  # 1.5 * 2 ** 23: adding it leaves the rounded number in the low bits
    shifted = builder.fadd(x, magic)
    mantissa = _power(builder, builder.fsub(x, builder.fsub(shifted, magic)))
    exponent = builder.shl(builder.bitcast(shifted, WORDS), vectors.constant(WORDS, 23))
    exponent = builder.bitcast(builder.add(exponent, vectors.constant(WORDS, 0x3F800000)), FLOATS)
    tiny = builder.fcmp_ordered("<", x, smallest)
    return builder.select(tiny, vectors.constant(FLOATS, 0.0), builder.fmul(mantissa, exponent))


def _power(builder: Any, x: Any) -> Any:
    total = vectors.constant(FLOATS, _POWERS[-1])
    for power in reversed(_POWERS[:-1]):
        total = vectors.multiply_add(builder, total, x, vectors.constant(FLOATS, power))
    return total


def _tanh(builder: Any, x: Any) -> Any:
    """Within 2e-7 of itself: a series near 0, where the other form cancels."""
    square = builder.fmul(x, x)
    series = vectors.constant(FLOATS, 62 / 2835)
    for term in (-17 / 315, 2 / 15, -1 / 3, 1.0):
        series = vectors.multiply_add(builder, series, square, vectors.constant(FLOATS, term))
    limit = vectors.constant(FLOATS, 20.0)
    bounded = builder.select(builder.fcmp_ordered(">", x, limit), limit, x)
    power = exp2(builder, builder.fmul(bounded, vectors.constant(FLOATS, 2 * LOG2E)))
    one = vectors.constant(FLOATS, 1.0)
    whole = builder.fdiv(builder.fsub(power, one), builder.fadd(power, one))
    near = builder.fcmp_ordered("<", square, vectors.constant(FLOATS, 0.0625))
    return builder.select(near, builder.fmul(series, x), whole)
