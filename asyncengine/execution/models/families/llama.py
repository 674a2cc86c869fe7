"""Llama (Touvron et al. 2023) and what differs by a bias, a norm of heads, a window or where it rotates.

Mistral, Ministral 3, Qwen 2 and 3, SmolLM 3, Seed-OSS, Hunyuan dense; the text models of Qwen 2, 2.5 and 3 VL, whose
positions have three parts, for text all alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.rotary import RotaryConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families import common

_QKV_BIAS = ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text")
_HEAD_NORMS = {
    "qwen3": ("self_attn.q_norm", "self_attn.k_norm"),
    "qwen3_vl_text": ("self_attn.q_norm", "self_attn.k_norm"),
    "hunyuan_v1_dense": ("self_attn.query_layernorm", "self_attn.key_layernorm"),
}
_WINDOW_EVERYWHERE = ("mistral", "ministral3")


def complete(config: ModelConfig) -> None:
    family, layers = config.model_type, range(config.num_hidden_layers)
    if family in ("qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text"):
        config.sliding_window = config.sliding_window if config.get("use_sliding_window") else None
        common.slide_from(config)
    elif family == "ministral" and config.layer_types is None:
        config.layer_types = [common.KINDS[config.sliding_window is not None]] * len(layers)
    elif family == "smollm3":
        every = config.get("no_rope_layer_interval", 4)
        config.no_rope_layers = config.get("no_rope_layers", [int((layer + 1) % every != 0) for layer in layers])
        slides = config.get("use_sliding_window") and config.get("sliding_window") is not None
        if config.layer_types is None:
            config.layer_types = [common.KINDS[bool(slides and not config.no_rope_layers[layer])] for layer in layers]


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `LlamaForCausalLM`, `MistralForCausalLM`, `MinistralForCausalLM`, `Ministral3ForCausalLM`,
    `Qwen2ForCausalLM`, `Qwen3ForCausalLM`, `SmolLM3ForCausalLM`, `SeedOssForCausalLM`, `HunYuanDenseV1ForCausalLM`,
    `Qwen2VLTextModel`, `Qwen2_5_VLTextModel`, `Qwen3VLTextModel`."""
    family = config.model_type
    windows = common.windows_of(config)
    if family in _WINDOW_EVERYWHERE:
        windows = [config.sliding_window] * config.num_hidden_layers
    bias = bool(getattr(config, "attention_bias", False))
    norm = NormConfig(epsilon=config.rms_norm_eps)
    attention = {
        "rotary": [0 if rotates else None for rotates in config.no_rope_layers] if family == "smollm3" else 0,
        "window": windows,
        "qkv_bias": bias or family in _QKV_BIAS,
        "out_bias": config.attention_out_bias if family == "seed_oss" else bias,
        "norm_after_rotation": family == "hunyuan_v1_dense",
    }
    if family in _HEAD_NORMS:
        attention |= {"head_norm": norm, "norm_names": _HEAD_NORMS[family]}
    mlp = {"bias": family != "hunyuan_v1_dense" and bool(getattr(config, "mlp_bias", False))}
    rotary = _rotary(config, length)
    return common.llama_like(config, length, attention=attention, mlp=mlp, norm=norm, rotary=(rotary,))


def _rotary(config: Any, length: int) -> RotaryConfig:
    parameters = dict(config.rope_parameters)
    if config.model_type == "ministral3":
        period = int(parameters["original_max_position_embeddings"])
        return replace(
            common.rotary_of(config, length), query_growth=(float(parameters["llama_4_scaling_beta"]), period)
        )
    if config.model_type == "hunyuan_v1_dense" and parameters["rope_type"] == "dynamic" and parameters.get("alpha"):
        # Hunyuan calls it dynamic, but the base is stretched by the same for all lengths
        dim = common.head_dim_of(config)
        return common.default_rotary(parameters["rope_theta"] * parameters["alpha"] ** (dim / (dim - 2)), dim)
    return common.rotary_of(config, length)
