"""Kimi Linear (Kimi team 2025): three layers of Kimi Delta Attention, then one of attention by a latent vector.

Nothing is rotated. Mixtures are DeepSeek V3's: sigmoid scores, a correction of the choice, groups, experts that all
rows share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.experts import ExpertsConfig, Stacked
from asyncengine.execution.layers.kimi_delta import KimiDeltaConfig
from asyncengine.execution.layers.latent_attention import LatentAttentionConfig
from asyncengine.execution.layers.mlp import MLPConfig
from asyncengine.execution.layers.norm import NormConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.layers.sparse_mlp import MoEConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.families.common import activation, layer_types_of

KINDS = ("linear_attention", "full_attention")
_SPARSE = "block_sparse_moe."
_EXPERT = f"{_SPARSE}experts.{{}}."
_LEAST = 1e-20
"""A sum of weights at least."""
_LATENT_EPSILON = 1e-6
"""Epsilon of the latent vector's norm, whatever config.json says of the others."""
ALIASES: Mapping[str, Mapping[str, str]] = {
    "kimi_linear": {
        "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group", "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts",
    },
}  # fmt: skip


def complete(config: ModelConfig) -> None:
    """Reads `linear_attn_config`, in which released files have what concerns layers of linear attention."""
    given, layers = config.get("linear_attn_config", {}), range(config.num_hidden_layers)
    config.head_dim = config.qk_rope_head_dim
    inside = {"head_dim": "head_dim", "num_heads": "num_heads", "conv_kernel_dim": "short_conv_kernel_size"}
    for name, other in inside.items():
        if other in given:
            setattr(config, f"linear_{name}", given[other])
    if config.layer_types is None and {"full_attn_layers", "kda_layers"} <= given.keys():
        kinds = dict.fromkeys(given["kda_layers"], KINDS[0]) | dict.fromkeys(given["full_attn_layers"], KINDS[1])
        config.layer_types = [kinds[layer + 1] for layer in layers]
    elif config.layer_types is None:
        config.layer_types = [KINDS[bool(layer and layer % 4 == 0)] for layer in layers]
    if config.get("mlp_layer_types") is None:
        dense = config.get("first_k_dense_replace", 1)
        config.mlp_layer_types = ["dense" if layer < dense else "sparse" for layer in layers]


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `KimiLinearForCausalLM`."""
    act = activation(config)
    _refuse_unknown(config, act)
    own, shared = config.qk_nope_head_dim, config.qk_rope_head_dim
    attention = LatentAttentionConfig(
        config.num_attention_heads, config.kv_lora_rank, own, shared, config.v_head_dim, (own + shared) ** -0.5,
        NormConfig(epsilon=_LATENT_EPSILON),
    )  # fmt: skip
    state = KimiDeltaConfig(
        config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim, config.rms_norm_eps
    )
    names = ("gate_proj", "up_proj", "down_proj")
    dense = MLPConfig(config.intermediate_size, act, aliases=tuple((f"mlp.{n}", f"{_SPARSE}{n}") for n in names))
    mixture = _mixture(config, act)

    def one(index: int) -> LayerConfig:
        mlp = mixture if config.mlp_layer_types[index] == "sparse" else dense
        if config.layer_types[index] == "full_attention":
            return LayerConfig(attention, mlp)
        return LayerConfig(None, mlp, state)

    return DecoderConfig(
        vocab_size=config.vocab_size, width=config.hidden_size,
        layers=tuple(one(index) for index in range(config.num_hidden_layers)),
        norm=NormConfig(epsilon=config.rms_norm_eps), tied=bool(config.tie_word_embeddings),
        ignored=(rf"model\.layers\.{config.num_hidden_layers}\..*",),  # predicts further tokens
    )  # fmt: skip


def _refuse_unknown(config: Any, act: str) -> None:
    layer_types_of(config, KINDS)
    for option, value in (("q_lora_rank", None), ("attention_bias", False)):
        if getattr(config, option) != value:
            raise UnsupportedModel(
                f"family 'kimi_linear' with {option}={getattr(config, option)!r} is not written down"
            )
    if act != "silu":
        raise UnsupportedModel(f"family 'kimi_linear' with activation {config.hidden_act!r} is not written down")


def _mixture(config: Any, act: str) -> MoEConfig:
    gate, bias = f"{_SPARSE}gate.weight", f"{_SPARSE}gate.e_score_correction_bias"
    router = RouterConfig(
        config.num_experts, config.num_experts_per_token, "sigmoid", name=gate, exact=True, correction=bias,
        groups=config.num_expert_group, groups_kept=config.topk_group, normalised=bool(config.moe_renormalize),
        least_sum=_LEAST, scale=float(config.routed_scaling_factor),
    )  # fmt: skip
    width = config.moe_intermediate_size
    experts = ExpertsConfig(
        config.num_experts, width, act, up=(f"{_EXPERT}w1.weight", f"{_EXPERT}w3.weight"), down=f"{_EXPERT}w2.weight",
        stacked=Stacked(),
    )  # fmt: skip
    beside = [f"{_SPARSE}shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    shared = MLPConfig(width * config.num_shared_experts, act, (beside[0], beside[1]), beside[2])
    within = [gate, bias, *(f"{name}.weight" for name in beside)]
    aliases = tuple((name, name.replace(_SPARSE, "mlp.")) for name in within)  # as transformers holds them
    return MoEConfig(router, experts, shared if config.num_shared_experts else None, aliases=aliases)
