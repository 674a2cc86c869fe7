"""StableLM 2 (Bellagente et al. 2024) and Starcoder 2 (Lozhkov et al. 2024): layer norms with biases."""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import llama_like, rotary_of


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `StableLmForCausalLM`, `Starcoder2ForCausalLM`."""
    if config.model_type == "starcoder2":
        bias = config.use_bias
        own: dict[str, Any] = {"window": config.sliding_window, "qkv_bias": bias, "out_bias": bias}
        mlp = {"up": ("mlp.c_fc",), "down": "mlp.c_proj", "gated": False, "bias": bias}
        norm = NormConfig("layer", config.norm_epsilon, bias=True)
        return llama_like(config, length, attention=own, mlp=mlp, norm=norm)
    own = {"qkv_bias": config.use_qkv_bias}
    if config.qk_layernorm:
        own |= {
            "head_norm": NormConfig("layer", config.layer_norm_eps),
            "norm_scope": "each",
            "norm_names": ("self_attn.q_layernorm.norms.{}", "self_attn.k_layernorm.norms.{}"),
        }
    layer = {"parallel": True, "before_mlp": None} if config.use_parallel_residual else {}
    norm = NormConfig("layer", config.layer_norm_eps, bias=True)
    rotary = (rotary_of(config, length, partial=True),)
    return llama_like(config, length, attention=own, layer=layer, norm=norm, rotary=rotary)
