"""Reader of config.json for families with a table here, without transformers' classes, whose import takes longer than
loading a small model.

families/decoders.toml has the defaults of fields, and `families.completing` derives the fields that transformers' class
of the family derives. A config.json that lacks any other field is left to that class, with its defaults.
`tests/execution/models/test_config.py` compares both for every family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten

_FIELD_TYPES: tuple[tuple[str, tuple[type, ...], str], ...] = (
    (r"(num|n)_\w+|(?!\w+_adjust_)\w+_(size|dim|rank|heads|window)|max_position_embeddings", (int,), "a whole number"),
    (r"\w+_(eps|epsilon|theta|factor|multiplier|scaling|scale|freq)", (int, float), "a number"),
    (r"(use|tie)_(?!bidirectional)\w+|\w+_bias", (bool,), "true or false"),
    (r"hidden_act|\w+_(act|activation|function)|dtype", (str,), "a text"),
    (r"rope_(parameters|scaling)", (dict,), "an object"),
    (r"eos_token_id", (int, list), "a whole number or a list"),
)
"""(pattern of field names, allowed types, their name in errors); the last pattern that matches a field holds."""
_ROPE_OF_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
OLDER_TYPES = {"attention": "full_attention", "mamba": "linear_attention"}
"""Earlier name of a layer type -> its current name."""


class MissingField(AttributeError):
    """Raised for a field that a family reads and that has neither a value in the file nor a default here."""


class UnknownLayers(UnsupportedModel):
    """Raised for layers, or options of them, that neither this engine nor a transformers module that it can run has."""


def unknown_layers(family: str, layer_type: object, known: Sequence[str], noun: str = "layers") -> UnknownLayers:
    """The error for a layer type that is not among `known`. `noun`: of which layers or modules it is the type."""
    named = shorten(repr(layer_type), 80)
    return UnknownLayers(f"family {family!r} has {noun} of type {named}; known are {', '.join(known)}")


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
        """The configuration of the language model within a multimodal one; else this one."""
        return self.get("text_config", self)


def read_fields(
    content: Mapping[str, Any], defaults: Mapping[str, Any], nullable: Collection[str], aliases: Mapping[str, str],
    complete: Callable[[ModelConfig], None],
) -> ModelConfig:  # fmt: skip
    """The configuration in `content`, of a family with these `defaults`, where `...` marks a required field.

    `nullable`: fields for which null is a value ("none"); any other field that is null counts as missing. `aliases`:
    {other name: name} of the family's fields. `complete` sets derived fields. Raises `MissingField`, and
    `ModelNotFound` naming the field that is wrong.
    """
    fields = {key: _decoded(value) for key, value in content.items() if value is not None or key in nullable}
    fields["dtype"] = content.get("dtype") or content.get("torch_dtype")
    for alias, name in aliases.items():
        if alias in fields:
            fields.setdefault(name, fields[alias])
    for key, value in fields.items():
        _check_type(content, key, value)
    rope_by_layer_type = "rope_local_base_freq" in defaults
    if not rope_by_layer_type and "rope_scaling" in fields:
        fields["rope_parameters"] = fields["rope_scaling"] or fields.get("rope_parameters")
    values = {**defaults, **fields}
    if missing := next((key for key, value in values.items() if value is ...), None):
        raise MissingField(missing)
    config = ModelConfig(**values)
    complete(config)
    for alias, name in aliases.items():
        if name in values:
            setattr(config, alias, config.get(name))
    if config.layer_types is not None:
        config.layer_types = [OLDER_TYPES.get(layer_type, layer_type) for layer_type in config.layer_types]
    _check_heads(config)
    if rope_by_layer_type:  # older files have two fields instead of `rope_parameters` by layer type
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
    for pattern, types, expected in reversed(_FIELD_TYPES):
        if re.fullmatch(pattern, key):
            # a bool is an int in Python, and no number in config.json
            fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
            if not fits or (isinstance(value, float) and not math.isfinite(value)):
                family, got = shorten(str(content["model_type"]), 80), shorten(repr(value), 80)
                raise ModelNotFound(f"config.json is not a valid {family} config: {key} must be {expected}, got {got}")
            return


def _decoded(value: Any) -> Any:
    """The value with infinities and NaN, which JSON lacks: transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def _check_heads(config: ModelConfig) -> None:
    """Raise `ModelNotFound` if KV heads do not divide the query heads, or these the hidden size."""
    heads = config.get("num_attention_heads")
    divisions = [("num_attention_heads", heads, config.get("num_key_value_heads"))]
    divisions += [("hidden_size", config.hidden_size, heads)] if config.head_dim is None else []
    for name, size, divisor in divisions:
        if size is not None and divisor is not None and (divisor < 1 or size < 1 or size % divisor):
            family = config.model_type
            raise ModelNotFound(
                f"config.json is not a valid {family} config: {name} must be a multiple of {divisor}, got {size}"
            )


def _complete_rope(config: ModelConfig) -> None:
    """Bring `rope_parameters` into transformers' current form: for all layers, or by layer type."""
    rope_parameters = dict(config.rope_parameters or {})
    layer_types = [layer_type for layer_type in rope_parameters if layer_type in (config.layer_types or ())]
    for layer_type in layer_types or [None]:
        parameters = rope_parameters if layer_type is None else dict(rope_parameters[layer_type] or {})
        parameters.setdefault("rope_theta", config.rope_theta)
        if config.partial_rotary_factor is not None:
            parameters.setdefault("partial_rotary_factor", config.partial_rotary_factor)
        parameters.setdefault("rope_type", parameters.get("type", "default"))
        if parameters["rope_type"] == "mrope":  # the three positions of a text token are equal
            parameters["rope_type"] = "default"
        if parameters["rope_type"] in _ROPE_OF_ORIGINAL_LENGTH:
            original = config.get("original_max_position_embeddings")
            if original is not None and layer_type is None:
                parameters["original_max_position_embeddings"] = original
            parameters.setdefault("original_max_position_embeddings", config.max_position_embeddings)
        if layer_type is not None:
            rope_parameters[layer_type] = parameters
    config.rope_parameters = rope_parameters
