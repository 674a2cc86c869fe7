"""Llama (Touvron et al. 2023) and what differs by a bias, a norm of heads or a window: Mistral, Qwen 2 and 3."""

from __future__ import annotations

from typing import Any

from asyncengine.layers.norm import NormConfig
from asyncengine.models.decoder import DecoderConfig
from asyncengine.models.families.common import llama_like, windows_of

_QKV_BIAS = ("qwen2",)
_HEAD_NORMS = ("qwen3",)
_WINDOW_EVERYWHERE = ("mistral", "ministral3")


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """Of `LlamaForCausalLM`, `MistralForCausalLM`, `Ministral3ForCausalLM`, `Qwen2ForCausalLM`, `Qwen3ForCausalLM`."""
    family = config.model_type
    windows = windows_of(config)
    if family in _WINDOW_EVERYWHERE:
        windows = [config.sliding_window] * config.num_hidden_layers
    bias = bool(getattr(config, "attention_bias", False))
    norm = NormConfig(epsilon=config.rms_norm_eps)

    def attention(index: int) -> dict[str, Any]:
        return {
            "window": windows[index],
            "qkv_bias": bias or family in _QKV_BIAS,
            "out_bias": bias,
            "head_norm": norm if family in _HEAD_NORMS else None,
        }

    mlp = {"bias": bool(getattr(config, "mlp_bias", False))}
    return llama_like(config, length, attention=attention, mlp=mlp, norm=norm)
