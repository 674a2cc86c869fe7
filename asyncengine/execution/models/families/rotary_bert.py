"""BERT with rotary positions: NomicBERT (Nussbaum et al. 2024), Jina v3 (Sturua et al. 2024), GTE (Zhang et al. 2024).

Norms stand behind each sum; Nomic's and GTE's feed-forward parts are gated.
"""

from __future__ import annotations

from typing import Any

from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.mlp import MLPConfig
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.encoder import EncoderConfig, SequenceHeadConfig
from asyncengine.execution.models.families.common import activation, head_dim_of, rotary_of

_BASES = {"nomic_bert": "nomic_bert", "gte": "gte", "jina_embeddings_v3": "roberta"}


def encoder_config(config: Any, length: int | None, classifies: bool) -> EncoderConfig:
    """The encoder of `NomicBertModel`, `GteModel`, `JinaEmbeddingsV3Model`, and of their
    `...ForSequenceClassification`."""
    family, base = config.model_type, _BASES[config.model_type]
    longest = length or config.max_position_embeddings
    dim, biased = head_dim_of(config), family != "nomic_bert"
    if family == "jina_embeddings_v3":
        mlp = MLPConfig(config.intermediate_size, activation(config), ("mlp.fc1",), "mlp.fc2", gated=False, bias=True)
        head = SequenceHeadConfig(config.num_labels, "classifier.out_proj", "classifier.dense")
    else:
        mlp = MLPConfig(config.intermediate_size, activation(config), down_bias=biased)
        head = SequenceHeadConfig(config.num_labels, "classifier", f"{base}.pooler.dense")
    attention = AttentionConfig(
        config.num_attention_heads, config.num_attention_heads, dim, dim**-0.5, both=True, qkv_bias=biased,
        out_bias=biased,
    )  # fmt: skip
    layer = LayerConfig(
        attention, mlp, before_attention=None, before_mlp="post_attention_layernorm", after_mlp="post_mlp_layernorm",
        post_norm=True,
    )  # fmt: skip
    ignored = (
        r"(.*\.)?(position|token_type)_ids",
        r"(.*\.)?inv_freq",
        r"(.*\.)?pooler\..*",
        r"cls\..*",
        r"lm_head\..*",
    )
    stack = DecoderConfig(
        vocab_size=config.vocab_size, width=config.hidden_size, layers=(layer,) * config.num_hidden_layers,
        norm=NormConfig("layer", config.layer_norm_eps, bias=True), rotary=(rotary_of(config, longest),),
        embedding=f"{base}.embeddings.word_embeddings", layer=f"{base}.layers.{{}}.", final_norm=None,
        ignored=ignored if classifies else (*ignored, r"classifier\..*"),
    )  # fmt: skip
    return EncoderConfig(
        stack=stack, max_model_len=longest,
        segments=f"{base}.embeddings.token_type_embeddings" if config.type_vocab_size else None,
        num_segments=config.type_vocab_size, embedding_norm=f"{base}.embeddings.LayerNorm",
        head=head if classifies else None,
    )  # fmt: skip
