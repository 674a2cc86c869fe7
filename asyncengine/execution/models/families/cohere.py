"""Cohere's Command models: both branches read one layer norm, rotation of neighbouring pairs, scaled logits.

Cohere 2 rotates only where there is a window.
"""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import alternate, llama_like, rotary_of, windows_of


def complete(config: ModelConfig) -> None:
    if config.model_type == "cohere2":
        alternate(config, config.get("sliding_window_pattern", 4))


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `CohereForCausalLM`, `Cohere2ForCausalLM`."""
    norm = NormConfig("layer", epsilon=config.layer_norm_eps)
    second = config.model_type == "cohere2"
    windows = windows_of(config) if second else [None] * config.num_hidden_layers
    attention = {
        "window": windows,
        "rotary": [None if second and window is None else 0 for window in windows],
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
        "head_norm": norm if getattr(config, "use_qk_norm", False) else None,
        "norm_scope": "each",
    }
    return llama_like(
        config, length, attention=attention, layer={"before_mlp": None, "parallel": True}, norm=norm,
        rotary=(rotary_of(config, length, style="interleaved"),), logit_scale=config.logit_scale,
    )  # fmt: skip
