"""Mixtures of experts: the choice for each row, and products of many rows with the matrices of their experts.

The products of all experts are one launch. Pairs of a row and one of its experts are put in order by expert, on the
device. A product then goes over blocks of pairs that have one expert (the idea of MegaBlocks, Gale et al. 2022, and of
vLLM's fused mixtures): there are as many programs as there could be blocks, and those without one end at once. So what
is launched depends on the number of rows alone, the host reads nothing, and a CUDA graph can hold all of it. Products
and sums are float32; a row's result is a sum over its experts in the order in which it chose them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from asyncengine.kernels.cuda.packed_matmul import BIG, WARPS, ChunkedMatrix, few_form, product_of_few, read_rows


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, by_expert: torch.Tensor | None, config: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `layers.routing.route` does, of a softmax or a sigmoid and of experts in one group; `logits` may have
    more columns than there are experts. `config`: a `layers.routing.RouterConfig`."""
    rows, count = len(logits), config.chosen
    chosen = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    weights = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    if rows:
        _route[(rows,)](
            logits, logits if correction is None else correction, logits if by_expert is None else by_expert, chosen,
            weights, logits.stride(0), config.scale, config.least_sum, config.experts,
            triton.next_power_of_2(config.experts), count, triton.next_power_of_2(count), config.scores == "sigmoid",
            correction is not None, by_expert is not None, config.normalised,
        )  # fmt: skip
    return chosen, weights


@triton.jit
def _route(
    logits, correction, by_expert, chosen, weights, stride, scale, least, experts: tl.constexpr, width: tl.constexpr,
    count: tl.constexpr, places: tl.constexpr, sigmoid: tl.constexpr, corrected: tl.constexpr, factors: tl.constexpr,
    normalised: tl.constexpr,
):  # fmt: skip
    """One program for each row, which takes the best expert, then the best of the others, and so on."""
    row = tl.program_id(0).to(tl.int64)
    each, place = tl.arange(0, width), tl.arange(0, places)
    inside = each < experts
    numbers = tl.load(logits + row * stride + each, mask=inside, other=-float("inf")).to(tl.float32)
    if sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-numbers))
    else:
        scores = tl.exp(numbers - tl.max(numbers, 0))
        scores = scores / tl.sum(scores, 0)
    left = scores
    if corrected:
        left += tl.load(correction + each, mask=inside, other=0.0)
    left = tl.where(inside, left, -float("inf"))
    ids = tl.zeros((places,), dtype=tl.int32)
    own = tl.zeros((places,), dtype=tl.float32)
    for turn in range(count):
        best = tl.minimum(tl.argmax(left, 0), experts - 1)  # of numbers that are none, any expert there is
        ids = tl.where(place == turn, best, ids)
        own = tl.where(place == turn, tl.sum(tl.where(each == best, scores, 0.0), 0), own)
        left = tl.where(each == best, -float("inf"), left)
    if normalised:
        own = own / tl.maximum(tl.sum(own, 0), least)
    own = own * scale
    if factors:
        own = own * tl.load(by_expert + ids)
    tl.store(chosen + row * count + place, ids.to(tl.int64), mask=place < count)
    tl.store(weights + row * count + place, own, mask=place < count)


_STORED, _COPIED = 32, 64
"""Outputs of a program that dequantizes what it reads; pairs of an expert above which a copy is dequantized before."""
_SLICE = 2**26
"""Numbers of such a copy, of two bytes each: those of a few experts."""
_CHUNK = 1024
"""Pairs that are looked at together while they are put in order."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The matrices of all experts, one below the other."""

    weight: torch.Tensor | ChunkedMatrix
    """[experts * outputs, inputs]; as it is stored, numbers are dequantized while they are read."""
    bias: torch.Tensor | None
    """[experts, outputs]."""


def mix(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, up: ExpertWeights, down: ExpertWeights,
    activation: Callable[[torch.Tensor], torch.Tensor] | None, experts: int,
) -> torch.Tensor:  # fmt: skip
    """[rows, width]: the weighted sum of what its chosen experts make of each row of x [rows, width].

    `chosen` int64 and `weights` float32 [rows, count]. `activation`: [pairs, outputs of `up`] -> [pairs, inputs of
    `down`]; None: silu of the first half times the second, within the product.
    """
    rows, count = chosen.shape
    if not rows:
        return torch.empty_like(x)
    placed = place_pairs(chosen, experts)
    between = multiply(x, up, placed, experts, count, gated=activation is None, scattered=False)
    if activation is not None:
        between = activation(between)
    made = multiply(between, down, placed, experts, 1, gated=False, scattered=True)
    return weighted_sum(made, weights)


def place_pairs(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order int32 [pairs], spans int32 [2, experts or more]) of chosen int64 [rows, count].

    `order`: pairs row * count + place by expert, and by row within an expert; `spans`: where in it each expert's begin,
    and where they end.
    """
    pairs, size = chosen.numel(), max(16, triton.next_power_of_2(experts))
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    spans = torch.empty((2, size), dtype=torch.int32, device=chosen.device)
    chunk = min(_CHUNK, max(16, triton.next_power_of_2(pairs)))
    _place[(size,)](chosen.contiguous(), order, spans, pairs, size, chunk)
    return order, spans


def multiply(
    x: torch.Tensor, matrices: ExpertWeights, placed: tuple[torch.Tensor, torch.Tensor], experts: int, count: int, *,
    gated: bool, scattered: bool,
) -> torch.Tensor:  # fmt: skip
    """Each pair's product with its expert's matrix, [pairs, outputs], or half of them if `gated`.

    Not `scattered`: pair p reads row p // `count` of x, and results are in the pairs' order by expert. `scattered`: x
    is in that order, and results are by pair.
    """
    (order, spans), weight, pairs = placed, matrices.weight, len(placed[0])
    mean = pairs / min(pairs, experts)  # of those experts that have any, at least
    stored = weight if isinstance(weight, ChunkedMatrix) else None
    total, inputs = (
        weight.shape if isinstance(weight, torch.Tensor) else (weight.planes.numbers.shape[1], weight.inputs)
    )
    outputs = total // experts // (2 if gated else 1)
    out = x.new_empty((pairs, outputs))
    if stored is not None and mean <= _COPIED:
        _multiply_stored(x, stored, matrices.bias, out, placed, experts, count, gated, scattered)
        return out
    rows = 16 if mean <= 16 else 64 if mean <= 128 else 128
    few, wide = rows == 16, x.dtype == torch.float32
    columns = (64 if few or gated or wide else 128) // (2 if few and gated else 1)
    blocks = min(pairs, (pairs + experts * (rows - 1)) // rows)
    each = experts if stored is None else min(experts, max(1, _SLICE // (total // experts * inputs)))
    memory = None if stored is None else x.new_empty((total // experts * each, inputs))
    for first in range(0, experts, each):
        last = min(first + each, experts)
        if stored is not None and memory is not None:
            weight = read_rows(stored, memory[: total // experts * (last - first)], first * (total // experts))
        _multiply[(triton.cdiv(outputs, columns), blocks)](
            x.contiguous(), weight, weight if matrices.bias is None else matrices.bias, out,
            order, spans, outputs, inputs, first, last, count, spans.shape[1], gated, matrices.bias is not None,
            scattered, rows, columns, (128 if few else 64) // (2 if wide else 1),
            num_warps=4 if few else 8, num_stages=4 if few else 3,
        )  # fmt: skip
    return out


def _multiply_stored(
    x: torch.Tensor, matrix: ChunkedMatrix, bias: torch.Tensor | None, out: torch.Tensor,
    placed: tuple[torch.Tensor, torch.Tensor], experts: int, count: int, gated: bool, scattered: bool,
) -> None:  # fmt: skip
    """`multiply` by matrices as they are stored, into `out`."""
    (order, spans), (chunks, total, width) = placed, matrix.planes.numbers.shape
    pairs, outputs = out.shape
    mean = pairs / min(pairs, experts)
    rows = 8 if mean <= 4 else 16 if mean <= 16 else 64 if width < 128 else 32
    form = few_form(matrix, x, rows)
    blocks = min(pairs, (pairs + experts * (rows - 1)) // rows)
    _stored[(triton.cdiv(outputs, _STORED), blocks)](
        matrix.planes, x.contiguous(), bias, out, order, spans, outputs, matrix.inputs, total, chunks, BIG,
        count, spans.shape[1], gated, scattered, rows, _STORED, *form, num_warps=WARPS,
        num_stages=3 if rows <= 16 else 2,
    )  # fmt: skip


def weighted_sum(made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[rows, width] of made [rows * count, width]: each row's sum, times its weights [rows, count], in that order."""
    rows, count = weights.shape
    width = made.shape[1]
    out = made.new_empty((rows, width))
    block = min(1024, triton.next_power_of_2(width))
    _sum[(rows, triton.cdiv(width, block))](made, weights.contiguous(), out, width, count, block)
    return out


@triton.jit
def _place(chosen, order, spans, pairs, experts: tl.constexpr, chunk: tl.constexpr):
    """One program for each expert: it counts the pairs of those before it, then writes down its own."""
    expert = tl.program_id(0)
    each = tl.arange(0, chunk)
    before = tl.zeros((chunk,), dtype=tl.int32)
    own = tl.zeros((chunk,), dtype=tl.int32)
    for first in range(0, pairs, chunk):
        found = tl.load(chosen + first + each, mask=first + each < pairs, other=experts)
        before += (found < expert).to(tl.int32)
        own += (found == expert).to(tl.int32)
    begin = tl.sum(before, 0)
    tl.store(spans + expert, begin)
    tl.store(spans + experts + expert, begin + tl.sum(own, 0))
    for first in range(0, pairs, chunk):
        found = tl.load(chosen + first + each, mask=first + each < pairs, other=experts)
        mine = (found == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(mine, 0) - mine, first + each, mask=mine > 0)
        begin += tl.sum(mine, 0)


@triton.jit
def _block(spans, experts: tl.constexpr, height: tl.constexpr):
    """Expert of this program's block of pairs (there is none: `experts`), the block's first pair, the expert's end."""
    block = tl.program_id(1)
    each = tl.arange(0, experts)
    sizes = (tl.load(spans + experts + each) - tl.load(spans + each) + height - 1) // height
    expert = tl.sum((tl.cumsum(sizes, 0) <= block).to(tl.int32), 0)
    earlier = tl.sum(tl.where(each < expert, sizes, 0), 0)
    known = tl.minimum(expert, experts - 1)
    first = tl.load(spans + known) + (block - earlier) * height
    return expert, first, tl.load(spans + experts + known)


@triton.jit(do_not_specialize=["begin_expert", "end_expert"])
def _multiply(
    x, weight, bias, out, order, spans, outputs, inputs, begin_expert, end_expert,
    count: tl.constexpr, experts: tl.constexpr, gated: tl.constexpr, biased: tl.constexpr, scattered: tl.constexpr,
    height: tl.constexpr, broad: tl.constexpr, deep: tl.constexpr,
):  # fmt: skip
    """One program for each block of pairs of one expert and each block of outputs. `weight` has the matrices of experts
    begin_expert .. end_expert - 1; the pairs of others are left alone."""
    expert, first, end = _block(spans, experts, height)
    if (expert < begin_expert) | (expert >= end_expert):
        return
    places = first + tl.arange(0, height)
    valid = places < end
    pairs = tl.load(order + places, mask=valid, other=0)
    columns = tl.program_id(0) * broad + tl.arange(0, broad)
    inside = columns < outputs
    depth = tl.arange(0, deep)
    if scattered:
        sources = places
        targets = pairs
    else:
        sources = pairs // count
        targets = places
    # numbers of all experts' matrices together, and of a long step's pairs, need more than 32 bits
    matrix = outputs.to(tl.int64) * inputs
    left = x + sources[:, None].to(tl.int64) * inputs + depth[None, :]
    right = (
        weight
        + (expert - begin_expert) * matrix * (2 if gated else 1)
        + columns[None, :].to(tl.int64) * inputs
        + depth[:, None]
    )
    total = tl.zeros((height, broad), dtype=tl.float32)
    second = tl.zeros((height, broad), dtype=tl.float32)
    for begin in range(0, inputs, deep):
        some = begin + depth < inputs
        rows = tl.load(left + begin, mask=valid[:, None] & some[None, :], other=0.0)
        both = inside[None, :] & some[:, None]
        total = tl.dot(rows, tl.load(right + begin, mask=both, other=0.0), total, input_precision="ieee")
        if gated:
            upper = tl.load(right + matrix + begin, mask=both, other=0.0)
            second = tl.dot(rows, upper, second, input_precision="ieee")
    if biased:
        total += tl.load(bias + expert * outputs + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if gated:
        total = total / (1.0 + tl.exp(-total)) * second
    at = targets[:, None].to(tl.int64) * outputs + columns[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@triton.jit
def _stored(
    planes, x, bias, out, order, spans, outputs, inputs, all_outputs, chunks, big,
    count: tl.constexpr, experts: tl.constexpr, gated: tl.constexpr, scattered: tl.constexpr, height: tl.constexpr,
    broad: tl.constexpr, even: tl.constexpr, tile: tl.constexpr, bits: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, middle: tl.constexpr, low: tl.constexpr, high: tl.constexpr,
):  # fmt: skip
    """The same by stored matrices; `all_outputs`: those of all experts together."""
    expert, first, end = _block(spans, experts, height)
    if expert >= experts:
        return
    places = first + tl.arange(0, height)
    valid = places < end
    pairs = tl.load(order + places, mask=valid, other=0)
    sources = places if scattered else pairs // count
    targets = pairs if scattered else places
    columns = tl.program_id(0) * broad + tl.arange(0, broad)
    row = expert * outputs * (2 if gated else 1) + tl.minimum(columns, outputs - 1)
    begins = tl.where(valid, sources, 0).to(tl.int64) * inputs
    total = product_of_few(
        planes, x, begins, valid, row, inputs, all_outputs, chunks, big, even, tile, bits, width, block, middle, low,
        high,
    )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    if gated:
        second = product_of_few(
            planes, x, begins, valid, row + outputs, inputs, all_outputs, chunks, big, even, tile, bits, width, block,
            middle, low, high,
        )  # fmt: skip
        total = total / (1.0 + tl.exp(-total)) * second
    at = targets.to(tl.int64)[None, :] * outputs + columns[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=valid[None, :] & (columns < outputs)[:, None])


@triton.jit
def _sum(made, weights, out, width, count: tl.constexpr, broad: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * broad + tl.arange(0, broad)
    inside = columns < width
    total = tl.zeros((broad,), dtype=tl.float32)
    for place in range(count):
        part = tl.load(made + (row * count + place) * width + columns, mask=inside, other=0.0)
        total += tl.load(weights + row * count + place) * part.to(tl.float32)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)
