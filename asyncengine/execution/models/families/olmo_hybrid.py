"""OLMo Hybrid (Allen Institute for AI): OLMo 2 whose layers keep states by the gated delta rule, three of four.

These normalise what their branches take, the others what a branch gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.gated_delta import GatedDeltaConfig
from asyncengine.execution.models.config import ModelConfig, UnknownLayers
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import (
    activation,
    alternate,
    layer_types_of,
    llama_like,
    rotary_of,
    with_states,
)

_AFTER = {
    "before_attention": None, "after_attention": "post_attention_layernorm", "before_mlp": None,
    "after_mlp": "post_feedforward_layernorm",
}  # fmt: skip
KINDS = ("linear_attention", "full_attention")


def complete(config: ModelConfig) -> None:
    alternate(config, 4, "linear_attention")
    if "full_attention" not in config.layer_types:
        config.layer_types[-1] = "full_attention"
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        setattr(config, name, config.get(name, config.num_attention_heads))
    dim = config.get("linear_key_head_dim", int(0.75 * config.hidden_size / config.linear_num_key_heads))
    config.linear_key_head_dim, config.linear_value_head_dim = dim, config.get("linear_value_head_dim", 2 * dim)


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `OlmoHybridForCausalLM`."""
    if activation(config) != "silu":
        raise UnknownLayers(f"family 'olmo_hybrid' with activation {config.hidden_act!r} does not run here")
    norm, bias = NormConfig(epsilon=config.rms_norm_eps), bool(config.attention_bias)
    rotates = config.rope_parameters.get("rope_theta") is not None  # released models do not
    attention = {
        "rotary": 0 if rotates else None, "qkv_bias": bias, "out_bias": bias, "head_norm": norm, "norm_scope": "whole",
    }  # fmt: skip
    rotary = (replace(rotary_of(config, length), exact=True),) if rotates else ()
    made = llama_like(config, length, attention=attention, layer=_AFTER, norm=norm, rotary=rotary)
    state = GatedDeltaConfig(
        key_heads=config.linear_num_key_heads, value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim, value_dim=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim, epsilon=1e-5,  # whatever config.json says of other norms
        apart=True, most_rate=2 if config.linear_allow_neg_eigval else 1,
    )  # fmt: skip
    kinds = layer_types_of(config, KINDS)
    norms = {"post_attention_layernorm": "feedforward_layer_norm", "input_layernorm": "attention_layer_norm"}
    aliases = [(f"model.layers.{index}.{name}.weight", f"model.layers.{index}.{other}.weight")
               for index, kind in enumerate(kinds) for name, other in norms.items()
               if kind == "linear_attention" or name == "post_attention_layernorm"]  # fmt: skip
    made = with_states(
        made, kinds, state, before_attention="input_layernorm", after_attention=None,
        before_mlp="post_attention_layernorm", after_mlp=None,
    )  # fmt: skip
    return replace(made, aliases=tuple(aliases))
