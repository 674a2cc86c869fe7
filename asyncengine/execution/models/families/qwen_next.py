"""Qwen3-Next and Qwen3.5 (Qwen team 2025, 2026): three layers of the gated delta rule, then one of gated attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.execution.layers.gated_delta import GatedDeltaConfig
from asyncengine.execution.layers.mlp import MoEConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.decoder_layer import MTPConfig, head_layers
from asyncengine.execution.models.families import tables
from asyncengine.execution.models.families.common import alternate, layer_types_of, with_states
from asyncengine.execution.models.families.mamba import check_silu

KINDS = ("linear_attention", "full_attention")


def complete(config: ModelConfig) -> None:
    alternate(config, config.get("full_attention_interval", 4), "linear_attention")


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `Qwen3NextForCausalLM`, `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`."""
    kinds = layer_types_of(config, KINDS)
    check_silu(config, config.hidden_act)
    state = GatedDeltaConfig(
        key_heads=config.linear_num_key_heads, value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim, value_dim=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim, epsilon=config.rms_norm_eps, interleaved=config.model_type == "qwen3_next",
    )  # fmt: skip
    made = tables.decoder_config(config, length)
    last = made.layers[-1]
    # the head has experts wherever the model has, though its last layer may be dense
    mlp = next((layer.mlp for layer in made.layers if isinstance(layer.mlp, MoEConfig)), last.mlp)
    head = MTPConfig(
        head_layers((replace(last, mlp=mlp),)), "mtp.layers.{}.",
        "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", chains_normed=True,
    )  # fmt: skip
    return replace(with_states(made, kinds, state), mtp=head)
