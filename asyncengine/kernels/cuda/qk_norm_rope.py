"""RMS norms, each in one kernel: alone, with the residual sum before them, with a gate, or with all that lies between
the merged projection and attention, which are norms of heads, rotation, and writing to pages.

The idea of one kernel for these three is FlashInfer's (`fused_qk_rmsnorm_rope`), whose kernel writes no pages.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.launching import Launcher, starts_early


@triton.jit
def _rms_norm(
    x, branch, weight, total, normed, scale, epsilon,
    x_stride: tl.constexpr, branch_stride: tl.constexpr, width: tl.constexpr, add: tl.constexpr, block: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """One row a program: its numbers stay in registers between the sum of their squares and their scaling."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if add:
        added = tl.load(branch + row * branch_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = (values + added * scale).to(total.dtype.element_ty)
        tl.store(total + row * width + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / width + epsilon)
    tl.store(normed + row * width + columns, (values * inverse * factors).to(normed.dtype.element_ty), mask=inside)


_launcher = Launcher(_rms_norm)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float = 0.0) -> torch.Tensor:
    """Compute `LayerKernels.rms_norm`; the weight has the offset in it. Rows may lie apart; there may be none."""
    assert offset == 0.0
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        _launch(rows, rows, weight, normed, normed, 1.0, epsilon, False)
    return normed


def add_rms_norm(
    residual: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor, epsilon: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Do `LayerKernels.add_rms_norm` of [rows, width]; the weight has the offset in it. The norm is that of the sum
    as it is rounded to the residual's type."""
    assert offset == 0.0
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    if len(residual):
        _launch(residual, branch, weight, total, normed, scale, epsilon, True)
    return total, normed


def _launch(
    x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, total: torch.Tensor, normed: torch.Tensor,
    scale: float, epsilon: float, add: bool,
) -> None:  # fmt: skip
    rows, width = x.shape
    block = 1 << (width - 1).bit_length()
    constants = (x.stride(0), branch.stride(0), width, add, block, starts_early(x.device))
    _launcher(
        (rows, 1, 1), (x, branch, weight, total, normed), (float(scale), float(epsilon)), constants,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float, size: int, *,
    norm: Literal["gated", "before gate"] | None = "before gate", activation: Literal["silu", "sigmoid"] = "silu",
    scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """x [rows, width], float32, normalised by groups of `size` and multiplied by the activated gate, in that order or,
    "gated", the other; None: not normalised. [rows, width] in the gate's dtype, times `scale`.

    `gate` [rows, width], whose rows may be part of longer ones. `weight` [width], or [size]: that of every group.
    """
    (rows, width), block = x.shape, triton.next_power_of_2(size)
    out = torch.empty((rows, width), dtype=gate.dtype, device=x.device)
    _gated_norm[(rows, width // size)](
        x, gate, weight, out, gate.stride(0), epsilon, scale, width, size, norm, activation == "silu",
        len(weight) == size, block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out


@triton.jit
def _gated_norm(
    x, gate, weight, out, gate_stride, epsilon, scale, width: tl.constexpr, size: tl.constexpr, norm: tl.constexpr,
    silu: tl.constexpr, shared: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One group of a row a program."""
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside, column = index < size, tl.program_id(1) * size + index
    values = tl.load(x + row * width + column, mask=inside, other=0.0)
    gates = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gates))
    if silu:
        factor *= gates
    if norm == "gated":
        values *= factor
    if norm is not None:
        values *= tl.rsqrt(tl.sum(values * values, 0) / size + epsilon)
        values *= tl.load(weight + (index if shared else column), mask=inside, other=0.0).to(tl.float32)
    if norm != "gated":
        values *= factor
    tl.store(out + row * width + column, (values * scale).to(out.dtype.element_ty), mask=inside)


_HEADS = 16
"""Heads of a program: enough for each thread to load 16 bytes at once."""


@triton.jit
def _factors(q_weight, k_weight, is_query, columns, inside):
    """[heads, columns] float32: each head's weights."""
    query = tl.load(q_weight + columns, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(k_weight + columns, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], query[None, :], key[None, :])


@triton.jit
def _store_heads(values, query_at, pool_at, is_query, present, columns, inside, largest: tl.constexpr):
    """Store queries in their output rows, keys and values in their page."""
    query_mask = is_query[:, None] & inside[None, :]
    tl.store(query_at[:, None] + columns[None, :], values.to(query_at.dtype.element_ty), mask=query_mask)
    if largest > 0:  # 8 bits: larger numbers would become NaN
        values = tl.minimum(tl.maximum(values, -largest), largest)
    pool_mask = (present & (is_query == 0))[:, None] & inside[None, :]
    tl.store(pool_at[:, None] + columns[None, :], values.to(pool_at.dtype.element_ty), mask=pool_mask)


@triton.jit
def _prepare_and_write(
    qkv, cos, sin, q_weight, k_weight, slots, query, pool, epsilon,
    qkv_stride: tl.constexpr, angle_stride: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, dim: tl.constexpr,
    rotary: tl.constexpr, half: tl.constexpr, tail_size: tl.constexpr, page: tl.constexpr, norm: tl.constexpr,
    largest: tl.constexpr, heads: tl.constexpr, interleaved: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """A few heads of one token. A head is read as the first and the second dimensions of all pairs that are rotated,
    and the rest, each filled up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    present = head < queries + 2 * keys
    is_query = head < queries
    is_value = head >= queries + keys
    pair = tl.arange(0, half)
    rotated = pair < rotary // 2
    low, high = pair, pair + rotary // 2
    if interleaved:
        low, high = pair * 2, pair * 2 + 1
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + token).to(tl.int64)
    pool_row = (slot // page * 2 + tl.where(is_value, 1, 0)) * page + slot % page
    pool_at = pool + (pool_row * keys + (head - queries - tl.where(is_value, keys, 0))) * dim
    query_at = query + (token * queries + head) * dim
    start = qkv + token * qkv_stride + head[:, None] * dim
    mask = present[:, None] & rotated[None, :]
    first = tl.load(start + low[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(start + high[None, :], mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(first * first + second * second, 1)
    if tail_size > 0:
        tail = rotary + tl.arange(0, tail_size)
        in_tail = tail < dim
        rest = tl.load(start + tail[None, :], mask=present[:, None] & in_tail[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
    if norm:
        inverse = tl.rsqrt(squares / dim + epsilon)[:, None]
        unnormed = is_value[:, None]
        first = tl.where(unnormed, first, first * inverse * _factors(q_weight, k_weight, is_query, low, rotated))
        second = tl.where(unnormed, second, second * inverse * _factors(q_weight, k_weight, is_query, high, rotated))
        if tail_size > 0:
            rest = tl.where(unnormed, rest, rest * inverse * _factors(q_weight, k_weight, is_query, tail, in_tail))
    angle = token * angle_stride + low
    cosine = tl.load(cos + angle, mask=rotated, other=1.0).to(tl.float32)[None, :]
    sine = tl.load(sin + angle, mask=rotated, other=0.0).to(tl.float32)[None, :]
    cosine = tl.where(is_value[:, None], 1.0, cosine)
    sine = tl.where(is_value[:, None], 0.0, sine)
    _store_heads(first * cosine - second * sine, query_at, pool_at, is_query, present, low, rotated, largest)
    _store_heads(second * cosine + first * sine, query_at, pool_at, is_query, present, high, rotated, largest)
    if tail_size > 0:
        _store_heads(rest, query_at, pool_at, is_query, present, tail, in_tail, largest)


_prepare = Launcher(_prepare_and_write)


def prepare_and_write(
    qkv: torch.Tensor, heads: Any, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor
) -> torch.Tensor:
    """Rotated queries [tokens, heads, dim] of a merged projection, whose keys and values go to `pool`.

    `heads`: an `attention.base.MergedHeads`, whose dim is a power of two. qkv [tokens, (heads + 2 kv heads) * dim],
    whose rows may lie apart; cos and sin [tokens, rotary dim], alike for both dimensions of a pair; slots int64
    [tokens], page * page size + offset; pool [pages, 2, page size, kv heads, dim] contiguous.
    """
    tokens, dim, rotary = len(qkv), heads.key_dim, cos.shape[-1]
    query = qkv.new_empty((tokens, heads.num_heads, dim))
    if not tokens:
        return query
    normed = heads.q_norm is not None
    constants = (
        qkv.stride(0), cos.stride(0), heads.num_heads, heads.num_kv_heads, dim, rotary,
        1 << (max(rotary // 2, 1) - 1).bit_length(), 1 << (dim - rotary - 1).bit_length() if dim > rotary else 0,
        pool.shape[2], normed, 448.0 if pool.dtype == torch.float8_e4m3fn else 0.0, _HEADS, heads.interleaved,
        starts_early(qkv.device),
    )  # fmt: skip
    weights = (heads.q_norm, heads.k_norm) if normed else (qkv, qkv)
    blocks = -(-(heads.num_heads + 2 * heads.num_kv_heads) // _HEADS)
    tensors = (qkv, cos, sin, *weights, slots, query, pool)
    _prepare((tokens, blocks, 1), tensors, (float(heads.epsilon),), constants, num_warps=4)
    return query


@triton.jit
def _angles(
    positions, frequencies, out, scaling,
    pairs: tl.constexpr, block: tl.constexpr, interleaved: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Cosines and then sines of one position."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, block)
    inside = pair < pairs
    frequency = tl.load(frequencies + pair, mask=inside, other=0.0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    angle = tl.load(positions + token).to(tl.float32) * frequency
    cosine = (tl.cos(angle) * scaling).to(out.dtype.element_ty)
    sine = (tl.sin(angle) * scaling).to(out.dtype.element_ty)
    first, second = pair, pair + pairs
    if interleaved:
        first, second = pair * 2, pair * 2 + 1
    line = out + token * 4 * pairs
    tl.store(line + first, cosine, mask=inside)
    tl.store(line + second, cosine, mask=inside)
    tl.store(line + 2 * pairs + first, sine, mask=inside)
    tl.store(line + 2 * pairs + second, sine, mask=inside)


_turn = Launcher(_angles)


def angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, interleaved: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [tokens, 2 pairs] of position * frequency, times `scaling`; frequencies float32 [pairs].

    Each pair's stand in both halves, or beside each other.
    """
    pairs = len(frequencies)
    out = torch.empty(len(positions), 2, 2 * pairs, dtype=dtype, device=positions.device)
    if out.numel():
        constants = (pairs, 1 << (pairs - 1).bit_length(), interleaved, starts_early(positions.device))
        _turn((len(positions), 1, 1), (positions, frequencies, out), (float(scaling),), constants, num_warps=1)
    return out[:, 0], out[:, 1]
