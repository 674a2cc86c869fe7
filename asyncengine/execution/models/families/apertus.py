"""Apertus (Swiss AI Initiative 2025): Llama with norms of heads, a plain feed-forward part and a learned activation."""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import activation, llama_like


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `ApertusForCausalLM`."""
    norm = NormConfig(epsilon=config.rms_norm_eps)
    fields = {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias, "head_norm": norm}
    act = "xielu" if config.hidden_act == "xielu" else activation(config)
    return llama_like(
        config, length, attention=fields, mlp={"activation": act, "up": ("mlp.up_proj",), "gated": False},
        layer={"before_attention": "attention_layernorm", "before_mlp": "feedforward_layernorm"}, norm=norm,
    )  # fmt: skip
