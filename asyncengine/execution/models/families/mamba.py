"""Mamba-2 (Dao and Gu 2024), and with attention: Bamba (IBM 2024), Falcon-H1 (TII 2025), Granite 4 (IBM 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.mamba2 import Mamba2Config
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.families import tables
from asyncengine.execution.models.families.common import layer_types_of, llama_like, rotary_of, with_states

KINDS = ("linear_attention", "full_attention")


def complete(config: ModelConfig) -> None:
    layers = range(config.num_hidden_layers)
    if config.model_type == "bamba":
        complete_mixer(config)
        config.partial_rotary_factor = 0.5  # whatever the file says
        config.layer_types = [KINDS[layer in (config.get("attn_layer_indices") or ())] for layer in layers]
    elif config.model_type == "falcon_h1":
        complete_mixer(config, config.mamba_d_ssm)
        config.layer_types = ["hybrid"] * len(layers)
    elif config.model_type == "granitemoehybrid":
        complete_mixer(config)
        config.layer_types = config.layer_types or [KINDS[0]] * len(layers)
    else:
        config.layer_types = [KINDS[0]] * len(layers)


def complete_mixer(config: ModelConfig, width: int | None = None) -> None:
    """Sets the dimensions of a head of the state, of `width` in all; None: of `mamba_expand` times the model's."""
    if config.get("mamba_d_head", "auto") == "auto":
        config.mamba_d_head = (width or config.mamba_expand * config.hidden_size) // config.mamba_n_heads


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `Mamba2ForCausalLM`, `BambaForCausalLM`, `FalconH1ForCausalLM` and
    `GraniteMoeHybridForCausalLM`."""
    if config.model_type == "mamba2":
        return _pure(config)
    if config.model_type == "falcon_h1":
        return _falcon(config, length)
    if config.model_type == "granitemoehybrid":
        # transformers calls attention by its full name where older files do not
        kinds = [
            "full_attention" if kind == "attention" else kind for kind in layer_types_of(config, (*KINDS, "attention"))
        ]
        return with_states(tables.decoder_config(config, length), kinds, mixer(config))
    bias = bool(config.attention_bias)
    made = llama_like(
        config, length,
        attention={"qkv_bias": bias, "out_bias": bias},
        mlp=_feed_forward(config),
        layer={"before_mlp": "pre_ff_layernorm"},
        rotary=(rotary_of(config, length, partial=True),),
        final_norm="model.final_layernorm",
    )  # fmt: skip
    return with_states(made, layer_types_of(config, KINDS), mixer(config))


def mixer(config: Any) -> Mamba2Config:
    """The mixer of the families whose options are called mamba_..."""
    check_silu(config, config.hidden_act)
    groups = config.mamba_n_groups
    return Mamba2Config(
        config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state, groups, config.mamba_d_conv,
        config.rms_norm_eps, norm_groups=groups, bias=bool(config.mamba_proj_bias),
        out_bias=bool(config.mamba_proj_bias), conv_bias=bool(config.mamba_conv_bias), limits=limits_of(config),
    )  # fmt: skip


def limits_of(config: Any) -> tuple[float, float]:
    """Limits of dt."""
    least, most = getattr(config, "time_step_limit", None) or (0.0, float("inf"))
    return float(least), float(most)


def check_silu(config: Any, activation: str) -> None:
    """Raises `UnsupportedModel` for a convolution with another activation."""
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"family {config.model_type!r} with activation {activation!r} is not written down")


def _feed_forward(config: Any) -> dict[str, Any]:
    names = tuple(f"feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    return {"up": names[:2], "down": names[2], "bias": bool(config.mlp_bias)}


def _pure(config: Any) -> DecoderConfig:
    check_silu(config, config.hidden_act)
    bias = bool(config.use_bias)
    state = Mamba2Config(
        config.num_heads, config.head_dim, config.state_size, config.n_groups, config.conv_kernel,
        config.layer_norm_epsilon, norm_groups=config.n_groups, bias=bias, out_bias=bias,
        conv_bias=bool(config.use_conv_bias), limits=limits_of(config), name="mixer.",
    )  # fmt: skip
    layer = LayerConfig(None, None, state, before_attention="norm", before_mlp=None)
    return DecoderConfig(
        vocab_size=config.vocab_size, width=config.hidden_size, layers=(layer,) * config.num_hidden_layers,
        norm=NormConfig(epsilon=config.layer_norm_epsilon), embedding="backbone.embeddings",
        layer="backbone.layers.{}.", final_norm="backbone.norm_f", tied=bool(config.tie_word_embeddings),
    )  # fmt: skip


def _falcon(config: Any, length: int) -> DecoderConfig:
    """Attention and state read the same input and are added, each with factors of its own.

    The factors of attention's input, keys and result are in that of its scores and in one of its result: without
    biases, all of it is linear in them.
    """
    if config.attention_bias or config.projectors_bias:
        raise UnsupportedModel("family 'falcon_h1' with biases of attention or projectors is not written down")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    into, gate_and_down = float(config.attention_in_multiplier), tuple(map(float, config.mlp_multipliers))
    scale = dim**-0.5 * into**2 * float(config.key_multiplier)
    if config.mlp_bias and gate_and_down[1] != 1.0:
        raise UnsupportedModel("family 'falcon_h1' with a bias and a factor of its MLP is not written down")
    made = llama_like(
        config, length,
        attention={"scale": scale},
        mlp={**_feed_forward(config), "scales": gate_and_down},
        layer={
            "before_mlp": "pre_ff_layernorm",
            "attention_scale": into * float(config.attention_out_multiplier),
        },
        final_norm="model.final_layernorm",
        embedding_scale=float(config.embedding_multiplier),
        logit_scale=float(config.lm_head_multiplier),
    )  # fmt: skip
    kind: Literal["gated", "before gate"] | None = "before gate" if config.mamba_norm_before_gate else "gated"
    if not config.mamba_rms_norm:
        kind = None
    z, x, b, c, dt = (float(each) * float(config.ssm_in_multiplier) for each in config.ssm_multipliers)
    if config.mamba_proj_bias and config.ssm_in_multiplier != 1.0:
        raise UnsupportedModel("family 'falcon_h1' with a bias and a factor of its state's input is not written down")
    scales = None if {z, x, b, c, dt} == {1.0} else (z, x, b, c, dt)
    state = replace(
        mixer(config), norm=kind, scales=scales, out_bias=False, out_scale=float(config.ssm_out_multiplier)
    )  # fmt: skip
    return replace(made, layers=tuple(replace(layer, state=state) for layer in made.layers))
