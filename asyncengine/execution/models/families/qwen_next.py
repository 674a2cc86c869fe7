"""Qwen3-Next and Qwen3.5 (Qwen team 2025, 2026): three layers of the gated delta rule, then one of gated attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.experts import ExpertsConfig
from asyncengine.execution.layers.gated_delta import GatedDeltaConfig
from asyncengine.execution.layers.mlp import MoEConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.decoder_layer import MTPConfig, head_layers
from asyncengine.execution.models.families.common import (
    activation,
    alternate,
    layer_types_of,
    llama_like,
    rotary_of,
    with_states,
)
from asyncengine.execution.models.families.mamba import check_silu
from asyncengine.execution.models.families.qwen_moe import shared_expert

KINDS = ("linear_attention", "full_attention")


def complete(config: ModelConfig) -> None:
    alternate(config, config.get("full_attention_interval", 4), "linear_attention")


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `Qwen3NextForCausalLM`, `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`."""
    act = activation(config)
    kinds = layer_types_of(config, KINDS)
    check_silu(config, config.hidden_act)
    norm = NormConfig(epsilon=config.rms_norm_eps, offset=1.0)
    state = GatedDeltaConfig(
        key_heads=config.linear_num_key_heads, value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim, value_dim=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim, epsilon=config.rms_norm_eps, interleaved=config.model_type == "qwen3_next",
    )  # fmt: skip
    mixture, bias = _mixture(config, act), config.attention_bias
    made = llama_like(
        config, length, norm=norm, rotary=(rotary_of(config, length, partial=True),),
        attention={"head_norm": norm, "qkv_bias": bias, "out_bias": bias, "output_gate": True},
        sparse=[None if _dense(config, index) else mixture for index in range(config.num_hidden_layers)],
        ignored=(r"(.*\.)?rotary_emb\.inv_freq", r"mtp\..*"),
    )  # fmt: skip
    head = MTPConfig(
        head_layers((replace(made.layers[-1], mlp=mixture or made.layers[-1].mlp),)), "mtp.layers.{}.",
        "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", chains_normed=True,
    )  # fmt: skip
    return replace(with_states(made, kinds, state), mtp=head)


def _mixture(config: Any, act: str) -> MoEConfig | None:
    if not getattr(config, "num_experts", 0):
        return None
    normalised = bool(getattr(config, "norm_topk_prob", True))
    router = RouterConfig(config.num_experts, config.num_experts_per_tok, normalised=normalised)
    experts = ExpertsConfig(config.num_experts, config.moe_intermediate_size, act)
    return MoEConfig(router, experts, **shared_expert(config, act))


def _dense(config: Any, index: int) -> bool:
    """A layer whose feed-forward part is no mixture, in a model that has one."""
    skipped = getattr(config, "mlp_only_layers", None) or ()
    return index in skipped or bool((index + 1) % getattr(config, "decoder_sparse_step", 1))
