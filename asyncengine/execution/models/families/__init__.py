"""Model families that have a table here: their tables turn a config.json into a `DecoderConfig`.

Every other family runs through `models.fallback`, as does a known family with an option that its table lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.models.config import MissingField, ModelConfig, UnknownLayers, read_fields
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import TextNames, with_names
from asyncengine.execution.models.families.completing import complete
from asyncengine.execution.models.families.tables import NATIVE, decoder_config, known_layer_types, read_tables
from asyncengine.execution.models.multimodal import PLACEHOLDERS

__all__ = ["MULTIMODAL", "NATIVE", "decoder_config_of", "known_layer_types", "native_config"]

logger = logging.getLogger("asyncengine")

_TABLES = read_tables("decoders.toml")
MULTIMODAL: Mapping[str, TextNames] = {family: TextNames(**names) for family, names in _TABLES["multimodal"].items()}
"""model_type of a multimodal model -> tensor names of its language model, the only module that runs here.

The language model's family is that of `text_config`. A model is listed only if text passes through no other module."""
_OWN_DEFAULTS = ("mistral3", "voxtral", "idefics3", "smolvlm")
"""Multimodal families whose classes give fields of the language model other defaults than that model's own class."""


def native_config(content: Mapping[str, Any], name: str = "") -> ModelConfig | None:
    """The configuration in the config.json of the model `name`.

    Returns None if transformers' class must read it: its family has no table here, or a field is missing whose default
    only that class knows. Raises `ModelNotFound` naming the field that is wrong.
    """
    family = content.get("model_type")
    try:
        if not isinstance(family, str) or family not in NATIVE:
            return _multimodal_config(content) if family in tuple(MULTIMODAL) else None
        common, row = _TABLES["common"], _TABLES["fields"].get(family, {})
        defaults, aliases = _defaults_of(common) | _defaults_of(row), row.get("aliases", {})
        config = read_fields(content, defaults, common["nullable"], aliases, partial(complete, table=row))
    except MissingField:
        return None
    config._name_or_path = name
    return config


def _defaults_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the fields that a table names; `...` marks a required field."""
    missing = dict.fromkeys(table.get("optional", ())) | dict.fromkeys(table.get("required", ()), ...)
    return missing | table.get("defaults", {})


def _multimodal_config(content: Mapping[str, Any]) -> ModelConfig | None:
    """The configuration of a multimodal model with that of its language model inside; None as in `native_config`."""
    text_content = content.get("text_config")
    is_explicit = "tie_word_embeddings" in content and any(field in content for field in PLACEHOLDERS)
    if not is_explicit or content["model_type"] in _OWN_DEFAULTS or not isinstance(text_content, Mapping):
        return None
    text = native_config(text_content)
    if text is None or "text_config" in text_content:
        return None
    return ModelConfig(**{**content, "dtype": content.get("dtype") or content.get("torch_dtype"), "text_config": text})


def decoder_config_of(config: Any, length: int) -> DecoderConfig | None:
    """The configuration of the decoder, for sequences of up to `length` tokens. `config`: a `ModelConfig`, or
    transformers' config object.

    Returns None if the model must run through transformers: its family or one of its options has no table, or it brings
    code of its own (`trust_remote_code`). Raises `MissingField` for a field without a default here.
    """
    names = MULTIMODAL.get(config.model_type)
    text = config if names is None else config.get_text_config()
    if text.model_type not in NATIVE or not (
        isinstance(config, ModelConfig) or type(config).__module__.startswith("transformers.")
    ):
        logger.warning("family %r is not written down here: it runs through transformers, slower", text.model_type)
        return None
    try:
        decoder = decoder_config(text, length)
    except UnknownLayers:
        raise
    except UnsupportedModel as error:
        logger.warning("%s: it runs through transformers, slower", error)
        return None
    return decoder if names is None else with_names(decoder, names, config)
