"""Low-rank deltas of rows that use different adapters, each row's adapter read on the device.

What is launched depends on the number of rows alone, so that a CUDA graph can hold it: which slot each row uses may
change before a replay. The ideas are those of Punica (Chen et al. 2023) and of vLLM's kernels for LoRA.

* A few rows: one kernel. Each program makes x A^T of one row again, for some of the outputs.
* More: rows are put in order by slot, in tiles of one slot each. One kernel makes x A^T of a tile in parts, another
  adds them up and multiplies by B. There are as many programs as there could be tiles.

A merged product is one launch of each, whatever the number of its parts. Sums are float32; no result of a row depends
on the rows beside it. Programs without work end at once, but only behind `gdc_wait`: whoever waits for a kernel relies
on that it waited, too.
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
"""Most rows of the form for a few; the most numbers of A that one of its programs reads, and that all read."""
_AT_ONCE, _WIDE = 2**14, 128
"""Numbers of A that such a program reads at once; outputs that a program makes, or half of them."""
_SHARES, _PARTS = {16: 512, 64: 2048}, 8
"""Inputs of a part of x A^T by the height of tiles, as long as there are no more than so many parts."""
_NUMBERS = ["x_step", "y_step", "inputs", "outputs", "rank"]


class Factors(NamedTuple):
    """The factors of all slots for one product."""

    a: torch.Tensor
    """[slots, parts, rank, inputs], contiguous; the rank is a multiple of 8."""
    b: torch.Tensor
    """[slots, rank, outputs], contiguous."""
    begins: torch.Tensor
    """int32 [parts + 1] on the device: where each part's outputs begin and the last one's end, in steps of `unit`."""
    widest: int
    """Outputs of the largest part."""
    unit: int
    """A power of two, at most 16, that divides the inputs and all ends of parts: it tells how wide loads may be."""

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
    step: tl.constexpr, unit: tl.constexpr, ranks: tl.constexpr, deep: tl.constexpr, chunks: tl.constexpr,
    wide: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """One row and up to `wide` outputs of a part. The slots and the factors are older than the kernel ahead."""
    part, row, width, inner = tl.program_id(1), tl.program_id(2), outputs * unit, inputs * unit
    slot = tl.load(slots + row).to(tl.int64)
    left = tl.load(begins + part) * unit + tl.program_id(0) * wide
    right = tl.load(begins + part + 1) * unit
    real = (slot >= 0) & (left < right)
    n, r, k = left + tl.arange(0, wide), tl.arange(0, ranks), tl.arange(0, deep)
    own = (r < tl.where(real, rank, 0))[:, None]
    up = tl.load(b + (slot * rank + r)[:, None] * width + n[None, :], mask=own & (n < right)[None, :], other=0.0)
    lines = a + ((slot * tl.num_programs(1) + part) * rank + r)[:, None] * inner
    down = tl.load(lines + k[None, :], mask=own & (k < inner)[None, :], other=0.0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    if real:
        at = y + row.to(tl.int64) * y_step * step + n
        found = tl.load(at, mask=n < right, other=0.0).to(tl.float32)  # sooner than the sums that it waits for
        total = tl.zeros([ranks, deep], tl.float32)
        for chunk in tl.static_range(chunks):
            k = chunk * deep + tl.arange(0, deep)
            if chunk > 0:
                down = tl.load(lines + k[None, :], mask=own & (k < inner)[None, :], other=0.0)
            values = tl.load(x + row.to(tl.int64) * x_step * step + k, mask=k < inner, other=0.0)
            total += down.to(tl.float32) * values.to(tl.float32)[None, :]
        found += tl.sum(up.to(tl.float32) * tl.sum(total, 1)[:, None], 0)
        tl.store(at, found.to(y.dtype.element_ty), mask=n < right)


@triton.jit(do_not_specialize=["count"])
def _lora_tile(slots, own, rows, count, bins: tl.constexpr, height: tl.constexpr, chunk: tl.constexpr):
    """One program for each tile: it counts the rows of all slots to find its own. The last bin is that of none."""
    tile, each, bin = tl.program_id(0), tl.arange(0, chunk), tl.arange(0, bins)
    sizes = tl.zeros([bins], tl.int32)
    for first in range(0, count, chunk):
        found = tl.load(slots + first + each, mask=first + each < count, other=-1).to(tl.int32)
        sizes += tl.histogram(tl.where(found < 0, bins - 1, found), bins)
    tiles = tl.where(bin < bins - 1, (sizes + height - 1) // height, 0)
    slot = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    tl.store(own + tile, tl.where(slot < bins, slot, -1))
    begin = (tile - tl.sum(tl.where(bin < slot, tiles, 0), 0)) * height
    place = tl.arange(0, height)
    into = rows + tile * height
    tl.store(
        into + place, tl.full([height], -1, tl.int32), mask=begin + place >= tl.sum(tl.where(bin == slot, sizes, 0))
    )
    for first in range(0, count, chunk):
        found = tl.load(slots + first + each, mask=first + each < count, other=-1).to(tl.int32)
        mine = (found == slot).to(tl.int32)
        at = tl.cumsum(mine, 0) - mine - begin
        tl.store(into + at, first + each, mask=(mine > 0) & (at >= 0) & (at < height))
        begin -= tl.sum(mine, 0)


@triton.jit(do_not_specialize=["x_step", "inputs", "columns", "share"])
def _lora_shrink(
    x, a, slots, rows, down, x_step, inputs, columns, share,
    step: tl.constexpr, unit: tl.constexpr, height: tl.constexpr, broad: tl.constexpr, deep: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """One tile times up to `broad` rows of its A, over a share of the inputs."""
    if pdl:
        gdc_wait()
        gdc_launch_dependents()  # not sooner: the next kernel looks at the tiles before it waits
    tile, inner = tl.program_id(0), inputs * unit
    each = tl.arange(0, height)
    slot, row = tl.load(slots + tile).to(tl.int64), tl.load(rows + tile * height + each)[:, None]
    if slot >= 0:
        column = (tl.program_id(1) * broad + tl.arange(0, broad))[None, :]
        left, right = x + row.to(tl.int64) * x_step * step, a + (slot * columns + column) * inner
        first = tl.program_id(2) * share * deep
        total = tl.zeros([height, broad], tl.float32)
        for begin in range(first, tl.minimum(first + share * deep, inner), deep):
            k = begin + tl.arange(0, deep)
            own = tl.load(left + k[None, :], mask=(row >= 0) & (k < inner)[None, :], other=0.0)
            factor = tl.load(right + k[:, None], mask=(column < columns) & (k < inner)[:, None], other=0.0)
            total = tl.dot(own, factor, total, input_precision="ieee")
        line = (tl.program_id(2) * tl.num_programs(0) + tile) * height + each[:, None]
        tl.store(down + line.to(tl.int64) * columns + column, total, mask=column < columns)


@triton.jit
def _sums(lines, r, rank, apart, parts: tl.constexpr):
    """x A^T of a tile: the sum of its parts, in their order."""
    total = tl.load(lines + r[None, :], mask=(r < rank)[None, :], other=0.0)
    for part in tl.static_range(1, parts):
        total += tl.load(lines + part * apart + r[None, :], mask=(r < rank)[None, :], other=0.0)
    return total


@triton.jit(do_not_specialize=["y_step", "outputs", "rank"])
def _lora_expand(
    down, b, begins, slots, rows, y, y_step, outputs, rank,
    step: tl.constexpr, unit: tl.constexpr, height: tl.constexpr, ranks: tl.constexpr, wide: tl.constexpr,
    parts: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Up to `wide` outputs of a part, of one tile."""
    tile, part, each = tl.program_id(0), tl.program_id(2), tl.arange(0, height)
    slot, row = tl.load(slots + tile).to(tl.int64), tl.load(rows + tile * height + each)[:, None]
    left = tl.load(begins + part) * unit + tl.program_id(1) * wide
    right = tl.load(begins + part + 1) * unit
    real = (slot >= 0) & (left < right)
    n, r = (left + tl.arange(0, wide))[None, :], tl.arange(0, ranks)
    lines_b = b + slot * rank * outputs * unit + n
    factor = tl.load(
        lines_b + r[:, None] * outputs * unit, mask=(r < tl.where(real, rank, 0))[:, None] & (n < right), other=0.0
    )
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    if real:
        at, there = y + row.to(tl.int64) * y_step * step + n, (row >= 0) & (n < right)
        before = tl.load(at, mask=there, other=0.0).to(tl.float32)
        columns = tl.num_programs(2) * rank
        lines = down + (tile * height + each)[:, None].to(tl.int64) * columns + part * rank
        apart = tl.num_programs(0).to(tl.int64) * height * columns
        total = tl.dot(_sums(lines, r, rank, apart, parts).to(b.dtype.element_ty), factor, input_precision="ieee")
        for first in range(ranks, rank, ranks):
            r = first + tl.arange(0, ranks)
            inside = (r < rank)[:, None] & (n < right)
            factor = tl.load(lines_b + r[:, None].to(tl.int64) * outputs * unit, mask=inside, other=0.0)
            own = _sums(lines, r, rank, apart, parts).to(b.dtype.element_ty)
            total = tl.dot(own, factor, total, input_precision="ieee")
        tl.store(at, (before + total).to(y.dtype.element_ty), mask=there)


_few, _shrunk, _expanded = (Launcher(kernel) for kernel in (_lora_few, _lora_shrink, _lora_expand))


def tiles_of(slots: torch.Tensor, count: int) -> Tiles:
    """Put rows in order by slot: `slots` int64 [rows] below `count`, -1 for none."""
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
    """Add to each row of y [rows, outputs] what its slot makes of its row of x [rows, inputs]; rows may lie apart.

    `slots` int64 [rows], -1 for none, are older than the last kernel that was launched. `tiles`: these rows by slot.
    """
    (a, b, begins, widest, unit), rows = factors, len(x)
    _, parts, rank, inputs = a.shape
    if not rows:
        return
    x, outputs, early = x if x.stride(1) == 1 else x.contiguous(), b.shape[2], starts_early(x.device)
    step = gcd(16, x.stride(0), y.stride(0))
    apart, ranks, blocks = (x.stride(0) // step, y.stride(0) // step), triton.next_power_of_2(rank), -(-widest // _WIDE)
    if rows <= _FEW and ranks <= 128 and ranks * inputs <= _A and rows * blocks * parts * ranks * inputs <= _READ:
        deep = min(_AT_ONCE // ranks, triton.next_power_of_2(inputs))
        sizes = (*apart, inputs // unit, outputs // unit, rank)
        constants = (step, unit, ranks, deep, -(-inputs // deep), _WIDE, early)
        _few((blocks, parts, rows), (x, a, b, begins, slots, y), sizes, constants, num_warps=8)
        return
    own, columns, deep = tiles(), parts * rank, 256 // x.element_size()
    count, height = own.rows.shape
    share = max(_SHARES[height] // deep, -(-inputs // (_PARTS * deep)))
    shares = -(-inputs // (share * deep))
    down = x.new_empty((shares, count, height, columns), dtype=torch.float32)
    wide = 2 * _WIDE if widest > 4096 and ranks <= 32 and height == 16 else _WIDE
    broad = min(32 if height == 16 else 64, max(16, triton.next_power_of_2(columns)))
    _shrunk(
        (count, -(-columns // broad), shares), (x, a, *own, down), (apart[0], inputs // unit, columns, share),
        (step, unit, height, broad, deep, early), num_warps=4, num_stages=3,
    )  # fmt: skip
    _expanded(
        (count, -(-widest // wide), parts), (down, b, begins, *own, y), (apart[1], outputs // unit, rank),
        (step, unit, height, min(64, max(16, ranks)), wide, shares, early),
        num_warps=4 if height == 16 else 8, num_stages=1,
    )  # fmt: skip
