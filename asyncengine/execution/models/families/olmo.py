"""OLMo 1 (Groeneveld et al. 2024), 2 (OLMo et al. 2025) and 3, and EXAONE 4 (LG AI Research 2025).

OLMo 1 normalises without weights. The others normalise what a branch gives, not what it takes, and queries and keys:
OLMo over all heads at once, EXAONE each head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.config import Defaults, ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import alternate, layer_types_of, llama_like, rotary_of, windows_of

_AFTER = {
    "before_attention": None, "after_attention": "post_attention_layernorm", "before_mlp": None,
    "after_mlp": "post_feedforward_layernorm",
}  # fmt: skip
DEFAULTS: Defaults = {
    "olmo": {"num_key_value_heads": None, "clip_qkv": None},
    "olmo2": {"num_key_value_heads": None},
    "olmo3": {"num_key_value_heads": None, "rope_theta": 5e5, "rope_local_base_freq": 5e5},
}  # fmt: skip


def complete(config: ModelConfig) -> None:
    if config.model_type == "olmo3":
        alternate(config, 4)
    elif config.model_type == "exaone4":
        alternate(config, 0 if config.sliding_window is None else config.get("sliding_window_pattern", 4))


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `OlmoForCausalLM`, `Olmo2ForCausalLM`, `Olmo3ForCausalLM`, `Exaone4ForCausalLM`."""
    family, kinds, windows = config.model_type, layer_types_of(config), windows_of(config)
    bias = family != "exaone4" and bool(config.attention_bias)
    if family == "olmo":
        norm = NormConfig("layer", 1e-5, weight=False)
        own = {"qkv_bias": bias, "out_bias": bias, "clip": config.clip_qkv}
        return llama_like(config, length, attention=own, norm=norm)
    norm = NormConfig(epsilon=config.rms_norm_eps)
    rotated = ["full_attention", "sliding_attention"]
    """Kinds of layers that have frequencies of their own."""
    own_kinds = rotated if family == "olmo3" else [None]
    rotary = tuple(replace(rotary_of(config, length, kind), exact=family != "exaone4") for kind in own_kinds)

    places: list[int | None] = [rotated.index(kind) if family == "olmo3" else 0 for kind in kinds]
    if family == "exaone4" and config.sliding_window is not None:  # then layers with windows alone rotate
        places = [0 if kind == "sliding_attention" else None for kind in kinds]
    attention = {
        "rotary": places, "window": windows, "qkv_bias": bias, "out_bias": bias, "head_norm": norm,
        "norm_scope": "head" if family == "exaone4" else "whole",
    }  # fmt: skip
    return llama_like(config, length, attention=attention, layer=_AFTER, norm=norm, rotary=rotary)
