"""Phi 3 and 4 (Abdin et al. 2024), GLM 4 (GLM Team 2024): several matrices kept as one, heads rotated in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncengine.models.config import Fields
from asyncengine.models.decoder import DecoderConfig
from asyncengine.models.families.common import llama_like, rotary_of

_SANDWICH = {"after_attention": "post_self_attn_layernorm", "after_mlp": "post_mlp_layernorm"}
_GLM: Fields = {
    "num_key_value_heads": int, "head_dim": int, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
    "partial_rotary_factor": 0.5, "eos_token_id": int | list | None,
}  # fmt: skip
FIELDS: Mapping[str, Fields] = {
    "phi3": {
        "rms_norm_eps": 1e-5, "eos_token_id": 32000, "sliding_window": int | None, "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "glm": _GLM,
    "glm4": _GLM,
    "glm4v_text": {"num_key_value_heads": int, "rms_norm_eps": 1e-5, "eos_token_id": int | list | None},
}  # fmt: skip


def complete(config: Any) -> None:
    if config.model_type == "phi3" and (scaling := config.rope_scaling or config.rope_parameters):
        kind = scaling.get("rope_type", scaling.get("type"))
        config.rope_scaling = {**scaling, **({"rope_type": "longrope"} if kind in ("su", "yarn") else {})}
    elif config.model_type in ("glm", "glm4") and config.eos_token_id is None:
        config.eos_token_id = [151329, 151336, 151338]


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `Phi3ForCausalLM`, `GlmForCausalLM`, `Glm4ForCausalLM`, `Glm4vTextModel`."""
    family = config.model_type
    if family == "phi3":
        own = {"window": config.sliding_window, "qkv": ("self_attn.qkv_proj",)}
    else:
        own = {"qkv_bias": family == "glm4v_text" or config.attention_bias}
    return llama_like(
        config, length, attention=lambda index: own, mlp={"up": ("mlp.gate_up_proj",)},
        layer=_SANDWICH if family in ("glm4", "glm4v_text") else None,
        rotary=(rotary_of(config, length, style="halves" if family == "phi3" else "interleaved", partial=True),),
    )  # fmt: skip
