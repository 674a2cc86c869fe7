"""Granite 3 and 4 (IBM): Llama with multipliers, and with experts; Granite 4 with Mamba-2 in most layers."""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.experts import ExpertsConfig, Stacked
from asyncengine.execution.layers.mlp import MLPConfig, MoEConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import activation, layer_types_of, llama_like, rotary_of, with_states
from asyncengine.execution.models.families.mamba import KINDS, complete_mixer, mixer

_BLOCK = "block_sparse_moe."
_SHARED: dict[str, Any] = {"up": ("shared_mlp.input_linear",), "down": "shared_mlp.output_linear"}


def complete(config: ModelConfig) -> None:
    if config.model_type == "granitemoehybrid":
        complete_mixer(config)
        config.layer_types = config.layer_types or ["linear_attention"] * config.num_hidden_layers


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `GraniteForCausalLM`, `GraniteMoeForCausalLM`, `GraniteMoeSharedForCausalLM` and
    `GraniteMoeHybridForCausalLM`."""
    hybrid = config.model_type == "granitemoehybrid"
    mixture = _mixture(config)
    rotates = not hybrid or config.position_embedding_type == "rope"

    attention = {
        "scale": float(config.attention_multiplier),
        "rotary": 0 if rotates else None,
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
    }
    mlp: dict[str, Any] = {"bias": bool(getattr(config, "mlp_bias", False))}
    if hybrid:
        mlp = {"width": config.shared_intermediate_size, "activation": activation(config), **_SHARED}
    made = llama_like(
        config, length, attention=attention, mlp=mlp, sparse=mixture,
        rotary=(rotary_of(config, length),) if rotates else (),
        embedding_scale=float(config.embedding_multiplier),
        residual_scale=float(config.residual_multiplier),
        logit_scale=1.0 / config.logits_scaling,
    )  # fmt: skip
    return with_states(made, _kinds(config), mixer(config)) if hybrid else made


def _kinds(config: Any) -> list[str]:
    """Types of the layers. transformers calls attention by its full name where older files do not."""
    return ["full_attention" if kind == "attention" else kind for kind in layer_types_of(config, (*KINDS, "attention"))]


def _mixture(config: Any) -> MoEConfig | None:
    count, act = getattr(config, "num_local_experts", 0), activation(config)
    if not count:
        return None
    names = (f"{_BLOCK}router.layer.weight", f"{_BLOCK}input_linear.weight", f"{_BLOCK}output_linear.weight")
    others = (f"{_BLOCK}router.weight", f"{_BLOCK}experts.gate_up_proj", f"{_BLOCK}experts.down_proj")
    router = RouterConfig(count, config.num_experts_per_tok, name=names[0])
    stacked = Stacked((names[1],), names[2])
    experts = ExpertsConfig(count, config.intermediate_size, act, stacked=stacked, only_stacked=True)
    width = getattr(config, "shared_intermediate_size", 0)
    shared = MLPConfig(width, act, **_SHARED) if width else None
    return MoEConfig(router, experts, shared, aliases=tuple(zip(names, others, strict=True)))
