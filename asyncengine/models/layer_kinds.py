"""Errors for what a config.json says of its layers and no family's file has: named, beside what is known.

transformers' configuration classes end at the first thing they don't understand, with a letter or an arithmetic error.
So layers are looked at here before a family reads the file, and before a class's own words are passed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncengine.errors import EngineError, ModelNotFound, shorten
from asyncengine.models.families import layer_kinds
from asyncengine.models.families.common import unknown_layers

_EVERY = (
    "attention", "chunked_attention", "conv", "full_attention", "linear_attention", "mamba", "mlp", "moe",
    "sliding_attention",
)  # fmt: skip
"""Layer types that some family's file has, under today's name or an older one: known ones of families that are not
written down."""
_OLDER = {"linear_attention": "mamba", "full_attention": "attention"}
"""Names that transformers takes as well."""
_LISTS = ("layer_types", "layers_block_type", "mtp_layers_block_type")
_PATTERNS = ("hybrid_override_pattern", "mtp_hybrid_override_pattern")
_LETTERS = {"M": "Mamba-2", "*": "attention", "-": "a feed-forward part", "E": "experts"}
"""Letters of a pattern, one for each layer."""
_FORWARDS = ("dense", "sparse")
_INTERVALS = (
    "full_attention_interval", "sliding_window_pattern", "no_rope_layer_interval", "decoder_sparse_step",
    "moe_layer_interval",
)  # fmt: skip
"""Every so many layers one is of another type."""
_KIMI = ("kda_layers", "full_attn_layers")


def misnamed(config: Mapping[str, Any]) -> EngineError | None:
    """The error for what a config.json, or the `text_config` within, says of its layers; None: nothing to say."""
    inside = config.get("text_config")
    for part in (config, inside if isinstance(inside, Mapping) else {}):
        for error in _errors(str(part.get("model_type") or config.get("model_type")), part):
            return error
    return None


def _errors(family: str, config: Mapping[str, Any]) -> Iterator[EngineError]:
    known = layer_kinds(family) or _EVERY
    for field in _LISTS:
        for kind in _strangers(config.get(field), (*known, *(_OLDER[kind] for kind in known if kind in _OLDER))):
            yield unknown_layers(family, kind, known)
    for kind in _strangers(config.get("mlp_layer_types"), _FORWARDS):
        yield unknown_layers(family, kind, _FORWARDS, "feed-forward parts")
    for field in _PATTERNS:
        yield from _pattern_errors(family, field, config.get(field, ""))
    for field in _INTERVALS:
        every = config.get(field, 1)
        if (isinstance(every, str) or every == 0) and config.get("layer_types"):
            continue  # EXAONE 4 spells its layers there, or says 0 without windows, and lists them
        if not isinstance(every, int) or every < 1:
            yield ModelNotFound(f"config.json: {field} must be a number of layers, got {shorten(repr(every), 80)}")
    count, unrotated = config.get("num_hidden_layers"), config.get("no_rope_layers")
    if isinstance(unrotated, list) and isinstance(count, int) and len(unrotated) != count:
        yield ModelNotFound(f"config.json: no_rope_layers names {len(unrotated)} layers, and there are {count}")
    if "linear_attn_config" in config:
        yield from _kimi_errors(config["linear_attn_config"], count)


def _pattern_errors(family: str, field: str, pattern: object) -> Iterator[EngineError]:
    if not isinstance(pattern, (str, list)):
        yield ModelNotFound(
            f"config.json: {field} must be a letter for each layer ({', '.join(_LETTERS)}), "
            f"got {shorten(repr(pattern), 80)}"
        )
        return
    for letter in _strangers(list(pattern), tuple(_LETTERS)):
        meant = [f"{letter} ({meaning})" for letter, meaning in _LETTERS.items()]
        yield unknown_layers(family, letter, meant, f"layers in {field}")


def _strangers(listed: object, known: Sequence[str]) -> list[object]:
    return [kind for kind in listed if kind not in known] if isinstance(listed, list) else []


def _kimi_errors(settings: object, count: object) -> Iterator[EngineError]:
    """Errors of two lists of layers, counted from one, which together name each of `count`."""
    if not isinstance(settings, Mapping):
        yield ModelNotFound(f"config.json: linear_attn_config must be an object, got {shorten(repr(settings), 80)}")
        return
    if not isinstance(count, int) or not all(isinstance(settings.get(name), list) for name in _KIMI):
        return
    listed = [layer for name in _KIMI for layer in settings[name]]
    wrong = [layer for layer in listed if not isinstance(layer, int) or not 1 <= layer <= count]
    missing = [layer for layer in range(1, count + 1) if layer not in listed]
    if wrong or missing:
        found = f"names layer {shorten(repr(wrong[0]), 80)}" if wrong else f"leaves out layer {missing[0]}"
        yield ModelNotFound(
            f"config.json: linear_attn_config {found}; {' and '.join(_KIMI)} together name each of 1 to {count}"
        )
