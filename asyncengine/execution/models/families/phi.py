"""Phi 3 and 4 (Abdin et al. 2024), GLM 4 (GLM Team 2024): several matrices kept as one, heads rotated in part."""

from __future__ import annotations

from typing import Any

from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import llama_like, rotary_of

_SANDWICH = {"after_attention": "post_self_attn_layernorm", "after_mlp": "post_mlp_layernorm"}


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `Phi3ForCausalLM`, `GlmForCausalLM`, `Glm4ForCausalLM`, `Glm4vTextModel`."""
    family = config.model_type
    if family == "phi3":
        own = {"window": config.sliding_window, "qkv": ("self_attn.qkv_proj",)}
    else:
        own = {"qkv_bias": family == "glm4v_text" or config.attention_bias}
    return llama_like(
        config, length, attention=own, mlp={"up": ("mlp.gate_up_proj",)},
        layer=_SANDWICH if family in ("glm4", "glm4v_text") else {},
        rotary=(rotary_of(config, length, style="halves" if family == "phi3" else "interleaved", partial=True),),
    )  # fmt: skip
