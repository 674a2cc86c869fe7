"""OLMo 1 (Groeneveld et al. 2024), 2 (OLMo et al. 2025), 3 and Hybrid, and EXAONE 4 (LG AI Research 2025).

OLMo 1 normalises without weights. The others normalise what a branch gives, not what it takes, and queries and keys:
OLMo over all heads at once, EXAONE each head. In OLMo Hybrid three of four layers keep states by the gated delta rule;
these normalise what their branches take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.gated_delta import GatedDeltaConfig
from asyncengine.execution.models.config import ModelConfig, UnknownLayers
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families import common
from asyncengine.execution.models.families.common import alternate, layer_types_of, llama_like, rotary_of, windows_of

_AFTER = {
    "before_attention": None, "after_attention": "post_attention_layernorm", "before_mlp": None,
    "after_mlp": "post_feedforward_layernorm",
}  # fmt: skip
KINDS = ("linear_attention", *common.KINDS)


def complete(config: ModelConfig) -> None:
    if config.model_type == "olmo3":
        alternate(config, 4)
    elif config.model_type == "exaone4":
        alternate(config, 0 if config.sliding_window is None else config.get("sliding_window_pattern", 4))
    elif config.model_type == "olmo_hybrid":
        alternate(config, 4, "linear_attention")
        if "full_attention" not in config.layer_types:
            config.layer_types[-1] = "full_attention"
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            setattr(config, name, config.get(name, config.num_attention_heads))
        dim = config.get("linear_key_head_dim", int(0.75 * config.hidden_size / config.linear_num_key_heads))
        config.linear_key_head_dim, config.linear_value_head_dim = dim, config.get("linear_value_head_dim", 2 * dim)


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `OlmoForCausalLM`, `Olmo2ForCausalLM`, `Olmo3ForCausalLM`, `OlmoHybridForCausalLM`,
    `Exaone4ForCausalLM`."""
    if config.model_type == "olmo_hybrid":
        return _hybrid(config, length)
    family, kinds, windows = config.model_type, layer_types_of(config), windows_of(config)
    bias = family != "exaone4" and bool(config.attention_bias)
    if family == "olmo":
        norm = NormConfig("layer", 1e-5, weight=False)
        own = {"qkv_bias": bias, "out_bias": bias, "clip": config.clip_qkv}
        return llama_like(config, length, attention=own, norm=norm)
    norm = NormConfig(epsilon=config.rms_norm_eps)
    rotated = ["full_attention", "sliding_attention"]
    """Kinds of layers that have frequencies of their own."""
    own_kinds = rotated if family == "olmo3" else [None]
    rotary = tuple(replace(rotary_of(config, length, kind), exact=family != "exaone4") for kind in own_kinds)

    places: list[int | None] = [rotated.index(kind) if family == "olmo3" else 0 for kind in kinds]
    if family == "exaone4" and config.sliding_window is not None:  # then layers with windows alone rotate
        places = [0 if kind == "sliding_attention" else None for kind in kinds]
    attention = {
        "rotary": places, "window": windows, "qkv_bias": bias, "out_bias": bias, "head_norm": norm,
        "norm_scope": "head" if family == "exaone4" else "whole",
    }  # fmt: skip
    return llama_like(config, length, attention=attention, layer=_AFTER, norm=norm, rotary=rotary)


def _hybrid(config: Any, length: int) -> DecoderConfig:
    if common.activation(config) != "silu":
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
    kinds = layer_types_of(config, ("linear_attention", "full_attention"))
    norms = {"post_attention_layernorm": "feedforward_layer_norm", "input_layernorm": "attention_layer_norm"}
    aliases = [(f"model.layers.{index}.{name}.weight", f"model.layers.{index}.{other}.weight")
               for index, kind in enumerate(kinds) for name, other in norms.items()
               if kind == "linear_attention" or name == "post_attention_layernorm"]  # fmt: skip
    made = common.with_states(
        made, kinds, state, before_attention="input_layernorm", after_attention=None,
        before_mlp="post_attention_layernorm", after_mlp=None,
    )  # fmt: skip
    return replace(made, aliases=tuple(aliases))
