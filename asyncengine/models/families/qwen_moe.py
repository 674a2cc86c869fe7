"""Qwen 2 and 3 with experts (Yang et al. 2024, 2025), and OLMoE (Muennighoff et al. 2024), which uses their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.layers.experts import ExpertsConfig, MoEConfig
from asyncengine.layers.mlp import MLPConfig
from asyncengine.layers.norm import NormConfig
from asyncengine.layers.routing import RouterConfig
from asyncengine.models.config import Fields
from asyncengine.models.decoder import DecoderConfig
from asyncengine.models.families.common import KINDS, activation, llama_like, windows_of

_SHARED = "mlp.shared_expert."
_EXPERTS: Fields = {
    "num_key_value_heads": int, "num_experts": int, "num_experts_per_tok": int, "decoder_sparse_step": 1,
    "mlp_only_layers": list | None, "eos_token_id": int | list | None,
}  # fmt: skip
FIELDS: Mapping[str, Fields] = {
    "qwen2_moe": {
        **_EXPERTS, "moe_intermediate_size": int, "shared_expert_intermediate_size": int, "norm_topk_prob": False,
        "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "qkv_bias": True,
    },
    "qwen3_moe": {
        **_EXPERTS, "moe_intermediate_size": int, "norm_topk_prob": False, "use_sliding_window": False,
        "sliding_window": 4096,
    },
    "qwen3_vl_moe_text": {
        **_EXPERTS, "moe_intermediate_size": int, "tie_word_embeddings": True, "rope_theta": 5e5,
    },
    "olmoe": {
        **_EXPERTS, "num_key_value_heads": int | None, "norm_topk_prob": False, "rms_norm_eps": 1e-5,
        "clip_qkv": float | None, "eos_token_id": 50279,
    },
}  # fmt: skip
ALIASES: Mapping[str, Mapping[str, str]] = {
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "qwen3_vl_moe_text": {"num_local_experts": "num_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
}  # fmt: skip


def complete(config: Any) -> None:
    config.mlp_only_layers = config.mlp_only_layers or []
    if config.model_type in ("qwen2_moe", "qwen3_moe") and not config.use_sliding_window:
        config.sliding_window = 0 if config.model_type == "qwen2_moe" else None
    if config.model_type == "qwen3_vl_moe_text":
        config.sliding_window = None
    if config.model_type == "qwen2_moe" and config.layer_types is None:
        slides = [config.use_sliding_window and layer < config.max_window_layers and not layer % 2
                  for layer in range(config.num_hidden_layers)]  # fmt: skip
        config.layer_types = [KINDS[bool(each)] for each in slides]


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `Qwen2MoeForCausalLM`, `Qwen3MoeForCausalLM`, `Qwen3VLMoeTextModel`, `OlmoeForCausalLM`."""
    family, act = config.model_type, activation(config)
    norm = NormConfig(epsilon=config.rms_norm_eps)
    images = family == "qwen3_vl_moe_text"
    normalised = images or bool(config.norm_topk_prob)
    router = RouterConfig(config.num_experts, config.num_experts_per_tok, normalised=normalised)
    if family == "qwen2_moe":
        windows = windows_of(config)
        own: dict[str, Any] = {"qkv_bias": config.qkv_bias}
    elif family == "qwen3_moe" or images:
        windows = [config.sliding_window] * config.num_hidden_layers
        own = {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias, "head_norm": norm}
    else:
        if config.clip_qkv is not None:
            raise UnsupportedModel("family 'olmoe' with clip_qkv is not written down")
        windows = [None] * config.num_hidden_layers
        own = {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias, "head_norm": norm}
        own["norm_scope"] = "whole"
    shared = None
    if family == "qwen2_moe":
        width = config.shared_expert_intermediate_size
        shared = MLPConfig(width, act, (f"{_SHARED}gate_proj", f"{_SHARED}up_proj"), f"{_SHARED}down_proj")
    inner = config.intermediate_size if family == "olmoe" else config.moe_intermediate_size
    gate = None if shared is None else "mlp.shared_expert_gate.weight"
    mixture = MoEConfig(router, ExpertsConfig(config.num_experts, inner, act, either=images), shared, gate)

    def sparse(index: int) -> MoEConfig | None:
        if family == "olmoe":
            return mixture
        dense = index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step or not config.num_experts
        return None if dense else mixture

    return llama_like(
        config, length, attention=lambda index: {**own, "window": windows[index]}, sparse=sparse, norm=norm
    )
