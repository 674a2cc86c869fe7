"""Dense families that differ from Llama in fields alone, each a table of dense.toml, where it is described."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from asyncengine.execution.layers.basic import NormConfig
from asyncengine.execution.models.config import ModelConfig
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import activation, alternate, llama_like, rotary_of, windows_of

_TABLES = tomllib.loads((resources.files(__package__) / "dense.toml").read_text(encoding="utf-8"))
_BY_LAYER: Mapping[str, Callable[[Any], list[Any]]] = {
    "each layer's window": windows_of,
    "where there is a window": lambda config: [None if window is None else 0 for window in windows_of(config)],
}


def complete(config: ModelConfig) -> None:
    if config.model_type == "cohere2":
        alternate(config, config.get("sliding_window_pattern", 4))
    elif config.model_type == "opt":
        config.word_embed_proj_dim = config.get("word_embed_proj_dim", config.hidden_size)


def decoder_config(config: Any, length: int) -> DecoderConfig:
    """The decoder of `ApertusForCausalLM`, `CohereForCausalLM`, `Cohere2ForCausalLM`, `NemotronForCausalLM`,
    `OPTForCausalLM`, `Phi3ForCausalLM`, `GlmForCausalLM`, `Glm4ForCausalLM`, `Glm4vTextModel`, `StableLmForCausalLM`,
    `Starcoder2ForCausalLM`."""
    parts: dict[str, Any] = {}
    _read(_TABLES[config.model_type], config, parts)
    norm, rotary = parts.pop("norm", None), parts.pop("rotary", {})
    rotations = () if rotary is False else (rotary_of(config, length, **rotary),)
    model = parts.pop("model", {})
    return llama_like(config, length, norm=norm and NormConfig(**norm), rotary=rotations, **parts, **model)


def _read(table: Mapping[str, Any], config: Any, parts: dict[str, Any]) -> None:
    """Put what a table says of a model into `parts`, over what stands there."""
    for part, given in table.items():
        if part == "like":
            _read(_TABLES[given], config, parts)
        elif part == "when":
            for condition, more in given.items():
                field, _, value = condition.partition("=")
                if getattr(config, field) == value if value else getattr(config, field):
                    _read(more, config, parts)
        elif isinstance(given, dict):
            parts[part] = parts.get(part, {}) | {name: _value(name, value, config) for name, value in given.items()}
        else:
            parts[part] = given


def _value(name: str, given: Any, config: Any) -> Any:
    """The value of a field of that name."""
    if isinstance(given, dict):
        return NormConfig(**{field: _value(field, value, config) for field, value in given.items()})
    if isinstance(given, list):
        return tuple(given)
    if given in _BY_LAYER:
        return _BY_LAYER[given](config)
    if not isinstance(given, str) or not given.startswith("="):
        return None if given == "" else given
    found = getattr(config, given[1:])
    return activation(config, found) if name == "activation" else found
