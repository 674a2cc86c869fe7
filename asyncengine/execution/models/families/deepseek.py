"""DeepSeek V2 and V3 (DeepSeek-AI 2024), with Kimi K2, which is the latter; GLM 4.7 Flash (Z.ai 2026); and two without
experts, Youtu-LLM (Tencent 2025) and MiniCPM 3 (OpenBMB 2024). All attend to latent vectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.experts import ExpertsConfig
from asyncengine.execution.layers.latent_attention import LatentAttentionConfig
from asyncengine.execution.layers.mlp import MLPConfig, MoEConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.decoder_layer import head_behind
from asyncengine.execution.models.families.common import BEHIND_LAST, FREQUENCIES, activation, rotary_of

_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors, whatever config.json says of the others."""
_DENSE = ("youtu", "minicpm3")
_WITH_HEADS = ("deepseek_v3", "glm4_moe_lite")


def complete(config: ModelConfig) -> None:
    config.head_dim = config.qk_rope_head_dim
    if config.model_type == "minicpm3" and config.v_head_dim is None:
        config.v_head_dim = config.hidden_size // config.num_attention_heads
    if config.model_type == "glm4_moe_lite" and config.mlp_layer_types is None:
        config.mlp_layer_types = ["dense", *["sparse"] * (config.num_hidden_layers - 1)]


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `DeepseekV2ForCausalLM`, `DeepseekV3ForCausalLM`, `Glm4MoeLiteForCausalLM`, `YoutuForCausalLM`,
    `MiniCPM3ForCausalLM`."""
    family, act = config.model_type, activation(config)
    if config.attention_bias:
        raise UnsupportedModel(f"family {family!r} with attention_bias=True is not written down")
    own, shared = config.qk_nope_head_dim, config.qk_rope_head_dim
    attention = LatentAttentionConfig(
        config.num_attention_heads, config.kv_lora_rank, own, shared, config.v_head_dim,
        (own + shared) ** -0.5 * _magnitude(config.rope_parameters), NormConfig(epsilon=_LATENT_EPSILON), rotary=0,
        query_rank=config.q_lora_rank,
    )  # fmt: skip
    turned = family == "deepseek_v2" or getattr(config, "rope_interleave", False)
    dense, mixture = MLPConfig(config.intermediate_size, act), None if family in _DENSE else _mixture(config)
    return DecoderConfig(
        vocab_size=config.vocab_size, width=config.hidden_size,
        layers=tuple(
            LayerConfig(attention, mixture if mixture is not None and _is_sparse(config, index) else dense)
            for index in range(config.num_hidden_layers)
        ),
        norm=NormConfig(epsilon=config.rms_norm_eps), tied=bool(config.tie_word_embeddings),
        rotary=(rotary_of(config, length, style="interleaved" if turned else "halves"),),
        ignored=(FREQUENCIES, BEHIND_LAST.format(config.num_hidden_layers)),
        mtp=head_behind(LayerConfig(attention, mixture), config.num_hidden_layers) if family in _WITH_HEADS else None,
        **_scales(config),
    )  # fmt: skip


def _magnitude(parameters: Mapping[str, Any]) -> float:
    """Factor of scores by which YaRN's attention is as sharp over long contexts as over short ones."""
    every, factor = parameters.get("mscale_all_dim"), parameters.get("factor", 1.0)
    if parameters.get("rope_type", "default") == "default" or not every or factor <= 1:
        return 1.0
    return float(0.1 * every * math.log(factor) + 1.0) ** 2


def _is_sparse(config: Any, index: int) -> bool:
    kinds = getattr(config, "mlp_layer_types", None)
    return bool(index >= config.first_k_dense_replace if kinds is None else kinds[index] == "sparse")


def _mixture(config: Any) -> MoEConfig:
    if config.model_type != "deepseek_v2":
        return _mixture_of(config, sigmoid_router(config))
    grouped = config.topk_method == "group_limited_greedy"
    if not grouped and config.topk_method != "greedy":
        raise UnsupportedModel(f"family 'deepseek_v2' with topk_method={config.topk_method!r} is not written down")
    router = RouterConfig(
        config.n_routed_experts, config.num_experts_per_tok, exact=True, groups=config.n_group if grouped else 1,
        groups_kept=config.topk_group if grouped else 1, groups_by_best=True, normalised=False,
        scale=float(config.routed_scaling_factor),
    )  # fmt: skip
    return _mixture_of(config, router)


def sigmoid_router(config: Any, block: str = "mlp.", experts: int | None = None) -> RouterConfig:
    """DeepSeek V3's router of `experts` experts (None: `n_routed_experts`), whose tensors' names begin with `block`."""
    return RouterConfig(
        config.n_routed_experts if experts is None else experts, config.num_experts_per_tok, "sigmoid",
        name=f"{block}gate.weight", exact=True, correction=f"{block}gate.e_score_correction_bias",
        groups=config.n_group, groups_kept=config.topk_group, normalised=bool(config.norm_topk_prob),
        least_sum=1e-20, scale=float(config.routed_scaling_factor),
    )  # fmt: skip


def _mixture_of(config: Any, router: RouterConfig) -> MoEConfig:
    """The mixture of that router, and of experts that all rows go to, if there are any."""
    act, width, path = activation(config), config.moe_intermediate_size, "mlp.shared_experts."
    experts = ExpertsConfig(router.experts, width, act)
    if not config.n_shared_experts:
        return MoEConfig(router, experts)
    names = (f"{path}gate_proj", f"{path}up_proj")
    return MoEConfig(router, experts, MLPConfig(width * config.n_shared_experts, act, names, f"{path}down_proj"))


def _scales(config: Any) -> dict[str, Any]:
    """MiniCPM's factors of embeddings, branches and logits."""
    if config.model_type != "minicpm3":
        return {}
    return {
        "embedding_scale": float(config.scale_emb),
        "residual_scale": config.scale_depth / math.sqrt(config.num_hidden_layers),
        "logit_scale": config.dim_model_base / config.hidden_size,
    }
