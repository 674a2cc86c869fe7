"""Low-rank deltas of rows that use different adapters, each row's adapter read on the device.

What is launched depends on the number of rows alone, so that a CUDA graph can hold it: which slot each row uses may
change before a replay. The ideas are those of Punica (Chen et al. 2023) and of vLLM's kernels for LoRA.

* A few rows: one kernel. Each program makes x A^T of one row again, for some of the outputs.
* More: rows are sorted by slot, in tiles of one slot each. One kernel computes x A^T of a tile, its inputs split among
  programs; another adds the splits and multiplies by B. There are as many programs as there could be tiles.

A merged product (of queries, keys and values) is one launch of each, whatever the number of its slices. Sums are
float32; no result of a row depends on the rows beside it. Programs without work end at
once, but only behind `gdc_wait`: a kernel that waits for this one relies on this one having waited, too.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles no parameter that is annotated with anything but constexpr

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncengine.kernels.cuda.launching import Launcher, starts_early

_FEW, _A, _READ = 8, 2**17, 2**23
"""Most rows of the form for a few; the most numbers of A that one of its programs reads, and that all of them read."""
_READ_AT_ONCE, _BLOCK_N = 2**14, 128
"""Numbers of A that such a program reads at once; outputs that a program makes, or half of them."""
_SPLIT_INPUTS, _MOST_SPLITS = {16: 512, 64: 2048}, 8
"""Inputs of a split of x A^T by the height of tiles; the most splits, which then have more inputs each."""
_NUMBERS = ["x_step", "y_step", "inputs", "outputs", "rank"]


class Factors(NamedTuple):
    """The factors of all slots for one product."""

    a: torch.Tensor
    """[slots, slices, rank, inputs], contiguous; the rank is a multiple of 8."""
    b: torch.Tensor
    """[slots, rank, outputs], contiguous."""
    begins: torch.Tensor
    """int32 [slices + 1] on the device: begin of each slice's outputs, and the last one's end, in steps of `unit`."""
    widest: int
    """Outputs of the largest slice."""
    unit: int
    """A power of two, at most 16, that divides the inputs and all ends of slices: how wide loads may be."""

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, ends: Sequence[int]) -> Factors:
        unit = gcd(16, a.shape[3], *ends)
        begins = torch.tensor([end // unit for end in ends], dtype=torch.int32).to(a.device)
        return cls(a, b, begins, max(end - begin for begin, end in pairwise(ends)), unit)


class Tiles(NamedTuple):
    """Rows of a step in tiles of one slot each."""

    slots: torch.Tensor
    """int32 [tiles], -1 for a tile that has no rows."""
    rows: torch.Tensor
    """int32 [tiles, height], -1 for none."""


@triton.jit(do_not_specialize=_NUMBERS)
def _lora_few(
    x, a, b, begins, slots, y, x_step, y_step, inputs, outputs, rank,
    step: tl.constexpr, unit: tl.constexpr, block_r: tl.constexpr, block_k: tl.constexpr, chunks: tl.constexpr,
    block_n: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One row and up to `block_n` outputs of a slice. Slots and factors are older than the kernel ahead."""
    slice_id, row, width, inner = tl.program_id(1), tl.program_id(2), outputs * unit, inputs * unit
    slot = tl.load(slots + row).to(tl.int64)
    first_n = tl.load(begins + slice_id) * unit + tl.program_id(0) * block_n
    last_n = tl.load(begins + slice_id + 1) * unit
    valid = (slot >= 0) & (first_n < last_n)
    n, r, k = first_n + tl.arange(0, block_n), tl.arange(0, block_r), tl.arange(0, block_k)
    rank_mask = (r < tl.where(valid, rank, 0))[:, None]
    up = tl.load(b + (slot * rank + r)[:, None] * width + n[None, :], mask=rank_mask & (n < last_n)[None, :], other=0.0)
    lines = a + ((slot * tl.num_programs(1) + slice_id) * rank + r)[:, None] * inner
    down = tl.load(lines + k[None, :], mask=rank_mask & (k < inner)[None, :], other=0.0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    if valid:
        targets = y + row.to(tl.int64) * y_step * step + n
        result = tl.load(targets, mask=n < last_n, other=0.0).to(tl.float32)  # loaded before the sums, which take long
        total = tl.zeros([block_r, block_k], tl.float32)
        for chunk in tl.static_range(chunks):
            k = chunk * block_k + tl.arange(0, block_k)
            if chunk > 0:
                down = tl.load(lines + k[None, :], mask=rank_mask & (k < inner)[None, :], other=0.0)
            values = tl.load(x + row.to(tl.int64) * x_step * step + k, mask=k < inner, other=0.0)
            total += down.to(tl.float32) * values.to(tl.float32)[None, :]
        result += tl.sum(up.to(tl.float32) * tl.sum(total, 1)[:, None], 0)
        tl.store(targets, result.to(y.dtype.element_ty), mask=n < last_n)


@triton.jit(do_not_specialize=["count"])
def _lora_tile(slots, tile_slots, rows, count, bins: tl.constexpr, height: tl.constexpr, chunk: tl.constexpr):
    """One program for each tile: it counts the rows of all slots to find its own. The last bin has rows of no slot."""
    tile, offsets, bin = tl.program_id(0), tl.arange(0, chunk), tl.arange(0, bins)
    sizes = tl.zeros([bins], tl.int32)
    for first in range(0, count, chunk):
        row_slots = tl.load(slots + first + offsets, mask=first + offsets < count, other=-1).to(tl.int32)
        sizes += tl.histogram(tl.where(row_slots < 0, bins - 1, row_slots), bins)
    tiles = tl.where(bin < bins - 1, (sizes + height - 1) // height, 0)
    slot = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    tl.store(tile_slots + tile, tl.where(slot < bins, slot, -1))
    begin = (tile - tl.sum(tl.where(bin < slot, tiles, 0), 0)) * height
    lane = tl.arange(0, height)
    tile_rows = rows + tile * height
    rows_of_slot = tl.sum(tl.where(bin == slot, sizes, 0))
    tl.store(tile_rows + lane, tl.full([height], -1, tl.int32), mask=begin + lane >= rows_of_slot)
    for first in range(0, count, chunk):
        row_slots = tl.load(slots + first + offsets, mask=first + offsets < count, other=-1).to(tl.int32)
        matches = (row_slots == slot).to(tl.int32)
        positions = tl.cumsum(matches, 0) - matches - begin
        tl.store(tile_rows + positions, first + offsets, mask=(matches > 0) & (positions >= 0) & (positions < height))
        begin -= tl.sum(matches, 0)


@triton.jit(do_not_specialize=["x_step", "inputs", "columns", "share"])
def _lora_shrink(
    x, a, slots, rows, down, x_step, inputs, columns, share,
    step: tl.constexpr, unit: tl.constexpr, block_m: tl.constexpr, block_r: tl.constexpr, block_k: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """One tile times up to `block_r` rows of its A, over one split of the inputs."""
    if pdl:
        gdc_wait()
        gdc_launch_dependents()  # not sooner: the next kernel looks at the tiles before it waits
    tile, inner = tl.program_id(0), inputs * unit
    lanes = tl.arange(0, block_m)
    slot, row = tl.load(slots + tile).to(tl.int64), tl.load(rows + tile * block_m + lanes)[:, None]
    if slot >= 0:
        column = (tl.program_id(1) * block_r + tl.arange(0, block_r))[None, :]
        x_lines, a_lines = x + row.to(tl.int64) * x_step * step, a + (slot * columns + column) * inner
        first = tl.program_id(2) * share * block_k
        total = tl.zeros([block_m, block_r], tl.float32)
        for begin in range(first, tl.minimum(first + share * block_k, inner), block_k):
            k = begin + tl.arange(0, block_k)
            values = tl.load(x_lines + k[None, :], mask=(row >= 0) & (k < inner)[None, :], other=0.0)
            factor = tl.load(a_lines + k[:, None], mask=(column < columns) & (k < inner)[:, None], other=0.0)
            total = tl.dot(values, factor, total, input_precision="ieee")
        down_row = (tl.program_id(2) * tl.num_programs(0) + tile) * block_m + lanes[:, None]
        tl.store(down + down_row.to(tl.int64) * columns + column, total, mask=column < columns)


@triton.jit
def _sums(lines, r, rank, stride, splits: tl.constexpr):
    """x A^T of a tile: the sum of its splits, in their order."""
    total = tl.load(lines + r[None, :], mask=(r < rank)[None, :], other=0.0)
    for split in tl.static_range(1, splits):
        total += tl.load(lines + split * stride + r[None, :], mask=(r < rank)[None, :], other=0.0)
    return total


@triton.jit(do_not_specialize=["y_step", "outputs", "rank"])
def _lora_expand(
    down, b, begins, slots, rows, y, y_step, outputs, rank,
    step: tl.constexpr, unit: tl.constexpr, block_m: tl.constexpr, block_r: tl.constexpr, block_n: tl.constexpr,
    splits: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Up to `block_n` outputs of a slice, of one tile."""
    tile, slice_id, lanes = tl.program_id(0), tl.program_id(2), tl.arange(0, block_m)
    slot, row = tl.load(slots + tile).to(tl.int64), tl.load(rows + tile * block_m + lanes)[:, None]
    first_n = tl.load(begins + slice_id) * unit + tl.program_id(1) * block_n
    last_n = tl.load(begins + slice_id + 1) * unit
    valid = (slot >= 0) & (first_n < last_n)
    n, r = (first_n + tl.arange(0, block_n))[None, :], tl.arange(0, block_r)
    lines_b = b + slot * rank * outputs * unit + n
    factor = tl.load(
        lines_b + r[:, None] * outputs * unit, mask=(r < tl.where(valid, rank, 0))[:, None] & (n < last_n), other=0.0
    )
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    if valid:
        targets, mask = y + row.to(tl.int64) * y_step * step + n, (row >= 0) & (n < last_n)
        before = tl.load(targets, mask=mask, other=0.0).to(tl.float32)
        columns = tl.num_programs(2) * rank
        lines = down + (tile * block_m + lanes)[:, None].to(tl.int64) * columns + slice_id * rank
        stride = tl.num_programs(0).to(tl.int64) * block_m * columns
        total = tl.dot(_sums(lines, r, rank, stride, splits).to(b.dtype.element_ty), factor, input_precision="ieee")
        for first in range(block_r, rank, block_r):
            r = first + tl.arange(0, block_r)
            inside = (r < rank)[:, None] & (n < last_n)
            factor = tl.load(lines_b + r[:, None].to(tl.int64) * outputs * unit, mask=inside, other=0.0)
            sums = _sums(lines, r, rank, stride, splits).to(b.dtype.element_ty)
            total = tl.dot(sums, factor, total, input_precision="ieee")
        tl.store(targets, (before + total).to(y.dtype.element_ty), mask=mask)


_few, _shrunk, _expanded = (Launcher(kernel) for kernel in (_lora_few, _lora_shrink, _lora_expand))


def tiles_of(slots: torch.Tensor, count: int) -> Tiles:
    """Sort rows by slot into tiles: `slots` int64 [rows] below `count`, -1 for rows without an adapter."""
    rows = len(slots)
    height = 16 if rows <= 256 else 64
    most = min(rows, (rows + count * (height - 1)) // height)
    tiles = Tiles(slots.new_empty(most, dtype=torch.int32), slots.new_empty((most, height), dtype=torch.int32))
    bins, chunk = triton.next_power_of_2(max(16, count + 1)), min(1024, triton.next_power_of_2(max(16, rows)))
    _lora_tile[(most,)](slots, *tiles, rows, bins, height, chunk)
    return tiles


def add_deltas(
    x: torch.Tensor, y: torch.Tensor, factors: Factors, slots: torch.Tensor, tiles: Callable[[], Tiles]
) -> None:
    """Add to each row of y [rows, outputs] its slot's B A x of its row of x [rows, inputs]; rows may lie apart.

    `slots` int64 [rows], -1 for none, were written before the last kernel launched. `tiles`: these rows by slot.
    """
    (a, b, begins, widest, unit), rows = factors, len(x)
    _, slices, rank, inputs = a.shape
    if not rows:
        return
    x, outputs, pdl = x if x.stride(1) == 1 else x.contiguous(), b.shape[2], starts_early(x.device)
    step = gcd(16, x.stride(0), y.stride(0))
    steps, blocks = (x.stride(0) // step, y.stride(0) // step), -(-widest // _BLOCK_N)
    ranks = triton.next_power_of_2(rank)
    if rows <= _FEW and ranks <= 128 and ranks * inputs <= _A and rows * blocks * slices * ranks * inputs <= _READ:
        block_k = min(_READ_AT_ONCE // ranks, triton.next_power_of_2(inputs))
        sizes = (*steps, inputs // unit, outputs // unit, rank)
        constants = (step, unit, ranks, block_k, -(-inputs // block_k), _BLOCK_N, pdl)
        _few((blocks, slices, rows), (x, a, b, begins, slots, y), sizes, constants, num_warps=8)
        return
    by_slot, columns, block_k = tiles(), slices * rank, 256 // x.element_size()
    count, height = by_slot.rows.shape
    share = max(_SPLIT_INPUTS[height] // block_k, -(-inputs // (_MOST_SPLITS * block_k)))
    splits = -(-inputs // (share * block_k))
    down = x.new_empty((splits, count, height, columns), dtype=torch.float32)
    block_n = 2 * _BLOCK_N if widest > 4096 and ranks <= 32 and height == 16 else _BLOCK_N
    block_r = min(32 if height == 16 else 64, max(16, triton.next_power_of_2(columns)))
    _shrunk(
        (count, -(-columns // block_r), splits), (x, a, *by_slot, down), (steps[0], inputs // unit, columns, share),
        (step, unit, height, block_r, block_k, pdl), num_warps=4, num_stages=3,
    )  # fmt: skip
    _expanded(
        (count, -(-widest // block_n), slices), (down, b, begins, *by_slot, y), (steps[1], outputs // unit, rank),
        (step, unit, height, min(64, max(16, ranks)), block_n, splits, pdl),
        num_warps=4 if height == 16 else 8, num_stages=1,
    )  # fmt: skip
