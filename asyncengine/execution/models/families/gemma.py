"""Gemma 1, 2 and 3 (Gemma Team 2024, 2025): norms of 1 + weight, embeddings times the root of their width.

Gemma 2 brings norms around both branches, windows and soft caps; Gemma 3 norms of heads in place of the caps on scores,
and other rotary frequencies where there is a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families import common

SANDWICH: Mapping[str, Any] = {
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
"""Norms before and after both branches, fields of `LayerConfig`."""


def complete(config: ModelConfig) -> None:
    if config.model_type == "gemma" and config.hidden_act == "gelu":
        config.hidden_act = "gelu_pytorch_tanh"  # older files say so and mean this
    elif config.model_type != "gemma":
        common.alternate(config, 2 if config.model_type == "gemma2" else config.get("sliding_window_pattern", 6))


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `GemmaForCausalLM`, `Gemma2ForCausalLM`, `Gemma3ForCausalLM`."""
    family = config.model_type
    norm = NormConfig(epsilon=config.rms_norm_eps, offset=1.0)
    kinds = common.layer_types_of(config)
    by_kind: list[str | None] = [*sorted(set(kinds))] if family == "gemma3_text" else [None]
    attention: dict[str, Any] = {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias}
    if family != "gemma":
        attention |= {"window": common.windows_of(config), "scale": config.query_pre_attn_scalar**-0.5}
    if family == "gemma2":
        attention["softcap"] = config.attn_logit_softcapping
    if family == "gemma3_text":
        attention |= {"head_norm": norm, "rotary": [by_kind.index(kind) for kind in kinds]}
    name = config.hidden_act if family == "gemma" else config.hidden_activation
    return common.llama_like(
        config, length, attention=attention, mlp={"activation": common.activation(config, name)},
        layer={} if family == "gemma" else SANDWICH, norm=norm,
        rotary=tuple(common.rotary_of(config, length, kind, head_dim=common.head_dim_of(config)) for kind in by_kind),
        embedding_scale=config.hidden_size**0.5, logit_softcap=getattr(config, "final_logit_softcapping", None),
    )  # fmt: skip
