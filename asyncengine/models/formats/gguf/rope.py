"""Rotary embeddings of a GGUF header as transformers' `rope_parameters`.

Frequencies that converters worked out beforehand lie in a tensor (`rope_freqs`: the number each is divided by).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.models.formats.gguf.architectures import Architecture
from asyncengine.models.formats.gguf.header import Header

Factors = Mapping[str, NDArray[np.float32]]
"""The tensors `rope_freqs`, `rope_factors_long` and `rope_factors_short`, those that a file has."""


def rope_parameters(header: Header, row: Architecture, factors: Factors, head_dim: int) -> dict[str, Any]:
    """The `rope_parameters`, by kind of layer where those with a window have others.

    Raises `UnsupportedModel` for a scaling that is not known, or a part of heads that the family cannot rotate.
    """
    given = row.rope(header)
    theta = header.real("rope.freq_base", given.base)
    if theta <= 0:
        raise ModelNotFound(f"{header.path}: {header.architecture}.rope.freq_base must be positive, got {theta}")
    rotated = header.whole("rope.dimension_count", head_dim)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise ModelNotFound(
            f"{header.path}: {header.architecture}.rope.dimension_count is {rotated}, heads have {head_dim}"
        )
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if row.partial:
        found["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise UnsupportedModel(f"{header.path}: {header.architecture} whose heads are rotated in part is not read")
    for name, values in factors.items():
        if values.shape != (rotated // 2,) or not np.isfinite(values).all() or not (values > 0).all():
            raise ModelNotFound(f"{header.path}: the tensor {name} must hold {rotated // 2} positive numbers")
    kind = header.value("rope.scaling.type")
    kind = given.kind or None if kind is None else kind
    factor = header.real("rope.scaling.factor", header.real("rope.scale_linear", given.factor))
    if "rope_freqs" in factors:
        # Llama 3's scaling among others: alike for every length
        found |= _long(header, factors["rope_freqs"], factors["rope_freqs"])
        found |= {"factor": 1.0, "attention_factor": 1.0}
    elif "rope_factors_long" in factors and "rope_factors_short" in factors:
        found |= _long(header, factors["rope_factors_long"], factors["rope_factors_short"])
    elif kind == "yarn":
        found |= {**_yarn(header, factor), **given.yarn}
    elif kind not in (None, "none", "linear"):
        raise UnsupportedModel(f"{header.path}: {header.architecture}.rope.scaling.type {str(kind)[:40]!r} is not read")
    elif kind != "none" and factor not in (0.0, 1.0):
        found |= {"rope_type": "linear", "factor": factor}
    if given.local is None:
        return found
    return {"full_attention": found, "sliding_attention": {"rope_type": "default", "rope_theta": given.local}}


def original_length(header: Header) -> int:
    """The longest text without the scaling of frequencies."""
    return header.whole("rope.scaling.original_context_length", header.whole("context_length"))


def _yarn(header: Header, factor: float) -> dict[str, Any]:
    def beta(name: str, default: float) -> float:
        return header.real(f"rope.scaling.yarn_{name}", header.real(f"rope.scaling.{name}", default))

    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor or 1.0,
        "original_max_position_embeddings": original_length(header),
        "beta_fast": beta("beta_fast", 32.0),
        "beta_slow": beta("beta_slow", 1.0),
    }
    if header.value("rope.scaling.yarn_attn_factor") is not None:
        found["attention_factor"] = header.real("rope.scaling.yarn_attn_factor")
    return found


def _long(header: Header, long: NDArray[np.float32], short: NDArray[np.float32]) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist(),
        "original_max_position_embeddings": original_length(header),
    }  # fmt: skip
