"""A head's norm and rotation: in vectors as number by number, and as torch does it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncengine.kernels.cpu.jit import serial_in_order, tag_of
from asyncengine.kernels.cpu.qk_norm_rope import _rotate_numbers, _rotate_vectors, prepare_head

SHAPES = [(64, 64), (64, 32), (48, 32), (16, 0), (128, 128), (96, 64)]
"""Dimensions, and those that are rotated: vectors do them."""
ODD_SHAPES = [(40, 40), (24, 12), (64, 20), (6, 0)]
EPSILON = 1e-6


@serial_in_order
def turn_in_both_ways(
    source: int, vectors: int, numbers: int, dim: int, norm: int, scale: Any, cos: int, sin: int, rotary: int, kind: Any
) -> None:
    _rotate_vectors(source, vectors, dim, norm, scale, cos, sin, rotary, kind)
    _rotate_numbers(source, numbers, dim, norm, scale, cos, sin, rotary, kind)


def given(dim: int, rotary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Head, weights of its norm, cosines and sines."""
    generator = torch.Generator().manual_seed(dim + rotary)
    angles = torch.rand(rotary, generator=generator) * 6
    head, weight = (torch.randn(dim, generator=generator) * 3, 1 + torch.randn(dim, generator=generator) / 4)
    return head.to(dtype), weight, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "rotary"), SHAPES)
def test_vectors_give_the_same_numbers(dim: int, rotary: int, dtype: torch.dtype, normed: bool) -> None:
    head, weight, cos, sin = given(dim, rotary, dtype)
    by_vectors, by_numbers = torch.full_like(head, 9), torch.full_like(head, 7)
    turn_in_both_ways(
        head.data_ptr(), by_vectors.data_ptr(), by_numbers.data_ptr(), dim, weight.data_ptr() if normed else 0,
        np.float32(0.37), cos.data_ptr(), sin.data_ptr(), rotary, tag_of(dtype),
    )  # fmt: skip
    if dtype == torch.bfloat16:
        assert torch.equal(by_vectors, by_numbers)
    else:  # a product and a sum may be rounded together, which of two products is the compiler's choice
        assert torch.allclose(by_vectors, by_numbers, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "rotary"), SHAPES + ODD_SHAPES)
def test_equals_torch(dim: int, rotary: int, dtype: torch.dtype, normed: bool) -> None:
    """Results are rounded after each operation; the norm's own sum may differ in its last bit."""
    head, weight, cos, sin = given(dim, rotary, dtype)
    out = torch.full_like(head, 9)
    prepare_head(
        head.data_ptr(), out.data_ptr(), dim, weight.data_ptr() if normed else 0, np.float32(EPSILON), cos.data_ptr(),
        sin.data_ptr(), rotary, tag_of(dtype),
    )  # fmt: skip
    expected = head.clone()
    if normed:
        expected = (head.float() * torch.rsqrt(head.float().square().mean() + EPSILON) * weight).to(dtype)
    turned = expected[:rotary]
    half = torch.cat((-turned[rotary // 2 :], turned[: rotary // 2]))
    expected[:rotary] = turned * cos + half * sin
    if normed or dtype == torch.float32:
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        assert torch.allclose(out.float(), expected.float(), rtol=tolerance, atol=tolerance)
    else:
        assert torch.equal(out, expected)


def test_what_is_not_finite_shows() -> None:
    for bad in (float("nan"), float("inf")):
        head, _, cos, sin = given(64, 64, torch.bfloat16)
        head[5] = bad
        out = torch.zeros_like(head)
        prepare_head(
            head.data_ptr(), out.data_ptr(), 64, 0, np.float32(EPSILON), cos.data_ptr(), sin.data_ptr(), 64,
            tag_of(head.dtype),
        )  # fmt: skip
        assert (~torch.isfinite(out)).nonzero().flatten().tolist() == [5, 37]
