"""Mixtral (Jiang et al. 2024) and what kept its names of experts' matrices: Phi-MoE (Abdin et al. 2024), MiniMax M2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.experts import ExpertsConfig
from asyncengine.execution.layers.mlp import MoEConfig
from asyncengine.execution.layers.rotary import RotaryConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import activation, llama_like, rotary_of

_BLOCK = "block_sparse_moe."
_W1, _W2, _W3 = (f"{_BLOCK}experts.{{}}.w{index}.weight" for index in (1, 2, 3))


def complete(config: ModelConfig) -> None:
    if config.model_type == "minimax_m2" and config.get("rotary_dim") is not None:
        config.partial_rotary_factor = config.get("partial_rotary_factor", config.rotary_dim / config.head_dim)


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `MixtralForCausalLM`, `PhimoeForCausalLM`, `MiniMaxM2ForCausalLM`."""
    family = config.model_type
    router = RouterConfig(config.num_local_experts, config.num_experts_per_tok, name=f"{_BLOCK}gate.weight")
    aliases = [(router.name, "mlp.router.weight" if family == "phimoe" else "mlp.gate.weight")]
    own: dict[str, Any] = {"window": getattr(config, "sliding_window", None)}
    changes: dict[str, Any] = {}
    if family == "phimoe":
        if config.num_experts_per_tok != 2:
            raise UnsupportedModel(f"family 'phimoe' with {config.num_experts_per_tok} experts of a row is not known")
        router = replace(router, scores="sparsemixer", spread=config.router_jitter_noise)
        own |= {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias}
        changes = {"norm": NormConfig("layer", config.rms_norm_eps, bias=True), "head_bias": config.lm_head_bias}
        changes["rotary"] = (_phimoe_rotary(config, length),)
    elif family == "minimax_m2":
        correction = f"{_BLOCK}e_score_correction_bias"
        router = replace(router, scores="sigmoid", correction=correction)
        aliases.append((correction, "mlp.e_score_correction_bias"))
        own = {"head_norm": NormConfig(epsilon=config.rms_norm_eps), "norm_scope": "whole"}
        changes["rotary"] = (rotary_of(config, length, partial=True),)
    experts = ExpertsConfig(
        config.num_local_experts, config.intermediate_size, activation(config), up=(_W1, _W3), down=_W2
    )
    mixture = MoEConfig(router, experts, aliases=tuple(aliases))
    return llama_like(config, length, attention=own, sparse=mixture, **changes)


def _phimoe_rotary(config: Any, length: int) -> RotaryConfig:
    """With a scaling by length, cosines are multiplied by one of two settings instead of what it says itself."""
    found, parameters = rotary_of(config, length), config.rope_parameters
    if parameters["rope_type"] == "default":
        return found
    beyond = length > parameters["original_max_position_embeddings"]
    return replace(found, scaling=float(parameters["long_mscale" if beyond else "short_mscale"]))
