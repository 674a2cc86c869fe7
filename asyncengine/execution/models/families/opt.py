"""OPT (Zhang et al. 2022): learned positions, layer norms, ReLU; the 350M model differs in two ways."""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import activation, llama_like

_OFFSET = 2
_MODEL = "model.decoder."


def complete(config: ModelConfig) -> None:
    config.word_embed_proj_dim = config.get("word_embed_proj_dim", config.hidden_size)


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `OPTForCausalLM`."""
    bias, before = config.enable_bias, config.do_layer_norm_before
    first, second = "self_attn_layer_norm", "final_layer_norm"
    norms = (first, second, None) if before else (None, first, second)
    affine = config.layer_norm_elementwise_affine
    return llama_like(
        config, length,
        attention={
            "num_kv_heads": config.num_attention_heads, "rotary": None, "out": "self_attn.out_proj", "qkv_bias": bias,
            "out_bias": bias,
        },
        mlp={
            "width": config.ffn_dim, "activation": activation(config, config.activation_function), "up": ("fc1",),
            "down": "fc2", "gated": False, "bias": bias,
        },
        layer={"before_attention": norms[0], "before_mlp": norms[1], "after_mlp": norms[2], "post_norm": not before},
        norm=NormConfig("layer", epsilon=1e-5, weight=affine, bias=affine),
        rotary=(),
        max_positions=config.max_position_embeddings,
        embedding=f"{_MODEL}embed_tokens",
        positions=f"{_MODEL}embed_positions",
        position_offset=_OFFSET,
        embedding_width=config.word_embed_proj_dim,
        project_in=f"{_MODEL}project_in",
        project_out=f"{_MODEL}project_out",
        path=_MODEL + "layers.{}.",
        final_norm=f"{_MODEL}final_layer_norm" if before and not config._remove_final_layer_norm else None,
        ignored=(),
    )  # fmt: skip
