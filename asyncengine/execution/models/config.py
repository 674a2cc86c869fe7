"""config.json of a model that is written down here, read without transformers' classes, whose import takes longer than
loading a small model.

families/decoders.toml says which fields have defaults, and a family's file works out what transformers' class of the
family works out (`complete`). A config.json that lacks any other field that its family reads is left to that class,
with its defaults. `tests/execution/models/test_config.py` compares both for every family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten

_KINDS: tuple[tuple[str, tuple[type, ...], str], ...] = (
    (r"(num|n)_\w+|(?!\w+_adjust_)\w+_(size|dim|rank|heads|window)|max_position_embeddings", (int,), "a whole number"),
    (r"\w+_(eps|epsilon|theta|factor|multiplier|scaling|scale|freq)", (int, float), "a number"),
    (r"(use|tie)_(?!bidirectional)\w+|\w+_bias", (bool,), "true or false"),
    (r"hidden_act|\w+_(act|activation|function)|dtype", (str,), "a text"),
    (r"rope_(parameters|scaling)", (dict,), "an object"),
    (r"eos_token_id", (int, list), "a whole number or a list"),
)
"""Types of fields by their names; the last that fits holds."""
_ROPE_OF_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
OLDER_KINDS = {"attention": "full_attention", "mamba": "linear_attention"}
"""Earlier names of layer types."""


class MissingField(AttributeError):
    """A field that a family reads is neither in the file nor has a default here."""


class UnknownLayers(UnsupportedModel):
    """A family's configuration names layers, or options of them, that neither this engine nor a module of transformers
    that it can run has."""


def unknown_layers(family: str, kind: object, known: Sequence[str], what: str = "layers") -> UnknownLayers:
    """The error for a layer type that is not `known`."""
    named = shorten(repr(kind), 80)
    return UnknownLayers(f"family {family!r} has {what} of type {named}; known are {', '.join(known)}")


class ModelConfig(SimpleNamespace):
    """The fields of a config.json, over the defaults of its family. Reading one that is missing raises
    `MissingField`."""

    def __getattr__(self, name: str) -> Any:
        raise MissingField(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The field `name`, or `default` where it is missing or null."""
        value = self.__dict__.get(name)
        return default if value is None else value

    def get_text_config(self) -> ModelConfig:
        """The configuration of the language model, where there are other parts as well; else this one."""
        return self.get("text_config", self)


def read_fields(
    content: Mapping[str, Any], defaults: Mapping[str, Any], nullable: Collection[str], aliases: Mapping[str, str],
    complete: Callable[[ModelConfig], None],
) -> ModelConfig:  # fmt: skip
    """The configuration in `content`, of a family with these `defaults`; `...`: the field must be there.

    `nullable`: fields for which null means that there is no such thing; any other that is null is taken as missing.
    `aliases`: other names of the family's fields. `complete` sets what the family works out of the fields. Raises
    `MissingField`, and `ModelNotFound` naming the field that is wrong.
    """
    fields = {key: _decoded(value) for key, value in content.items() if value is not None or key in nullable}
    fields["dtype"] = content.get("dtype") or content.get("torch_dtype")
    for other, name in aliases.items():
        if other in fields:
            fields.setdefault(name, fields[other])
    for key, value in fields.items():
        _check_type(content, key, value)
    by_kind = "rope_local_base_freq" in defaults
    if not by_kind and "rope_scaling" in fields:
        fields["rope_parameters"] = fields["rope_scaling"] or fields.get("rope_parameters")
    values = {**defaults, **fields}
    if missing := next((key for key, value in values.items() if value is ...), None):
        raise MissingField(missing)
    config = ModelConfig(**values)
    complete(config)
    for other, name in aliases.items():
        if name in values:
            setattr(config, other, config.get(name))
    if config.layer_types is not None:
        config.layer_types = [OLDER_KINDS.get(kind, kind) for kind in config.layer_types]
    _check_heads(config)
    if by_kind:  # older files have one field for each
        given, scaling = config.get("rope_parameters", {}), config.rope_scaling or {}
        config.rope_parameters = {
            "full_attention": {"rope_theta": config.rope_theta, **(given.get("full_attention") or {}), **scaling},
            "sliding_attention": {
                "rope_theta": config.rope_local_base_freq, **(given.get("sliding_attention") or {})
            },
        }  # fmt: skip
    _complete_rope(config)
    return config


def _check_type(content: Mapping[str, Any], key: str, value: Any) -> None:
    if value is None:
        return
    for pattern, kinds, words in reversed(_KINDS):
        if re.fullmatch(pattern, key):
            fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            if not fits or (isinstance(value, float) and not math.isfinite(value)):
                family, got = shorten(str(content["model_type"]), 80), shorten(repr(value), 80)
                raise ModelNotFound(f"config.json is not a valid {family} config: {key} must be {words}, got {got}")
            return


def _decoded(value: Any) -> Any:
    """The value with its numbers that JSON does not have: transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def _check_heads(config: ModelConfig) -> None:
    """Raises `ModelNotFound` for heads that do not divide what they are heads of."""
    heads = config.get("num_attention_heads")
    wholes = [("num_attention_heads", heads, config.get("num_key_value_heads"))]
    wholes += [("hidden_size", config.hidden_size, heads)] if config.head_dim is None else []
    for name, size, parts in wholes:
        if size is not None and parts is not None and (parts < 1 or size < 1 or size % parts):
            family = config.model_type
            raise ModelNotFound(
                f"config.json is not a valid {family} config: {name} must be a multiple of {parts}, got {size}"
            )


def _complete_rope(config: ModelConfig) -> None:
    """`rope_parameters` under today's names, for all layers or for each of their types."""
    given = dict(config.rope_parameters or {})
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
            original = config.get("original_max_position_embeddings")
            if original is not None and kind is None:
                one["original_max_position_embeddings"] = original
            one.setdefault("original_max_position_embeddings", config.max_position_embeddings)
        if kind is not None:
            given[kind] = one
    config.rope_parameters = given
