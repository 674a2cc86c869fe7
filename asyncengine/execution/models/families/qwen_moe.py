"""Qwen 2 and 3 with experts (Yang et al. 2024, 2025), and OLMoE (Muennighoff et al. 2024), which uses their names."""

from __future__ import annotations

from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.experts import ExpertsConfig
from asyncengine.execution.layers.mlp import MLPConfig, MoEConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import KINDS, activation, llama_like, windows_of

_SHARED = "mlp.shared_expert."


def complete(config: ModelConfig) -> None:
    slides = config.get("use_sliding_window")
    if config.model_type in ("qwen2_moe", "qwen3_moe") and not slides:
        config.sliding_window = 0 if config.model_type == "qwen2_moe" else None
    elif config.model_type == "qwen3_vl_moe_text":
        config.sliding_window = None
    if config.model_type == "qwen2_moe" and config.layer_types is None:
        first = config.get("max_window_layers", 28) if slides else 0
        config.layer_types = [KINDS[layer < first and not layer % 2] for layer in range(config.num_hidden_layers)]


def shared_expert(config: Any, act: str) -> dict[str, Any]:
    """Fields of `MoEConfig` for an expert that all rows go to, behind a gate."""
    up, down = (f"{_SHARED}gate_proj", f"{_SHARED}up_proj"), f"{_SHARED}down_proj"
    shared = MLPConfig(config.shared_expert_intermediate_size, act, up, down)
    return {"shared": shared, "shared_gate": "mlp.shared_expert_gate.weight"}


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `Qwen2MoeForCausalLM`, `Qwen3MoeForCausalLM`, `Qwen3VLMoeTextModel`, `OlmoeForCausalLM`."""
    family, act = config.model_type, activation(config)
    norm = NormConfig(epsilon=config.rms_norm_eps)
    images = family == "qwen3_vl_moe_text"
    normalised = images or bool(config.norm_topk_prob)
    router = RouterConfig(config.num_experts, config.num_experts_per_tok, normalised=normalised)
    if family == "qwen2_moe":
        own: dict[str, Any] = {"qkv_bias": config.qkv_bias, "window": windows_of(config)}
    else:
        own = {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias, "head_norm": norm}
        own |= {"norm_scope": "whole"} if family == "olmoe" else {"window": config.sliding_window}
    if family == "olmoe" and config.clip_qkv is not None:
        raise UnsupportedModel("family 'olmoe' with clip_qkv is not written down")
    inner = config.intermediate_size if family == "olmoe" else config.moe_intermediate_size
    experts = ExpertsConfig(config.num_experts, inner, act, either=images)
    mixture = MoEConfig(router, experts, **(shared_expert(config, act) if family == "qwen2_moe" else {}))

    def sparse(index: int) -> MoEConfig | None:
        if family == "olmoe":
            return mixture
        dense = index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step or not config.num_experts
        return None if dense else mixture

    mixtures = [sparse(index) for index in range(config.num_hidden_layers)]
    return llama_like(config, length, attention=own, sparse=mixtures, norm=norm)
