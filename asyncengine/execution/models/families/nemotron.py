"""Nemotron (Parmar et al. 2024): layer norms by 1 + weight, a squared ReLU without a gate, half of a head rotated."""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import llama_like, rotary_of


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `NemotronForCausalLM`."""
    bias = bool(config.attention_bias)
    return llama_like(
        config, length, attention={"qkv_bias": bias, "out_bias": bias},
        mlp={"gated": False, "up": ("mlp.up_proj",), "bias": bool(config.mlp_bias)},
        norm=NormConfig("layer", config.norm_eps, offset=1.0, bias=True),
        rotary=(rotary_of(config, length, partial=True),),
    )  # fmt: skip
