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
    count: tl.constexpr, padded_count: tl.constexpr, sigmoid: tl.constexpr, corrected: tl.constexpr,
    factors: tl.constexpr, normalised: tl.constexpr,
):  # fmt: skip
    """One program for each row, which takes the best expert, then the best of the others, and so on."""
    row = tl.program_id(0).to(tl.int64)
    ids, rank = tl.arange(0, width), tl.arange(0, padded_count)
    inside = ids < experts
    values = tl.load(logits + row * stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    if sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        scores = tl.exp(values - tl.max(values, 0))
        scores = scores / tl.sum(scores, 0)
    remaining = scores
    if corrected:
        remaining += tl.load(correction + ids, mask=inside, other=0.0)
    remaining = tl.where(inside, remaining, -float("inf"))
    best_ids = tl.zeros((padded_count,), dtype=tl.int32)
    factors_of_best = tl.zeros((padded_count,), dtype=tl.float32)
    for step in range(count):
        best = tl.minimum(tl.argmax(remaining, 0), experts - 1)  # argmax of NaN may lie behind the experts
        best_ids = tl.where(rank == step, best, best_ids)
        factors_of_best = tl.where(rank == step, tl.sum(tl.where(ids == best, scores, 0.0), 0), factors_of_best)
        remaining = tl.where(ids == best, -float("inf"), remaining)
    if normalised:
        factors_of_best = factors_of_best / tl.maximum(tl.sum(factors_of_best, 0), least)
    factors_of_best = factors_of_best * scale
    if factors:
        factors_of_best = factors_of_best * tl.load(by_expert + best_ids)
    tl.store(chosen + row * count + rank, best_ids.to(tl.int64), mask=rank < count)
    tl.store(weights + row * count + rank, factors_of_best, mask=rank < count)


_STORED, _COPIED = 32, 64
"""Outputs of a program that dequantizes what it reads; pairs of an expert above which a copy is dequantized before."""
_SLICE = 2**26
"""Numbers of such a copy, of two bytes each: those of a few experts, so that its memory stays small."""
_CHUNK = 1024
"""Pairs that a program reads at once while they are sorted."""


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
    """[rows, width]: for each row of x [rows, width], the weighted sum of its chosen experts' outputs.

    `chosen` int64 and `weights` float32 [rows, count]. `activation`: [pairs, outputs of `up`] -> [pairs, inputs of
    `down`]; None: silu of the first half times the second, within the product.
    """
    rows, count = chosen.shape
    if not rows:
        return torch.empty_like(x)
    sorted_pairs = sort_pairs(chosen, experts)
    hidden = multiply(x, up, sorted_pairs, experts, count, gated=activation is None, scattered=False)
    if activation is not None:
        hidden = activation(hidden)
    products = multiply(hidden, down, sorted_pairs, experts, 1, gated=False, scattered=True)
    return weighted_sum(products, weights)


def sort_pairs(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order int32 [pairs], spans int32 [2, experts or more]) of chosen int64 [rows, count].

    `order`: pairs, each row * count + rank among its experts, sorted by expert and then by row. `spans`: begin and end
    of each expert's pairs in it.
    """
    pairs, size = chosen.numel(), max(16, triton.next_power_of_2(experts))
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    spans = torch.empty((2, size), dtype=torch.int32, device=chosen.device)
    block = min(_CHUNK, max(16, triton.next_power_of_2(pairs)))
    _sort_pairs[(size,)](chosen.contiguous(), order, spans, pairs, size, block)
    return order, spans


def multiply(
    x: torch.Tensor, matrices: ExpertWeights, sorted_pairs: tuple[torch.Tensor, torch.Tensor], experts: int,
    count: int, *, gated: bool, scattered: bool,
) -> torch.Tensor:  # fmt: skip
    """Each pair's product with its expert's matrix, [pairs, outputs], or half of them if `gated`.

    Not `scattered`: pair p reads row p // `count` of x, and results are in the pairs' order by expert. `scattered`: x
    is in that order, and results are by pair.
    """
    (order, spans), weight, pairs = sorted_pairs, matrices.weight, len(sorted_pairs[0])
    mean = pairs / min(pairs, experts)  # of experts that have pairs, at least
    stored = weight if isinstance(weight, ChunkedMatrix) else None
    total, inputs = (
        weight.shape if isinstance(weight, torch.Tensor) else (weight.planes.numbers.shape[1], weight.inputs)
    )
    outputs = total // experts // (2 if gated else 1)
    out = x.new_empty((pairs, outputs))
    if stored is not None and mean <= _COPIED:
        _multiply_stored(x, stored, matrices.bias, out, sorted_pairs, experts, count, gated, scattered)
        return out
    rows = 16 if mean <= 16 else 64 if mean <= 128 else 128
    few, wide = rows == 16, x.dtype == torch.float32
    columns = (64 if few or gated or wide else 128) // (2 if few and gated else 1)
    # at most: each expert may fill its last block in part
    blocks = min(pairs, (pairs + experts * (rows - 1)) // rows)
    experts_at_once = experts if stored is None else min(experts, max(1, _SLICE // (total // experts * inputs)))
    buffer = None if stored is None else x.new_empty((total // experts * experts_at_once, inputs))
    for first in range(0, experts, experts_at_once):
        last = min(first + experts_at_once, experts)
        if stored is not None and buffer is not None:
            weight = read_rows(stored, buffer[: total // experts * (last - first)], first * (total // experts))
        _multiply[(triton.cdiv(outputs, columns), blocks)](
            x.contiguous(), weight, weight if matrices.bias is None else matrices.bias, out,
            order, spans, outputs, inputs, first, last, count, spans.shape[1], gated, matrices.bias is not None,
            scattered, rows, columns, (128 if few else 64) // (2 if wide else 1),
            num_warps=4 if few else 8, num_stages=4 if few else 3,
        )  # fmt: skip
    return out


def _multiply_stored(
    x: torch.Tensor, matrix: ChunkedMatrix, bias: torch.Tensor | None, out: torch.Tensor,
    sorted_pairs: tuple[torch.Tensor, torch.Tensor], experts: int, count: int, gated: bool, scattered: bool,
) -> None:  # fmt: skip
    """`multiply` by matrices as they are stored, into `out`."""
    (order, spans), (chunks, total, width) = sorted_pairs, matrix.planes.numbers.shape
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


def weighted_sum(products: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[rows, width] of products [rows * count, width]: each row's sum by its weights [rows, count], in order."""
    rows, count = weights.shape
    width = products.shape[1]
    out = products.new_empty((rows, width))
    block = min(1024, triton.next_power_of_2(width))
    _sum[(rows, triton.cdiv(width, block))](products, weights.contiguous(), out, width, count, block)
    return out


@triton.jit
def _sort_pairs(chosen, order, spans, pairs, experts: tl.constexpr, chunk: tl.constexpr):
    """One program for each expert: it counts the pairs of the experts before it, then writes its own pairs."""
    expert = tl.program_id(0)
    offsets = tl.arange(0, chunk)
    earlier = tl.zeros((chunk,), dtype=tl.int32)
    counts = tl.zeros((chunk,), dtype=tl.int32)
    for first in range(0, pairs, chunk):
        ids = tl.load(chosen + first + offsets, mask=first + offsets < pairs, other=experts)
        earlier += (ids < expert).to(tl.int32)
        counts += (ids == expert).to(tl.int32)
    begin = tl.sum(earlier, 0)
    tl.store(spans + expert, begin)
    tl.store(spans + experts + expert, begin + tl.sum(counts, 0))
    for first in range(0, pairs, chunk):
        ids = tl.load(chosen + first + offsets, mask=first + offsets < pairs, other=experts)
        matches = (ids == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(matches, 0) - matches, first + offsets, mask=matches > 0)
        begin += tl.sum(matches, 0)


@triton.jit
def _block(spans, experts: tl.constexpr, block_m: tl.constexpr):
    """Expert of this program's block of pairs (`experts` if it has none), the block's first pair, the expert's end."""
    block = tl.program_id(1)
    ids = tl.arange(0, experts)
    sizes = (tl.load(spans + experts + ids) - tl.load(spans + ids) + block_m - 1) // block_m
    expert = tl.sum((tl.cumsum(sizes, 0) <= block).to(tl.int32), 0)
    earlier = tl.sum(tl.where(ids < expert, sizes, 0), 0)
    existing = tl.minimum(expert, experts - 1)
    first = tl.load(spans + existing) + (block - earlier) * block_m
    return expert, first, tl.load(spans + experts + existing)


@triton.jit(do_not_specialize=["begin_expert", "end_expert"])
def _multiply(
    x, weight, bias, out, order, spans, outputs, inputs, begin_expert, end_expert,
    count: tl.constexpr, experts: tl.constexpr, gated: tl.constexpr, biased: tl.constexpr, scattered: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """One program for each block of pairs of one expert and each block of outputs. `weight` has the matrices of experts
    begin_expert .. end_expert - 1; the pairs of others are left alone."""
    expert, first, end = _block(spans, experts, block_m)
    if (expert < begin_expert) | (expert >= end_expert):
        return
    positions = first + tl.arange(0, block_m)
    valid = positions < end
    pairs = tl.load(order + positions, mask=valid, other=0)
    columns = tl.program_id(0) * block_n + tl.arange(0, block_n)
    inside = columns < outputs
    k_offsets = tl.arange(0, block_k)
    if scattered:
        sources = positions
        targets = pairs
    else:
        sources = pairs // count
        targets = positions
    # numbers of all experts' matrices together, and of a long step's pairs, need more than 32 bits
    matrix = outputs.to(tl.int64) * inputs
    left = x + sources[:, None].to(tl.int64) * inputs + k_offsets[None, :]
    right = (
        weight
        + (expert - begin_expert) * matrix * (2 if gated else 1)
        + columns[None, :].to(tl.int64) * inputs
        + k_offsets[:, None]
    )
    products = tl.zeros((block_m, block_n), dtype=tl.float32)
    up_products = tl.zeros((block_m, block_n), dtype=tl.float32)
    for k in range(0, inputs, block_k):
        inside_k = k + k_offsets < inputs
        rows = tl.load(left + k, mask=valid[:, None] & inside_k[None, :], other=0.0)
        mask = inside[None, :] & inside_k[:, None]
        products = tl.dot(rows, tl.load(right + k, mask=mask, other=0.0), products, input_precision="ieee")
        if gated:
            upper = tl.load(right + matrix + k, mask=mask, other=0.0)
            up_products = tl.dot(rows, upper, up_products, input_precision="ieee")
    if biased:
        products += tl.load(bias + expert * outputs + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if gated:
        products = products / (1.0 + tl.exp(-products)) * up_products
    offsets = targets[:, None].to(tl.int64) * outputs + columns[None, :]
    tl.store(out + offsets, products.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@triton.jit
def _stored(
    planes, x, bias, out, order, spans, outputs, inputs, all_outputs, chunks, big,
    count: tl.constexpr, experts: tl.constexpr, gated: tl.constexpr, scattered: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, even: tl.constexpr, tile: tl.constexpr, bits: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, middle: tl.constexpr, low: tl.constexpr, high: tl.constexpr,
):  # fmt: skip
    """`_multiply` by matrices as they are stored; `all_outputs` is the number of outputs of all experts together."""
    expert, first, end = _block(spans, experts, block_m)
    if expert >= experts:
        return
    positions = first + tl.arange(0, block_m)
    valid = positions < end
    pairs = tl.load(order + positions, mask=valid, other=0)
    sources = positions if scattered else pairs // count
    targets = pairs if scattered else positions
    columns = tl.program_id(0) * block_n + tl.arange(0, block_n)
    row = expert * outputs * (2 if gated else 1) + tl.minimum(columns, outputs - 1)
    begins = tl.where(valid, sources, 0).to(tl.int64) * inputs
    products = product_of_few(
        planes, x, begins, valid, row, inputs, all_outputs, chunks, big, even, tile, bits, width, block, middle, low,
        high,
    )  # fmt: skip
    if bias is not None:
        products += tl.load(bias + row).to(tl.float32)[:, None]
    if gated:
        up_products = product_of_few(
            planes, x, begins, valid, row + outputs, inputs, all_outputs, chunks, big, even, tile, bits, width, block,
            middle, low, high,
        )  # fmt: skip
        products = products / (1.0 + tl.exp(-products)) * up_products
    offsets = targets.to(tl.int64)[None, :] * outputs + columns[:, None]
    tl.store(out + offsets, products.to(out.dtype.element_ty), mask=valid[None, :] & (columns < outputs)[:, None])


@triton.jit
def _sum(products, weights, out, width, count: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.zeros((block,), dtype=tl.float32)
    for rank in range(count):
        product = tl.load(products + (row * count + rank) * width + columns, mask=inside, other=0.0)
        total += tl.load(weights + row * count + rank) * product.to(tl.float32)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)
