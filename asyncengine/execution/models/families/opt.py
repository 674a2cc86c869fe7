"""OPT (Zhang et al. 2022): learned positions, layer norms, ReLU; the 350M model differs in two ways."""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.mlp import MLPConfig
from asyncengine.execution.models.config import Defaults, ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.families.common import activation

_OFFSET = 2
_MODEL = "model.decoder."
DEFAULTS: Defaults = {
    "opt": {
        "_remove_final_layer_norm": False, "enable_bias": True, "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def complete(config: ModelConfig) -> None:
    config.word_embed_proj_dim = config.get("word_embed_proj_dim", config.hidden_size)


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `OPTForCausalLM`."""
    heads, bias = config.num_attention_heads, config.enable_bias
    head_dim = config.hidden_size // heads
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotary=None,
        out="self_attn.out_proj",
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = MLPConfig(
        config.ffn_dim, activation(config, config.activation_function), up=("fc1",), down="fc2", gated=False, bias=bias
    )
    first, second = "self_attn_layer_norm", "final_layer_norm"
    if config.do_layer_norm_before:
        layer = LayerConfig(attention, mlp, before_attention=first, before_mlp=second)
    else:
        layer = LayerConfig(attention, mlp, before_attention=None, before_mlp=first, after_mlp=second, post_norm=True)
    ends_with_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
    affine = config.layer_norm_elementwise_affine
    return DecoderConfig(
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        layers=(layer,) * config.num_hidden_layers,
        norm=NormConfig("layer", epsilon=1e-5, weight=affine, bias=affine),
        max_positions=config.max_position_embeddings,
        embedding=f"{_MODEL}embed_tokens",
        positions=f"{_MODEL}embed_positions",
        position_offset=_OFFSET,
        embedding_width=config.word_embed_proj_dim,
        project_in=f"{_MODEL}project_in",
        project_out=f"{_MODEL}project_out",
        layer=_MODEL + "layers.{}.",
        final_norm=f"{_MODEL}final_layer_norm" if ends_with_norm else None,
        tied=bool(config.tie_word_embeddings),
    )
