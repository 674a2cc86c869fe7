"""Frequencies of rotary embeddings (Su et al. 2021), scaled for longer sequences than a model was trained on.

By positions ("linear", Chen et al. 2023), by a larger base ("dynamic", bloc97 2023), YaRN (Peng et al. 2023), LongRoPE
(Ding et al. 2024), Llama 3.1's, and Gemma 4's, which rotates only the first dimensions. To the bit transformers' own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Scaled = Callable[[Mapping[str, Any], int, int, int], tuple[torch.Tensor, float]]
"""(rope_parameters, dimensions that are rotated, positions of the model, longest sequence) -> (frequencies [dim / 2],
factor of sines and cosines). Raises `KeyError` for a parameter that is missing."""


def plain(base: float, dim: int) -> torch.Tensor:
    """[dim / 2] frequencies without scaling, in float32."""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _linear(parameters: Mapping[str, Any], dim: int, positions: int, length: int) -> tuple[torch.Tensor, float]:
    return plain(parameters["rope_theta"], dim) / parameters["factor"], 1.0


def _dynamic(parameters: Mapping[str, Any], dim: int, positions: int, length: int) -> tuple[torch.Tensor, float]:
    factor = parameters["factor"]
    growth = (factor * max(length, positions) / positions) - (factor - 1)
    return plain(parameters["rope_theta"] * growth ** (dim / (dim - 2)), dim), 1.0


def _yarn(parameters: Mapping[str, Any], dim: int, positions: int, length: int) -> tuple[torch.Tensor, float]:
    base, factor, original = (parameters[key] for key in ("rope_theta", "factor", "original_max_position_embeddings"))
    factor = positions / original if factor is None else factor

    def magnitude(scale: float = 1) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    def dimension(rotations: float) -> float:
        """The dimension that rotates so often within the original length."""
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))

    scaling, some, every = (parameters.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if scaling is None:
        scaling = magnitude(some) / magnitude(every) if some and every else magnitude()
    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    periods = base ** (torch.arange(0, dim, 2).to(dtype=torch.float) / dim)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, scaling


def _longrope(parameters: Mapping[str, Any], dim: int, positions: int, length: int) -> tuple[torch.Tensor, float]:
    original, scaling = parameters["original_max_position_embeddings"], parameters.get("attention_factor")
    factor = positions / original if parameters.get("factor") is None else parameters["factor"]
    if scaling is None:
        scaling = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = parameters["long_factor" if length > original else "short_factor"]
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * parameters["rope_theta"] ** exponents), scaling


def _llama3(parameters: Mapping[str, Any], dim: int, positions: int, length: int) -> tuple[torch.Tensor, float]:
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    found = plain(parameters["rope_theta"], dim)
    wavelengths = 2 * math.pi / found
    long, short = wavelengths > original / low, wavelengths < original / high
    scaled = torch.where(long, found / factor, found)
    kept = (original / wavelengths - low) / (high - low)
    return torch.where(~short * ~long, (1 - kept) * scaled / factor + kept * scaled, scaled), 1.0


def _proportional(parameters: Mapping[str, Any], dim: int, positions: int, length: int) -> tuple[torch.Tensor, float]:
    rotated = 2 * int(parameters.get("partial_rotary_factor", 1.0) * dim // 2)
    found = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float32) / dim))
    return torch.cat((found, torch.zeros((dim - rotated) // 2))) / parameters.get("factor", 1.0), 1.0


SCALED: Mapping[str, Scaled] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
"""Functions by rope_type."""
