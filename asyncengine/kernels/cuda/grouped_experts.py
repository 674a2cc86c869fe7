"""Products of many rows with the matrices of their experts, all experts' in one launch.

Pairs of a row and one of its experts are put in order by expert, on the device. A product then goes over blocks of
pairs that have one expert (the idea of MegaBlocks, Gale et al. 2022, and of vLLM's fused mixtures): there are as many
programs as there could be blocks, and those without one end at once. So what is launched depends on the number of rows
alone, the host reads nothing, and a CUDA graph can hold all of it. Products and sums are float32; a row's result is a
sum over its experts in the order in which it chose them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_CHUNK = 1024
"""Pairs that are looked at together while they are put in order."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The matrices of all experts, one below the other."""

    weight: torch.Tensor
    """[experts * outputs, inputs]."""
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
    (order, spans), (total, inputs) = placed, matrices.weight.shape
    outputs, pairs = total // experts // (2 if gated else 1), len(order)
    out = x.new_empty((pairs, outputs))
    mean = pairs / min(pairs, experts)  # of those experts that have any, at least
    rows = 16 if mean <= 16 else 64 if mean <= 128 else 128
    few, wide = rows == 16, x.dtype == torch.float32
    columns = (64 if few or gated or wide else 128) // (2 if few and gated else 1)
    blocks = min(pairs, (pairs + experts * (rows - 1)) // rows)
    _multiply[(triton.cdiv(outputs, columns), blocks)](
        x.contiguous(), matrices.weight, matrices.weight if matrices.bias is None else matrices.bias, out,
        order, spans, outputs, inputs, count, spans.shape[1], gated, matrices.bias is not None, scattered, rows,
        columns, (128 if few else 64) // (2 if wide else 1),
        num_warps=4 if few else 8, num_stages=4 if few else 3,
    )  # fmt: skip
    return out


def weighted_sum(made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[rows, width] of made [rows * count, width]: each row's sum, times its weights [rows, count], in that order."""
    rows, count = weights.shape
    width = made.shape[1]
    out = made.new_empty((rows, width))
    block = min(1024, triton.next_power_of_2(width))
    _sum[(rows, triton.cdiv(width, block))](made, weights.contiguous(), out, width, count, block)
    return out


@triton.jit
def _place(
    chosen, order, spans, pairs, experts: tl.constexpr, chunk: tl.constexpr
):  # fmt: skip
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
def _multiply(
    x, weight, bias, out, order, spans, outputs, inputs,
    count: tl.constexpr, experts: tl.constexpr, gated: tl.constexpr, biased: tl.constexpr, scattered: tl.constexpr,
    height: tl.constexpr, broad: tl.constexpr, deep: tl.constexpr,
):  # fmt: skip
    """One program for each block of pairs of one expert and each block of outputs."""
    block = tl.program_id(1)
    each = tl.arange(0, experts)
    sizes = (tl.load(spans + experts + each) - tl.load(spans + each) + height - 1) // height
    expert = tl.sum((tl.cumsum(sizes, 0) <= block).to(tl.int32), 0)
    if expert >= experts:
        return
    earlier = tl.sum(tl.where(each < expert, sizes, 0), 0)
    places = tl.load(spans + expert) + (block - earlier) * height + tl.arange(0, height)
    valid = places < tl.load(spans + experts + expert)
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
    right = weight + expert * matrix * (2 if gated else 1) + columns[None, :].to(tl.int64) * inputs + depth[:, None]
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
def _sum(made, weights, out, width, count: tl.constexpr, broad: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * broad + tl.arange(0, broad)
    inside = columns < width
    total = tl.zeros((broad,), dtype=tl.float32)
    for place in range(count):
        part = tl.load(made + (row * count + place) * width + columns, mask=inside, other=0.0)
        total += tl.load(weights + row * count + place) * part.to(tl.float32)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)
