"""BERT (Devlin et al. 2018), RoBERTa (Liu et al. 2019), XLM-R, CamemBERT, DistilBERT and MPNet (Song et al. 2020):
norms behind each sum, learned positions. MiniLM, bge, e5, gte (first), all-mpnet and most others of
sentence-transformers are one of these."""

from __future__ import annotations

from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.mlp import MLPConfig
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.encoder import DISTANCES, EncoderConfig, SequenceHeadConfig
from asyncengine.execution.models.families.common import activation

_IGNORED = (
    r"(.*\.)?embeddings\.(position|token_type)_ids", r"(.*\.)?pooler\..*", r"cls\..*", r"lm_head\..*", r"vocab_.*",
)  # fmt: skip
"""Tensors that go with the training that these checkpoints are of."""
_MPNET_PADDING = 1
"""The padding token's id, whatever the config says."""


def encoder_config(config: Any, length: int | None, classifies: bool) -> EncoderConfig:
    """The encoder of `BertModel`, `RobertaModel`, `XLMRobertaModel`, `CamembertModel`, `DistilBertModel`,
    `MPNetModel`, and of their `...ForSequenceClassification`."""
    if config.model_type == "distilbert":
        return _distilbert(config, length, classifies)
    if config.model_type == "mpnet":
        return _mpnet(config, length, classifies)
    base = "bert" if config.model_type == "bert" else "roberta"
    padding = None if base == "bert" else config.pad_token_id
    own = config.max_position_embeddings - (0 if padding is None else padding + 1)
    names = ("attention.self.query", "attention.self.key", "attention.self.value")
    layer = _layer(config, "attention.output.dense", names, "attention.output.LayerNorm")
    head = None
    if classifies and base == "bert":
        head = SequenceHeadConfig(config.num_labels, "classifier", "bert.pooler.dense")
    elif classifies:
        head = SequenceHeadConfig(config.num_labels, "classifier.out_proj", "classifier.dense")
    return EncoderConfig(
        stack=_stack(config, base, f"{base}.encoder.layer.{{}}.", layer, config.layer_norm_eps, head is not None),
        max_model_len=length or own, segments=f"{base}.embeddings.token_type_embeddings",
        num_segments=config.type_vocab_size, embedding_norm=f"{base}.embeddings.LayerNorm", padding=padding, head=head,
    )  # fmt: skip


def _distilbert(config: Any, length: int | None, classifies: bool) -> EncoderConfig:
    layer = LayerConfig(
        _attention(
            config.n_heads, config.dim, "attention.out_lin", ("attention.q_lin", "attention.k_lin", "attention.v_lin")
        ),
        MLPConfig(
            config.hidden_dim, activation(config, config.activation), ("ffn.lin1",), "ffn.lin2", gated=False, bias=True
        ),
        before_attention=None, before_mlp="sa_layer_norm", after_mlp="output_layer_norm", post_norm=True,
    )  # fmt: skip
    head = SequenceHeadConfig(config.num_labels, "classifier", "pre_classifier", activation="relu")
    return EncoderConfig(
        stack=_stack(config, "distilbert", "distilbert.transformer.layer.{}.", layer, 1e-12, classifies),
        max_model_len=length or config.max_position_embeddings,
        embedding_norm="distilbert.embeddings.LayerNorm",
        head=head if classifies else None,
    )


def _mpnet(config: Any, length: int | None, classifies: bool) -> EncoderConfig:
    if config.relative_attention_num_buckets != DISTANCES:
        raise UnsupportedModel(f"relative_attention_num_buckets is not {DISTANCES}, of which transformers has its code")
    names = ("attention.attn.q", "attention.attn.k", "attention.attn.v")
    layer = _layer(config, "attention.attn.o", names, "attention.LayerNorm")
    head = SequenceHeadConfig(config.num_labels, "classifier.out_proj", "classifier.dense")
    return EncoderConfig(
        stack=_stack(config, "mpnet", "mpnet.encoder.layer.{}.", layer, config.layer_norm_eps, classifies),
        max_model_len=length or config.max_position_embeddings - _MPNET_PADDING - 1,
        embedding_norm="mpnet.embeddings.LayerNorm", padding=_MPNET_PADDING,
        distance_bias="mpnet.encoder.relative_attention_bias", head=head if classifies else None,
    )  # fmt: skip


def _layer(config: Any, out: str, qkv: tuple[str, ...], norm: str) -> LayerConfig:
    """A layer with these names of attention's matrices and of the norm behind it."""
    mlp = MLPConfig(
        config.intermediate_size, activation(config), ("intermediate.dense",), "output.dense", gated=False, bias=True
    )
    return LayerConfig(
        _attention(config.num_attention_heads, config.hidden_size, out, qkv), mlp,
        before_attention=None, before_mlp=norm, after_mlp="output.LayerNorm", post_norm=True,
    )  # fmt: skip


def _attention(heads: int, width: int, out: str, qkv: tuple[str, ...]) -> AttentionConfig:
    dim = width // heads
    return AttentionConfig(
        heads, heads, dim, dim**-0.5, rotary=None, both=True, qkv=qkv, out=out, qkv_bias=True, out_bias=True
    )


def _stack(config: Any, base: str, layer: str, each: LayerConfig, epsilon: float, classifies: bool) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=config.vocab_size, width=config.hidden_size, layers=(each,) * config.num_hidden_layers,
        norm=NormConfig("layer", epsilon, bias=True), max_positions=config.max_position_embeddings,
        embedding=f"{base}.embeddings.word_embeddings", positions=f"{base}.embeddings.position_embeddings", layer=layer,
        final_norm=None, ignored=_IGNORED if classifies else (*_IGNORED, r"(pre_)?classifier\..*"),
    )  # fmt: skip
