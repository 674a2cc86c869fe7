"""Granite 3 and 4 (IBM): Llama with multipliers. Of Granite 4, those without recurrent layers and experts."""

from __future__ import annotations

from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.models.decoder import DecoderConfig
from asyncengine.models.families.common import activation, llama_like, rotary_of


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """Of `GraniteForCausalLM`, `GraniteMoeHybridForCausalLM`."""
    hybrid = config.model_type == "granitemoehybrid"
    if hybrid and config.num_local_experts:
        raise UnsupportedModel(f"family {config.model_type!r} with experts is not written down")
    rotates = not hybrid or config.position_embedding_type == "rope"

    def attention(index: int) -> dict[str, Any]:
        return {
            "scale": float(config.attention_multiplier),
            "rotary": 0 if rotates else None,
            "qkv_bias": config.attention_bias,
            "out_bias": config.attention_bias,
        }

    mlp: dict[str, Any] = {"bias": False if hybrid else config.mlp_bias}
    if hybrid:
        names = {"up": ("shared_mlp.input_linear",), "down": "shared_mlp.output_linear"}
        mlp |= {"width": config.shared_intermediate_size, "activation": activation(config), **names}
    return llama_like(
        config, length, attention=attention, mlp=mlp,
        rotary=(rotary_of(config, length),) if rotates else (),
        embedding_scale=float(config.embedding_multiplier),
        residual_scale=float(config.residual_multiplier),
        logit_scale=1.0 / config.logits_scaling,
    )  # fmt: skip
