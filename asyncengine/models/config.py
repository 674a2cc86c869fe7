"""config.json of a model that is written down here, read without transformers' classes, whose import takes longer than
loading a small model.

A family's file declares the fields that it reads (`FIELDS`), beside those that all families have, and works out what
transformers' class of the family works out (`complete`). `tests/models/test_config.py` compares both for every family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace, UnionType
from typing import Any

from asyncengine.errors import ModelNotFound, shorten

Fields = Mapping[str, Any]
"""Declared fields by name. A type: the field must be there. A union with None: it is None where it is missing.
Anything else is the default, whose type the field has."""
COMMON: Fields = MappingProxyType(
    {
        "vocab_size": int, "hidden_size": int, "intermediate_size": int, "num_hidden_layers": int,
        "num_attention_heads": int, "max_position_embeddings": int, "num_key_value_heads": int | None,
        "head_dim": int | None, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "eos_token_id": 2, "layer_types": list | None, "rope_theta": 1e4,
        "rope_parameters": dict | None, "rope_scaling": dict | None, "partial_rotary_factor": float | None,
        "dtype": str | None,
    }
)  # fmt: skip
"""Fields of all families, with Llama's defaults; a family's own declarations come before these."""
NULLABLE = (
    "sliding_window", "num_key_value_heads", "head_dim", "attention_chunk_size", "attn_logit_softcapping",
    "final_logit_softcapping",
)  # fmt: skip
"""Fields that may be null whatever their default is, which then does not hold. A flag may be null, too."""
_ROPE_OF_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
_OLDER_KINDS = {"attention": "full_attention", "mamba": "linear_attention"}
"""Earlier names of layer types."""
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}


class MissingField(Exception):
    """A field that must be there is not: transformers' class of the family has a default for it."""


class ModelConfig(SimpleNamespace):
    """The fields of a config.json, over the defaults of its family."""

    def get_text_config(self) -> ModelConfig:
        """The configuration of the language model, where there are other parts as well; else this one."""
        inner: ModelConfig = self.__dict__.get("text_config", self)
        return inner


def read(content: Mapping[str, Any], key: str, declared: Any) -> Any:
    """The field `key` as `declared` (see `Fields`). Raises `MissingField`, and `ModelNotFound` naming the field for a
    value of another type."""
    optional = isinstance(declared, UnionType) or key in NULLABLE or key == "eos_token_id" or isinstance(declared, bool)
    if key not in content:
        if isinstance(declared, type):
            raise MissingField(key)
        return None if isinstance(declared, UnionType) else declared
    value = _decoded(content[key])
    if key == "eos_token_id":
        kinds: tuple[type, ...] = (int, list)
    elif isinstance(declared, UnionType):
        kinds = tuple(kind for kind in declared.__args__ if kind is not type(None))
    else:
        kinds = (declared if isinstance(declared, type) else type(declared),)
    if value is None and optional:
        return None
    fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
    if (
        not fits
        or (isinstance(value, bool) and bool not in kinds)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        words = " or ".join(_WORDS[kind] for kind in kinds)
        family = shorten(str(content.get("model_type")), 80)
        raise ModelNotFound(
            f"config.json is not a valid {family} config: {key} must be {words}, got {shorten(repr(value), 80)}"
        )
    return value


def _decoded(value: Any) -> Any:
    """The value with its numbers that JSON does not have: transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def fill(
    content: Mapping[str, Any], own: Fields, aliases: Mapping[str, str], complete: Callable[[Any], None]
) -> ModelConfig:
    """The configuration in `content`, of a family with the fields `own` beside the common ones.

    `aliases`: other names of its fields. `complete` sets what the family works out of the fields. Raises
    `MissingField`, and `ModelNotFound` naming the field.
    """
    content = {**content, "dtype": content.get("dtype") or content.get("torch_dtype")}
    for other, name in aliases.items():
        if other in content:
            content.setdefault(name, content[other])
    values = {key: read(content, key, declared) for key, declared in {**COMMON, **own}.items() if declared is not None}
    config = ModelConfig(**{**content, **values})
    complete(config)
    for other, name in aliases.items():
        setattr(config, other, getattr(config, name))
    if config.layer_types is not None:
        config.layer_types = [_OLDER_KINDS.get(kind, kind) for kind in config.layer_types]
    _check_heads(config)
    if getattr(config, "rope_local_base_freq", None) is None:
        _complete_rope(config)
    else:
        _complete_ropes(config)
    return config


def _check_heads(config: ModelConfig) -> None:
    """Raises `ModelNotFound` for heads that do not divide what they are heads of."""
    heads = getattr(config, "num_attention_heads", None)
    wholes = [("num_attention_heads", heads, config.num_key_value_heads)]
    wholes += [("hidden_size", config.hidden_size, heads)] if config.head_dim is None else []
    for name, size, parts in wholes:
        if size is not None and parts is not None and (parts < 1 or size < 1 or size % parts):
            family = config.model_type
            raise ModelNotFound(
                f"config.json is not a valid {family} config: {name} must be a multiple of {parts}, got {size}"
            )


def _complete_rope(config: ModelConfig) -> None:
    """`rope_parameters` under today's names, for all layers or for each of their types."""
    given = dict(config.rope_scaling or config.rope_parameters or {})
    by_kind = [kind for kind in given if kind in (config.layer_types or ())]
    for kind in by_kind or [None]:
        one = given if kind is None else dict(given[kind] or {})
        one.setdefault("rope_theta", config.rope_theta)
        if config.partial_rotary_factor is not None:
            one.setdefault("partial_rotary_factor", config.partial_rotary_factor)
        one.setdefault("rope_type", one.get("type", "default"))
        if one["rope_type"] == "mrope":  # of texts, all its three positions are alike
            one["rope_type"] = "default"
        if one["rope_type"] in _ROPE_OF_ORIGINAL_LENGTH:
            original = getattr(config, "original_max_position_embeddings", None)
            if original is not None and kind is None:
                one["original_max_position_embeddings"] = original
            one.setdefault("original_max_position_embeddings", config.max_position_embeddings)
        if kind is not None:
            given[kind] = one
    config.rope_parameters = given


def _complete_ropes(config: ModelConfig) -> None:
    """The same of a family whose layers with and without windows rotate by parameters of their own: older files have
    those of the former in `rope_local_base_freq`."""
    given = dict(config.rope_parameters or {})
    found = {
        "full_attention": {**(given.get("full_attention") or {}), **(config.rope_scaling or {})},
        "sliding_attention": dict(given.get("sliding_attention") or {}),
    }
    for kind, theta in (("full_attention", config.rope_theta), ("sliding_attention", config.rope_local_base_freq)):
        found[kind].setdefault("rope_theta", theta)
        found[kind].setdefault("rope_type", found[kind].get("type", "default"))
        if found[kind]["rope_type"] in _ROPE_OF_ORIGINAL_LENGTH:
            found[kind].setdefault("original_max_position_embeddings", config.max_position_embeddings)
    config.rope_parameters = found
