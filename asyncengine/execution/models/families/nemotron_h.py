"""Nemotron-H and Nemotron 3 (NVIDIA 2025): each layer is one of Mamba-2, attention, a feed-forward part or a mixture.

Experts are not gated. Scores are DeepSeek V3's; beside the experts of its choice a row goes through one that all share.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.experts import ExpertsConfig, Stacked
from asyncengine.execution.layers.mamba2 import Mamba2Config
from asyncengine.execution.layers.mlp import LatentExpertsConfig, MLPConfig, MoEConfig
from asyncengine.execution.models.config import ModelConfig, unknown_layers
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.families.common import activation, head_dim_of
from asyncengine.execution.models.families.deepseek import sigmoid_router
from asyncengine.execution.models.families.mamba import check_silu

KINDS = ("linear_attention", "full_attention", "mlp", "moe")
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def complete(config: ModelConfig) -> None:
    if config.get("layers_block_type") is None:
        config.layers_block_type = [_LETTERS[letter] for letter in config.hybrid_override_pattern]
    config.layer_types = config.layers_block_type
    config.num_hidden_layers = len(config.layers_block_type)


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `NemotronHForCausalLM`. Its attention rotates nothing."""
    check_silu(config, config.mamba_hidden_act)
    dim = head_dim_of(config)
    attention = AttentionConfig(
        config.num_attention_heads, config.num_key_value_heads, dim, dim**-0.5, rotary=None,
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), out="mixer.o_proj",
    )  # fmt: skip
    state = Mamba2Config(
        config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, config.n_groups, config.conv_kernel,
        config.layer_norm_epsilon, norm_groups=config.n_groups, bias=bool(config.use_bias),
        out_bias=bool(config.use_bias), conv_bias=bool(config.use_conv_bias),
        limits=(float(config.time_step_min), float("inf")), name="mixer.",
    )  # fmt: skip
    mlp = MLPConfig(
        config.intermediate_size, activation(config, config.mlp_hidden_act), ("mixer.up_proj",), "mixer.down_proj",
        gated=False, bias=bool(config.mlp_bias),
    )  # fmt: skip
    layer = partial(LayerConfig, before_attention="norm", before_mlp=None)
    layers = layer(None, None, state), layer(attention, None), layer(None, mlp), layer(None, _mixture(config, mlp))
    parts = dict(zip(KINDS, layers, strict=True))
    if unknown := [kind for kind in config.layers_block_type if kind not in parts]:
        raise unknown_layers(config.model_type, unknown[0], KINDS)
    return DecoderConfig(
        vocab_size=config.vocab_size, width=config.hidden_size,
        layers=tuple(parts[kind] for kind in config.layers_block_type),
        norm=NormConfig(epsilon=config.layer_norm_epsilon), embedding="backbone.embeddings",
        layer="backbone.layers.{}.", final_norm="backbone.norm_f", tied=bool(config.tie_word_embeddings),
        ignored=(r"mtp.*",),
    )  # fmt: skip


def _mixture(config: Any, dense: MLPConfig) -> MoEConfig:
    router = sigmoid_router(config, "mixer.")
    path = "mixer.experts."
    experts = ExpertsConfig(
        router.experts, config.moe_intermediate_size, dense.activation, up=(f"{path}{{}}.up_proj.weight",), gated=False,
        down=f"{path}{{}}.down_proj.weight", stacked=Stacked((f"{path}up_proj",), f"{path}down_proj"),
    )  # fmt: skip
    shared = replace(
        dense, width=config.moe_shared_expert_intermediate_size, up=("mixer.shared_experts.up_proj",),
        down="mixer.shared_experts.down_proj",
    )  # fmt: skip
    latent = None
    if config.moe_latent_size is not None:
        names = ("mixer.fc1_latent_proj", "mixer.fc2_latent_proj")
        latent = LatentExpertsConfig(config.moe_latent_size, *names, bias=bool(config.mlp_bias))
    return MoEConfig(router, experts, shared, latent=latent)
