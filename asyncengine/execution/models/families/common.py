"""Readers of rotary embeddings, windows and layer types, which families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.layers.rotary import RotaryConfig
from asyncengine.execution.models.config import OLDER_TYPES
from asyncengine.execution.models.decoder import DecoderConfig

# Frequencies of rotary embeddings (Su et al. 2021), scaled for longer sequences than a model was trained on.

Scaled = Callable[[Mapping[str, Any], int, int, int], tuple[torch.Tensor, float]]
"""(rope_parameters, rotated dimensions, max_position_embeddings, longest sequence) -> (frequencies [dim / 2], factor of
sines and cosines). Raises `KeyError` for a parameter that is missing."""


def plain(base: float, dim: int) -> torch.Tensor:
    """Unscaled frequencies [dim / 2] in float32."""
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
        """The (fractional) dimension that makes this number of rotations within the original length."""
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
    frequencies = plain(parameters["rope_theta"], dim)
    wavelengths = 2 * math.pi / frequencies
    long, short = wavelengths > original / low, wavelengths < original / high
    scaled = torch.where(long, frequencies / factor, frequencies)
    kept = (original / wavelengths - low) / (high - low)
    return torch.where(~short * ~long, (1 - kept) * scaled / factor + kept * scaled, scaled), 1.0


def _proportional(parameters: Mapping[str, Any], dim: int, positions: int, length: int) -> tuple[torch.Tensor, float]:
    rotated = 2 * int(parameters.get("partial_rotary_factor", 1.0) * dim // 2)
    frequencies = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float32) / dim))
    return torch.cat((frequencies, torch.zeros((dim - rotated) // 2))) / parameters.get("factor", 1.0), 1.0


SCALED: Mapping[str, Scaled] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
"""Functions by rope_type."""


_SECTIONS: Mapping[str, tuple[tuple[int, ...], bool]] = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), ((16, 24, 24), False)),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), ((24, 20, 20), True)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ((11, 11, 10), True)),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text"), ((8, 12, 12), False)),
}
"""model_type -> default `mrope_section` (pairs of dimensions that rotate by time, row and column), and whether the
axes are interleaved or lie in consecutive sections."""
FREQUENCIES = r"(.*\.)?rotary_emb\.inv_freq"
"""Tensors of old checkpoints, which are computed here from config.json."""
ATTENTION = ("full_attention", "sliding_attention")
"""Layer types with attention: those of a family whose table names no `layer_types`."""


def head_dim_of(config: Any) -> int:
    """Size of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _axes_of(config: Any, pairs: int) -> tuple[int, ...]:
    """The position axis (0 time, 1 row, 2 column) of each of `pairs` of dimensions. Empty if positions have one axis,
    or if the configuration's sections do not add up to `pairs`: the model then reads no pictures."""
    default, interleaved = _SECTIONS.get(config.model_type, ((), False))
    sections = tuple(config.rope_parameters.get("mrope_section") or default)
    if not default or len(sections) != 3:
        return ()
    if interleaved:
        return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs))
    axes = tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return axes if len(axes) == pairs else ()


def default_rotary(base: float, dim: int, style: Any = "halves") -> RotaryConfig:
    """Unscaled rotation of a head's first `dim` dimensions, in float32 as in all families' own code."""
    return RotaryConfig(tuple(plain(base, dim).tolist()), 1.0, style)


def rotary_of(
    config: Any, length: int, layer_type: str | None = None, *, head_dim: int | None = None, style: Any = "halves",
    partial: bool = False,
) -> RotaryConfig:  # fmt: skip
    """The rotary embedding that `rope_parameters` describe, for sequences of up to `length` tokens.

    `layer_type`: key of the parameters in a family that has them by layer type. `partial`: the family honours
    `partial_rotary_factor`; transformers' modules of other families ignore it, so it is ignored here.
    """
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    rope_type, full_dim = parameters.get("rope_type", "default"), head_dim or head_dim_of(config)
    if rope_type != "default" and rope_type not in SCALED:
        raise UnsupportedModel(f"family {config.model_type!r} with rope_type {rope_type!r} is not written down")
    is_partial = rope_type != "proportional" and (partial or rope_type != "default")
    dim = int(full_dim * parameters.get("partial_rotary_factor", 1.0)) if is_partial else full_dim
    if dim == full_dim and dim % 2:
        raise ModelNotFound(f"config.json: head_dim must be even where heads are rotated, got {dim}")
    axes = _axes_of(config, dim // 2) if config.model_type in _SECTIONS else ()
    if rope_type == "default":
        return replace(default_rotary(parameters["rope_theta"], dim, style), axes=axes)
    try:
        frequencies, scaling = SCALED[rope_type](parameters, dim, config.max_position_embeddings, length)
    except KeyError as error:
        raise ModelNotFound(f"config.json: rope_parameters of type {rope_type!r} lack {error}") from None
    return RotaryConfig(tuple(frequencies.tolist()), float(scaling), style, axes=axes)


def layer_types_of(config: Any) -> list[str]:
    """The type of each layer; "full_attention" for all if the configuration lists none."""
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [OLDER_TYPES.get(name, name) for name in layer_types]


def attention_types(config: Any) -> list[str]:
    """The layer types with attention that a model has, sorted by name: the order of its rotary embeddings."""
    return sorted({*layer_types_of(config)}.intersection(ATTENTION))


def windows_of(config: Any) -> list[int | None]:
    """The sliding window of each layer in tokens; None for full attention."""
    return [config.sliding_window if name == "sliding_attention" else None for name in layer_types_of(config)]


class TextNames(NamedTuple):
    """Tensor names of the language model within a multimodal model, as transformers' current releases write them."""

    base: str = "model.language_model."
    """Prefix that replaces "model."."""
    head: str = "lm_head"


def with_names(text: DecoderConfig, names: TextNames, config: Any) -> DecoderConfig:
    """The decoder `text` of a language model with the tensor names that it has inside a multimodal model.

    `config` is that of the multimodal model: only it may say that the output layer is tied to the embedding.
    """

    def named(name: str) -> str:
        return name.replace("model.", names.base, 1)

    inputs = text.layer_inputs
    if inputs is not None:
        inputs = replace(
            inputs, table=named(inputs.table), projection=named(inputs.projection), norm=named(inputs.norm)
        )
    return replace(
        text, embedding=named(text.embedding), layer=named(text.layer),
        final_norm=None if text.final_norm is None else named(text.final_norm), head=names.head, layer_inputs=inputs,
        mtp=text.mtp and text.mtp.renamed(named), tied=text.tied or bool(getattr(config, "tie_word_embeddings", False)),
    )  # fmt: skip
