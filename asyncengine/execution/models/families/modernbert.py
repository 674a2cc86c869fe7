"""ModernBERT (Warner et al. 2024): norms before each branch, rotary positions, local windows in two layers of three."""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.mlp import MLPConfig
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.encoder import EncoderConfig, SequenceHeadConfig
from asyncengine.execution.models.families.common import activation, rotary_of


def encoder_config(config: Any, length: int | None, classifies: bool) -> EncoderConfig:
    """The encoder of `ModernBertModel`, `ModernBertForSequenceClassification`."""
    longest = length or config.max_position_embeddings
    kinds = list(config.layer_types)
    rotations = sorted(set(kinds))
    dim = config.hidden_size // config.num_attention_heads
    mlp = MLPConfig(
        config.intermediate_size, activation(config, config.hidden_activation), ("mlp.Wi",), "mlp.Wo",
        bias=config.mlp_bias,
    )  # fmt: skip

    def layer(index: int) -> LayerConfig:
        attention = AttentionConfig(
            config.num_attention_heads, config.num_attention_heads, dim, dim**-0.5,
            rotary=rotations.index(kinds[index]), both=True, qkv=("attn.Wqkv",), out="attn.Wo",
            window=config.sliding_window + 1 if kinds[index] == "sliding_attention" else None,
            qkv_bias=config.attention_bias, out_bias=config.attention_bias,
        )  # fmt: skip
        return LayerConfig(
            attention, mlp, before_attention=None if index == 0 else "attn_norm", before_mlp="mlp_norm"
        )  # the first one's input is normed already

    head = SequenceHeadConfig(
        config.num_labels, "classifier", "head.dense", config.classifier_bias,
        activation(config, config.classifier_activation), "head.norm",
        "mean" if config.classifier_pooling == "mean" else "first",
    )  # fmt: skip
    ignored = (r"(.*\.)?inv_freq", r"decoder\..*")
    stack = DecoderConfig(
        vocab_size=config.vocab_size, width=config.hidden_size,
        layers=tuple(layer(index) for index in range(config.num_hidden_layers)),
        norm=NormConfig("layer", config.norm_eps, bias=config.norm_bias),
        rotary=tuple(rotary_of(config, longest, kind) for kind in rotations),
        embedding="model.embeddings.tok_embeddings", final_norm="model.final_norm",
        ignored=ignored if classifies else (*ignored, r"head\..*", r"classifier\..*"),
    )  # fmt: skip
    return EncoderConfig(
        stack=stack, max_model_len=longest, embedding_norm="model.embeddings.norm", head=head if classifies else None
    )
