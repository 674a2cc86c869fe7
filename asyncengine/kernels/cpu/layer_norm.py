"""Layer normalisation (Ba et al. 2016), alone or with the residual sum before it.

A row is read three times, for its mean, its variance and the result: after the first time it is in the nearest cache.
Written in vectors: a numba loop over so many rows at once is left as it stands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.core import cgutils

from asyncengine.kernels.cpu import vectors
from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.intrinsics import FLOAT32, INT64, KIND, emitted
from asyncengine.kernels.cpu.jit import kind_of, serial_in_order
from asyncengine.kernels.cpu.team import use_team
from asyncengine.kernels.cpu.team_loops import pieces_of
from asyncengine.kernels.cpu.vectors import FLOAT, FLOATS, LANES, LONG, WORD, load

_WORK = 12
"""Bytes that could be read while an element is computed."""


def fits(width: int) -> bool:
    """Whether rows of so many numbers are whole vectors."""
    return width % LANES == 0


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """(x - mean) / deviation * weight + bias over the last dimension, in float32 inside and rounded once.

    x [..., width]; weight and bias float32 [width], whose width `fits`.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    width = weight.shape[0]
    normalise(
        x.data_ptr(), 0, weight.data_ptr(), bias.data_ptr(), 0, out.data_ptr(), x.numel() // width, width,
        np.float32(1), np.float32(epsilon), kind_of(x.dtype), use_team(),
    )  # fmt: skip
    return out


def add_layer_norm(
    residual: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor, bias: torch.Tensor,
    epsilon: float, kept: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(sum, its `layer_norm`) of residual + branch * scale, all [..., width]: the norm is of the sum before it is
    rounded. Not `kept`: the norm in place of the sum."""
    residual, branch = residual.contiguous(), branch.contiguous()
    out = torch.empty_like(residual)
    total = torch.empty_like(residual) if kept else out
    width = weight.shape[0]
    normalise(
        residual.data_ptr(), branch.data_ptr(), weight.data_ptr(), bias.data_ptr(), total.data_ptr(), out.data_ptr(),
        residual.numel() // width, width, np.float32(scale), np.float32(epsilon), kind_of(residual.dtype), use_team(),
    )  # fmt: skip
    return total, out


def _row(alone: bool) -> Any:
    """row(residual, branch, weight, bias, total, out, width, factor, epsilon, kind): one row, by address.

    `alone`: there is no branch, and the sum is not written.
    """

    @emitted(*[INT64] * 7, FLOAT32, FLOAT32, KIND)
    def row(builder: Any, residual: Any, branch: Any, weight: Any, bias: Any, total: Any, out: Any, width: Any,
            factor: Any, epsilon: Any, kind: Any) -> None:  # fmt: skip
        _write_row(builder, alone, kind, residual, branch, weight, bias, total, out, width, factor, epsilon)

    return row


def _write_row(
    builder: Any, alone: bool, kind: Any, residual: Any, branch: Any, weight: Any, bias: Any, total: Any, out: Any,
    width: Any, factor: Any, epsilon: Any,
) -> None:  # fmt: skip
    size = kind.bitwidth // 8
    factors = vectors.splat(builder, factor)
    count = builder.udiv(width, LONG(LANES))
    length = builder.uitofp(width, FLOAT)

    def at(base: Any, index: Any, bytes_each: int) -> Any:
        return builder.add(base, builder.mul(index, LONG(LANES * bytes_each)))

    def value(index: Any) -> Any:
        left = vectors.read(builder, at(residual, index, size), kind)
        if alone:
            return left
        return vectors.multiply_add(builder, vectors.read(builder, at(branch, index, size), kind), factors, left)

    mean = vectors.splat(builder, builder.fdiv(_sum(builder, count, value), length))

    def square(index: Any) -> Any:
        apart = builder.fsub(value(index), mean)
        return builder.fmul(apart, apart)

    variance = builder.fadd(builder.fdiv(_sum(builder, count, square), length), epsilon)
    root = vectors.call(builder, "llvm.sqrt.f32", FLOAT, [variance])
    scale = vectors.splat(builder, builder.fdiv(FLOAT(1.0), root))
    with cgutils.for_range(builder, count) as loop:
        found = value(loop.index)
        if not alone:
            vectors.write(builder, found, at(total, loop.index, size), kind)
        normed = builder.fmul(
            builder.fmul(builder.fsub(found, mean), scale), load(builder, at(weight, loop.index, 4), FLOATS)
        )
        normed = builder.fadd(normed, load(builder, at(bias, loop.index, 4), FLOATS))
        vectors.write(builder, normed, at(out, loop.index, size), kind)


def _sum(builder: Any, count: Any, value: Any) -> Any:
    """The sum of value(0) to value(count - 1), vectors all, in four chains."""
    sums = [cgutils.alloca_once_value(builder, vectors.constant(FLOATS, 0.0)) for _ in range(4)]
    fours = builder.udiv(count, LONG(4))
    with cgutils.for_range(builder, fours) as loop:
        for part, total in enumerate(sums):
            index = builder.add(builder.mul(loop.index, LONG(4)), LONG(part))
            builder.store(builder.fadd(builder.load(total), value(index)), total)
    done = builder.mul(fours, LONG(4))
    with cgutils.for_range(builder, builder.sub(count, done)) as loop:
        builder.store(builder.fadd(builder.load(sums[0]), value(builder.add(done, loop.index))), sums[0])
    four = vectors.sum_lanes(builder, [builder.load(total) for total in sums])
    found = builder.extract_element(four, WORD(0))
    for part in range(1, 4):
        found = builder.fadd(found, builder.extract_element(four, WORD(part)))
    return found


_norm_row, _add_norm_row = _row(True), _row(False)


@serial_in_order
def _normalise_part(
    piece: int, pieces: int, worker: int,
    residual: int, branch: int, weight: int, bias: int, total: int, out: int, rows: int, width: int,
    factor: np.float32, epsilon: np.float32, kind: np.generic,
) -> None:  # fmt: skip
    size = width * vectors.size_of(kind)
    for row in range(rows * piece // pieces, rows * (piece + 1) // pieces):
        at = row * size
        if branch == 0:
            _norm_row(residual + at, 0, weight, bias, 0, out + at, width, factor, epsilon, kind)
        else:
            _add_norm_row(residual + at, branch + at, weight, bias, total + at, out + at, width, factor, epsilon, kind)


@serial_in_order
def normalise(
    residual: int, branch: int, weight: int, bias: int, total: int, out: int, rows: int, width: int,
    factor: np.float32, epsilon: np.float32, kind: np.generic, team: int,
) -> None:  # fmt: skip
    """The same by address; no branch: 0."""
    parallel_for(
        _normalise_part, team, pieces_of(rows * width * _WORK, rows, team),
        (residual, branch, weight, bias, total, out, rows, width, factor, epsilon, kind),
    )  # fmt: skip
