"""Which families are written down: from a config.json to a `DecoderConfig`, one short file for each group.

`NATIVE` says which file serves which `model_type`. A family that only renames another costs a line here. All others run
through `models.fallback`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from asyncengine.models.decoder import DecoderConfig

DecoderConfigOf = Callable[[Any, int], DecoderConfig]
"""(transformers' config object, longest sequence) -> what the decoder is built of. Raises `UnsupportedModel` for an
option of the family that is not written down."""

NATIVE: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "ministral": "llama",
    "ministral3": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "nemotron": "nemotron",
}
"""model_type -> the file in this folder with its `decoder_config`."""


def decoder_config_of(config: Any) -> DecoderConfigOf | None:
    """How the configuration of this family is read; None: it runs through transformers, as does every model that
    brings its own code."""
    file = NATIVE.get(config.model_type)
    if file is None or not type(config).__module__.startswith("transformers."):
        return None
    found: DecoderConfigOf = import_module(f"{__name__}.{file}").decoder_config
    return found
