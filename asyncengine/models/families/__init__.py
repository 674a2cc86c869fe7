"""Which families are written down: from a config.json to a `DecoderConfig`, one short file for each group.

`NATIVE` says which file serves which `model_type`. A family that only renames another costs a line here. All others run
through `models.fallback`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from asyncengine.models.decoder import DecoderConfig
from asyncengine.models.families.common import text_part

DecoderConfigOf = Callable[[Any, int], DecoderConfig]
"""(transformers' config object, longest sequence) -> what the decoder is built of. Raises `UnsupportedModel` for an
option of the family that is not written down: such a model runs through transformers."""

NATIVE: Mapping[str, str] = {
    "apertus": "apertus",
    "cohere": "cohere",
    "cohere2": "cohere",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gemma4_text": "gemma4",
    "gpt2": "gpt2",
    "opt": "opt",
    "llama": "llama",
    "mistral": "llama",
    "ministral": "llama",
    "ministral3": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
}
"""model_type -> the file in this folder with its `decoder_config`."""


MULTIMODAL: Mapping[str, str] = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
"""model_type of a model that reads images as well -> that of its text model, the part that runs here."""


def decoder_config_of(model_type: str) -> DecoderConfigOf | None:
    """How a family's configuration is read; None: it runs through transformers."""
    text = MULTIMODAL.get(model_type)
    file = NATIVE.get(text or model_type)
    if file is None:
        return None
    found: DecoderConfigOf = import_module(f"{__name__}.{file}").decoder_config
    return found if text is None else partial(text_part, found)
