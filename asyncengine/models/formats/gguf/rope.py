"""Rotary embeddings of a GGUF header as transformers' `rope_parameters`.

Frequencies that converters worked out beforehand lie in a tensor of their own (`rope_freqs`: what each is divided by).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.models.formats.gguf.header import Header

Factors = Mapping[str, NDArray[np.float32]]
"""`rope_freqs`, `rope_factors_long` and `rope_factors_short`, as far as a file has them."""

_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA_3_LENGTH = 8192
"""What converters take: they look for `original_max_position_embeddings` where no configuration has it."""


def rope_parameters(
    header: Header, factors: Factors, head_dim: int, base: float = 10000.0, scaling: float = 0.0, kind: str = ""
) -> dict[str, Any]:
    """Of layers that attend to everything; `base`, `scaling` and its `kind` where the header says nothing.

    Raises `UnsupportedModel` for a scaling that is not known.
    """
    theta = header.real("rope.freq_base", base)
    if theta <= 0:
        raise ModelNotFound(f"{header.path}: {header.architecture}.rope.freq_base must be positive, got {theta}")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    rotated = header.whole("rope.dimension_count", head_dim)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise ModelNotFound(
            f"{header.path}: {header.architecture}.rope.dimension_count is {rotated}, heads have {head_dim}"
        )
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    _check_lengths(header, factors, rotated // 2)
    if "rope_freqs" in factors:
        return {**found, **_divided(factors["rope_freqs"], header, theta, rotated)}
    if "rope_factors_long" in factors and "rope_factors_short" in factors:
        return {**found, **_long_rope(header, factors)}
    named = header.value("rope.scaling.type")
    if named is None:
        named = kind or None
    factor = header.real("rope.scaling.factor", header.real("rope.scale_linear", scaling))
    if named in (None, "linear") and factor not in (0.0, 1.0):
        return {**found, "rope_type": "linear", "factor": factor}
    if named == "yarn":
        return {**found, **_yarn(header, factor)}
    if named not in (None, "none", "linear"):
        raise UnsupportedModel(
            f"{header.path}: {header.architecture}.rope.scaling.type {str(named)[:40]!r} is not read"
        )
    return found


def _check_lengths(header: Header, factors: Factors, expected: int) -> None:
    for name, values in factors.items():
        if values.shape != (expected,) or not np.isfinite(values).all() or not (values > 0).all():
            raise ModelNotFound(f"{header.path}: the tensor {name} must hold {expected} positive numbers")


def _yarn(header: Header, factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor or 1.0,
        "original_max_position_embeddings": header.whole(
            "rope.scaling.original_context_length", header.whole("context_length")
        ),
        "beta_fast": header.real("rope.scaling.yarn_beta_fast", header.real("rope.scaling.beta_fast", 32.0)),
        "beta_slow": header.real("rope.scaling.yarn_beta_slow", header.real("rope.scaling.beta_slow", 1.0)),
    }
    if header.value("rope.scaling.yarn_attn_factor") is not None:
        found["attention_factor"] = header.real("rope.scaling.yarn_attn_factor")
    return found


def _long_rope(header: Header, factors: Factors) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "long_factor": _listed(factors["rope_factors_long"]),
        "short_factor": _listed(factors["rope_factors_short"]),
        "original_max_position_embeddings": header.whole(
            "rope.scaling.original_context_length", header.whole("context_length")
        ),
    }


def _divided(divisors: NDArray[np.float32], header: Header, theta: float, rotated: int) -> dict[str, Any]:
    """Llama 3's scaling where the divisors are what it gives; else the divisors as they are."""
    for length in _original_lengths(divisors, theta, rotated):
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA_3}
        scaling["original_max_position_embeddings"] = length
        if np.allclose(llama3_divisors(scaling, theta, rotated), divisors, rtol=1e-5):
            return scaling
    listed = _listed(divisors)  # long and short alike: the same for every length
    return {
        "rope_type": "longrope", "long_factor": listed, "short_factor": listed, "attention_factor": 1.0, "factor": 1.0,
        "original_max_position_embeddings": header.whole("context_length"),
    }  # fmt: skip


def _original_lengths(divisors: NDArray[np.float32], theta: float, rotated: int) -> list[int]:
    """Lengths that the divisors may have been made for: the usual one, and what those between the bounds give away."""
    most = float(divisors.max())
    between = np.flatnonzero((divisors > 1) & (divisors < most))
    if not len(between):
        return [_LLAMA_3_LENGTH]
    place = int(between[len(between) // 2])
    share = (1 / float(divisors[place]) - 1 / most) / (1 - 1 / most)
    wave = 2 * math.pi * theta ** (2 * place / rotated)
    low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
    return [_LLAMA_3_LENGTH, max(round(wave * (share * (high - low) + low)), 1)]


def llama3_divisors(scaling: Mapping[str, Any], theta: float, rotated: int) -> NDArray[np.float64]:
    """What Llama 3.1 divides each frequency by (Dubey et al. 2024)."""
    waves = 2 * math.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = (scaling["original_max_position_embeddings"] / waves - low) / (high - low)
    divisors: NDArray[np.float64] = 1 / (1 / scaling["factor"] + np.clip(share, 0, 1) * (1 - 1 / scaling["factor"]))
    return divisors


def _listed(values: NDArray[np.float32]) -> list[float]:
    return [float(value) for value in values]
