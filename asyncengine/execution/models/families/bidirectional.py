"""Decoders that were made encoders: EuroBERT (Boizard et al. 2025), EmbeddingGemma (Vera et al. 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.encoder import EncoderConfig, SequenceHeadConfig
from asyncengine.execution.models.families.common import llama_like
from asyncengine.execution.models.families.dense import decoder_config

_POOLINGS: dict[str, Any] = {"bos": "first", "mean": "mean", "late": "late"}


def encoder_config(config: Any, length: int | None, classifies: bool) -> EncoderConfig:
    """The encoder of `EuroBertModel`, `EuroBertForSequenceClassification`, and of `Gemma3TextModel` with
    `use_bidirectional_attention`."""
    longest = length or config.max_position_embeddings
    if config.model_type == "gemma3_text":
        if classifies:
            raise UnsupportedModel("family 'gemma3_text' with a classifier in both directions is not written down")
        if config.attn_logit_softcapping is not None:
            raise UnsupportedModel("family 'gemma3_text' with attn_logit_softcapping is not written down")
        return EncoderConfig(_both_ways(decoder_config(config, longest)), longest)
    biased = config.attention_bias
    stack = llama_like(
        config, longest, attention={"qkv_bias": biased, "out_bias": biased}, mlp={"bias": config.mlp_bias}
    )
    head = SequenceHeadConfig(
        config.num_labels, "classifier", "dense", activation="gelu", pooling=_POOLINGS[config.classifier_pooling]
    )
    return EncoderConfig(_both_ways(stack, classifies), longest, head=head if classifies else None)


def _both_ways(stack: DecoderConfig, classifies: bool = False) -> DecoderConfig:
    """The same without a causal mask and without an output layer."""

    def both(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.attention, AttentionConfig):
            return layer
        return replace(layer, attention=replace(layer.attention, both=True))

    heads = (r"lm_head\..*",) if classifies else (r"lm_head\..*", r"dense\..*", r"classifier\..*")
    return replace(stack, layers=tuple(map(both, stack.layers)), ignored=(*stack.ignored, *heads))
