"""BERT and encoders of its kind, with learned or rotary positions: bert.toml has what they differ in."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.mlp import MLPConfig
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.encoder import DISTANCES, EncoderConfig, SequenceHeadConfig
from asyncengine.execution.models.families.common import activation, head_dim_of, rotary_of

_TABLES = tomllib.loads((resources.files(__package__) / "bert.toml").read_text(encoding="utf-8"))
_IGNORED = (
    r"(.*\.)?(position|token_type)_ids", r"(.*\.)?inv_freq", r"(.*\.)?pooler\..*", r"cls\..*", r"lm_head\..*",
    r"vocab_.*",
)  # fmt: skip
"""Tensors that go with the training that these checkpoints are of, or that follow from the configuration."""


def encoder_config(config: Any, length: int | None, classifies: bool) -> EncoderConfig:
    """The encoder of `BertModel`, `RobertaModel`, `XLMRobertaModel`, `CamembertModel`, `DistilBertModel`, `MPNetModel`,
    `NomicBertModel`, `GteModel`, `JinaEmbeddingsV3Model`, and of their `...ForSequenceClassification`."""
    table = _table_of(config.model_type)
    base, learned, distances = table["base"], "positions" in table, table.get("distances")
    if distances and config.relative_attention_num_buckets != DISTANCES:
        raise UnsupportedModel(f"relative_attention_num_buckets is not {DISTANCES}, of which transformers has its code")
    padding = table.get("padding")
    if isinstance(padding, str):
        padding = getattr(config, padding)
    longest = length or config.max_position_embeddings - (0 if padding is None else padding + 1)
    segments = f"{base}.embeddings.token_type_embeddings" if "segments" in table and config.type_vocab_size else None
    head = SequenceHeadConfig(config.num_labels, **table["head"])
    layers = (_layer(config, table, None if learned else 0),) * config.num_hidden_layers
    stack = DecoderConfig(
        vocab_size=config.vocab_size, width=config.hidden_size, layers=layers,
        norm=NormConfig("layer", table.get("epsilon") or config.layer_norm_eps, bias=True),
        rotary=() if learned else (rotary_of(config, longest),), max_positions=config.max_position_embeddings,
        embedding=f"{base}.embeddings.word_embeddings", layer=f"{base}.{table['path']}", final_norm=None,
        positions=f"{base}.embeddings.position_embeddings" if learned else None,
        ignored=_IGNORED if classifies else (*_IGNORED, r"(pre_)?classifier\..*"),
    )  # fmt: skip
    return EncoderConfig(
        stack, longest, segments, config.type_vocab_size if segments else 0, f"{base}.embeddings.LayerNorm", padding,
        distance_bias=distances and f"{base}.{distances}", head=head if classifies else None,
    )  # fmt: skip


def _table_of(family: str) -> dict[str, Any]:
    table = _TABLES[family]
    return _table_of(table["like"]) | table if "like" in table else table


def _fields(table: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: tuple(own) if isinstance(own, list) else own for name, own in table.get(part, {}).items()}


def _layer(config: Any, table: dict[str, Any], rotary: int | None) -> LayerConfig:
    heads, dim = config.num_attention_heads, head_dim_of(config)
    attention, mlp = _fields(table, "attention"), _fields(table, "mlp")
    width = getattr(config, mlp.pop("width", "intermediate_size"))
    act = activation(config, getattr(config, mlp.pop("activation", "hidden_act")))
    return LayerConfig(
        AttentionConfig(heads, heads, dim, dim**-0.5, rotary, both=True, **attention), MLPConfig(width, act, **mlp),
        before_attention=None, before_mlp=table["norms"][0], after_mlp=table["norms"][1], post_norm=True,
    )  # fmt: skip
