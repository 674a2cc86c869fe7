"""GPT-2 (Radford et al. 2019): learned positions, layer norms, matrices stored transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.mlp import MLPConfig
from asyncengine.execution.models.config import Defaults
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.families.common import activation

DEFAULTS: Defaults = {
    "gpt2": {
        "n_inner": None, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
ALIASES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
}  # fmt: skip


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `GPT2LMHeadModel`. Attention to an encoder, if a checkpoint has weights for it, is left out."""
    width, heads = config.n_embd, config.n_head
    head_dim = width // heads
    mlp = MLPConfig(
        config.n_inner if config.n_inner is not None else 4 * width,
        activation(config, config.activation_function),
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        gated=False,
        bias=True,
        transposed=True,
    )

    def attention(index: int) -> AttentionConfig:
        scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
        return AttentionConfig(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            scale=scale / (index + 1) if config.scale_attn_by_inverse_layer_idx else scale,
            rotary=None,
            qkv=("attn.c_attn",),
            out="attn.c_proj",
            qkv_bias=True,
            out_bias=True,
            transposed=True,
        )

    return DecoderConfig(
        vocab_size=config.vocab_size,
        width=width,
        layers=tuple(
            LayerConfig(attention(index), mlp, before_attention="ln_1", before_mlp="ln_2")
            for index in range(config.n_layer)
        ),
        norm=NormConfig("layer", epsilon=config.layer_norm_epsilon, bias=True),
        max_positions=config.n_positions,
        embedding="transformer.wte",
        positions="transformer.wpe",
        layer="transformer.h.{}.",
        final_norm="transformer.ln_f",
        tied=bool(config.tie_word_embeddings),
        # masks, which were once saved
        ignored=(r"(transformer\.)?h\.\d+\.(attn\.(masked_)?bias|(crossattention|ln_cross_attn)\..*)",),
    )
