"""Comparing forms of a part: random input, what counts as the same, and what a model hands to its layers."""

from __future__ import annotations

from typing import Any

import torch

Context = dict[str, Any]
"""Keyword arguments of a decoder layer beside its input: positions, cosines and sines, constants."""

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def same(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Equal up to rounding of their type, relative to the largest value."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    difference = float((expected.float() - found.float()).abs().max())
    return difference <= _TOLERANCE[expected.dtype] * max(float(expected.float().abs().max()), 1e-6)


def random_like(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal numbers in the type of `like` and where it is, the same at every call for a shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(like.dtype).to(like.device)


_PROBE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of a whole model, relative to the largest logit."""


def agree(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Equal up to the rounding that a whole model accumulates in its type."""
    difference = float((expected.float() - found.float()).abs().max())
    return difference <= _PROBE_ERROR[expected.dtype] * float(expected.float().abs().max())
