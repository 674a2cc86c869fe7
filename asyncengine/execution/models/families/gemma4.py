"""Gemma 4's text model: further embeddings at every layer, layers that use the keys and values of others, norms of
values, heads of another size where there is no window, and experts beside the feed-forward part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import LayerInputConfig, NormConfig
from asyncengine.execution.layers.experts import ExpertsConfig, Stacked
from asyncengine.execution.layers.mlp import MLPConfig, SideExpertsConfig
from asyncengine.execution.layers.routing import RouterConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.families.common import activation, alternate, layer_types_of, rotary_of, windows_of

_Q, _K, _V = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
_SANDWICH: Mapping[str, Any] = {
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
"""Norms before and after both branches, fields of `LayerConfig`."""


def complete(config: ModelConfig) -> None:
    """Sets what differs by layer: layers that attend to everything, of which the last is always one, have heads of
    their own."""
    alternate(config, 6)
    config.layer_types = [*config.layer_types[:-1], "full_attention"]
    usual = {"head_dim": config.head_dim, "num_key_value_heads": config.num_key_value_heads}
    groups = config.get("num_global_key_value_heads") if config.attention_k_eq_v else None
    whole = usual | {"head_dim": config.get("global_head_dim", 512)}
    whole |= {"num_key_value_heads": groups} if groups else {}
    kinds = {index: whole for index, kind in enumerate(config.layer_types) if kind == "full_attention"}
    given = {int(index): own for index, own in config.get("per_layer_config", kinds).items()}
    every = [ModelConfig(**usual | given.get(index, {})) for index in range(config.num_hidden_layers)]
    config.per_layer_config = dict(enumerate(every)) | dict(zip(config.layer_types, every, strict=True))


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `Gemma4ForCausalLM`."""
    norm = NormConfig(epsilon=config.rms_norm_eps)
    values = NormConfig(epsilon=config.rms_norm_eps, weight=False)
    kinds, windows = layer_types_of(config), windows_of(config)
    by_kind = sorted(set(kinds))
    count = len(kinds)
    first_shared = count - config.num_kv_shared_layers
    act = activation(config, config.hidden_activation)
    width = config.hidden_size_per_layer_input

    def layer(index: int) -> LayerConfig:
        own, kind = config.per_layer_config[index], kinds[index]
        shared = index >= first_shared
        keys_are_values = config.attention_k_eq_v and kind != "sliding_attention"
        attention = AttentionConfig(
            num_heads=config.num_attention_heads, num_kv_heads=own.num_key_value_heads, head_dim=own.head_dim,
            scale=1.0, rotary=by_kind.index(kind), window=windows[index],
            qkv=(_Q,) if shared else (_Q, _K) if keys_are_values else (_Q, _K, _V),
            keys_of=first_shared - 1 - kinds[:first_shared][::-1].index(kind) if shared else None,
            qkv_bias=config.attention_bias, out_bias=config.attention_bias, head_norm=norm, value_norm=values,
        )  # fmt: skip
        doubled = 2 if shared and config.use_double_wide_mlp else 1
        mlp = MLPConfig(config.intermediate_size * doubled, act)
        return LayerConfig(attention, mlp, side=_side(config, act), scalar="layer_scalar", **_SANDWICH)

    unused = "|".join(str(index) for index in range(first_shared, count))
    return DecoderConfig(
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        layers=tuple(layer(index) for index in range(count)),
        norm=norm,
        rotary=tuple(
            rotary_of(config, length, kind, head_dim=config.per_layer_config[kind].head_dim) for kind in by_kind
        ),
        embedding_scale=config.hidden_size**0.5,
        layer_inputs=LayerInputConfig(config.vocab_size_per_layer_input, width, act) if width else None,
        tied=bool(config.tie_word_embeddings),
        logit_softcap=config.final_logit_softcapping,
        ignored=(rf"(.*\.)?layers\.({unused})\.self_attn\.([kv]_proj|[kv]_norm)\..*",),
    )


def _side(config: Any, act: str) -> SideExpertsConfig | None:
    if not config.enable_moe_block:
        return None
    router = RouterConfig(
        config.num_experts, config.top_k_experts, name="router.proj.weight", by_expert="router.per_expert_scale"
    )
    stacked = Stacked(("experts.gate_up_proj",), "experts.down_proj")
    return SideExpertsConfig(
        router,
        ExpertsConfig(config.num_experts, config.moe_intermediate_size, act, stacked=stacked, only_stacked=True),
        scale="router.scale", before="pre_feedforward_layernorm_2", after="post_feedforward_layernorm_2",
        after_mlp="post_feedforward_layernorm_1",
    )  # fmt: skip
