"""Llama and the dense families that differ from it in fields alone: tables of dense.toml, where they are described."""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from importlib import resources
from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.layers.rotary import RotaryConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families import common
from asyncengine.execution.models.families.common import layer_types_of, windows_of

_TABLES = tomllib.loads((resources.files(__package__) / "dense.toml").read_text(encoding="utf-8"))
_BY_LAYER: Mapping[str, Callable[[Any], list[Any]]] = {
    "each layer's window": windows_of,
    "where there is a window": lambda config: [None if window is None else 0 for window in windows_of(config)],
    "each layer's kind": lambda config: [_kinds(config).index(kind) for kind in layer_types_of(config)],
    "no_rope_layers": lambda config: [0 if rotates else None for rotates in config.no_rope_layers],
}


def complete(config: ModelConfig) -> None:
    family, layers = config.model_type, range(config.num_hidden_layers)
    if family in ("qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text"):
        config.sliding_window = config.sliding_window if config.get("use_sliding_window") else None
        common.slide_from(config)
    elif family == "ministral" and config.layer_types is None:
        config.layer_types = [common.KINDS[config.sliding_window is not None]] * len(layers)
    elif family == "smollm3":
        every = config.get("no_rope_layer_interval", 4)
        config.no_rope_layers = config.get("no_rope_layers", [int((layer + 1) % every != 0) for layer in layers])
        slides = config.get("use_sliding_window") and config.get("sliding_window") is not None
        if config.layer_types is None:
            config.layer_types = [common.KINDS[bool(slides and not config.no_rope_layers[layer])] for layer in layers]
    elif family == "gemma" and config.hidden_act == "gelu":
        config.hidden_act = "gelu_pytorch_tanh"  # older files say so and mean this
    elif family == "gemma2":
        common.alternate(config, 2)
    elif family == "gemma3_text":
        common.alternate(config, config.get("sliding_window_pattern", 6))
    elif family == "olmo3":
        common.alternate(config, 4)
    elif family == "exaone4":
        common.alternate(config, 0 if config.sliding_window is None else config.get("sliding_window_pattern", 4))
    elif family == "cohere2":
        common.alternate(config, config.get("sliding_window_pattern", 4))
    elif family == "opt":
        config.word_embed_proj_dim = config.get("word_embed_proj_dim", config.hidden_size)


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `LlamaForCausalLM`, `MistralForCausalLM`, `MinistralForCausalLM`, `Ministral3ForCausalLM`,
    `Qwen2ForCausalLM`, `Qwen2VLTextModel`, `Qwen2_5_VLTextModel`, `Qwen3ForCausalLM`, `Qwen3VLTextModel`,
    `SmolLM3ForCausalLM`, `SeedOssForCausalLM`, `HunYuanDenseV1ForCausalLM`, `ApertusForCausalLM`, `CohereForCausalLM`,
    `Cohere2ForCausalLM`, `NemotronForCausalLM`, `OPTForCausalLM`, `Phi3ForCausalLM`, `GlmForCausalLM`,
    `Glm4ForCausalLM`, `Glm4vTextModel`, `StableLmForCausalLM`, `Starcoder2ForCausalLM`, `GemmaForCausalLM`,
    `Gemma2ForCausalLM`, `Gemma3ForCausalLM`, `OlmoForCausalLM`, `Olmo2ForCausalLM`, `Olmo3ForCausalLM`,
    `Exaone4ForCausalLM`."""
    return decoder_of(config, length, parts_of(_TABLES, config))


def decoder_of(config: Any, length: int, parts: dict[str, Any], **changes: Any) -> DecoderConfig:
    """The decoder of parts that a family's table names. `changes`: further arguments of `common.llama_like`."""
    norm, rotary = parts.pop("norm", None), parts.pop("rotary", {})
    rotations = () if rotary is False else _rotations(config, length, **rotary)
    changes |= parts.pop("model", {})
    return common.llama_like(config, length, norm=norm and NormConfig(**norm), rotary=rotations, **parts, **changes)


def parts_of(tables: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The fields of each part that a family's table has, with their values in a model."""
    parts: dict[str, Any] = {}
    _read(tables, tables[config.model_type], config, parts)
    return parts


def _kinds(config: Any) -> list[str]:
    return sorted(set(layer_types_of(config)))


def _rotations(
    config: Any, length: int, by_kind: bool = False, exact: bool = False, **how: Any
) -> tuple[RotaryConfig, ...]:
    kinds: list[str | None] = [*_kinds(config)] if by_kind else [None]
    return tuple(replace(_rotary(config, length, layer_type=kind, **how), exact=exact) for kind in kinds)


def _rotary(config: Any, length: int, **how: Any) -> RotaryConfig:
    parameters = config.rope_parameters
    if config.model_type == "ministral3":
        growth = (float(parameters["llama_4_scaling_beta"]), int(parameters["original_max_position_embeddings"]))
        return replace(common.rotary_of(config, length, **how), query_growth=growth)
    if config.model_type == "hunyuan_v1_dense" and parameters["rope_type"] == "dynamic" and parameters.get("alpha"):
        # Hunyuan calls it dynamic, but the base is stretched by the same for all lengths
        dim = common.head_dim_of(config)
        return common.default_rotary(parameters["rope_theta"] * parameters["alpha"] ** (dim / (dim - 2)), dim)
    return common.rotary_of(config, length, **how)


def _read(tables: Mapping[str, Any], table: Mapping[str, Any], config: Any, parts: dict[str, Any]) -> None:
    """Put what a table says of a model into `parts`, over what stands there."""
    for part, given in table.items():
        if part == "like":
            _read(tables, tables[given], config, parts)
        elif part == "when":
            for condition, more in given.items():
                field, _, value = condition.partition("=")
                found = getattr(config, field, None)
                if found == value if value else found:
                    _read(tables, more, config, parts)
        elif isinstance(given, dict):
            parts[part] = (parts.get(part) or {}) | {name: _value(name, value, config) for name, value in given.items()}
        else:
            parts[part] = given


def _value(name: str, given: Any, config: Any) -> Any:
    """The value of a field of that name."""
    if isinstance(given, dict):
        return NormConfig(**{field: _value(field, value, config) for field, value in given.items()})
    if isinstance(given, list):
        return tuple(tuple(each) if isinstance(each, list) else each for each in given)
    if given in _BY_LAYER:
        return _BY_LAYER[given](config)
    if not isinstance(given, str) or not given.startswith("="):
        return None if given == "" else given
    field, _, power = given[1:].partition(" ** ")
    found = reduce(operator.mul, (getattr(config, each) for each in field.split(" * ")))
    if power:
        return 1.0 / found if power == "-1" else found ** float(power)  # a power of -1 may be rounded otherwise
    return common.activation(config, found) if name == "activation" else found
