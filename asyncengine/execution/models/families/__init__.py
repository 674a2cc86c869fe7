"""The families that are written down, as tables: from a config.json to a `DecoderConfig`.

All others run through `models.fallback`, and so do options of these that are not written down.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.models.config import MissingField, ModelConfig, UnknownLayers, read_fields
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families.common import Inside, inside_of
from asyncengine.execution.models.families.completing import complete
from asyncengine.execution.models.families.tables import NATIVE, decoder_config, layer_kinds, read_tables
from asyncengine.execution.models.multimodal import PLACEHOLDERS

__all__ = ["MULTIMODAL", "NATIVE", "decoder_config_of", "layer_kinds", "native_config"]

logger = logging.getLogger("asyncengine")

_TABLES = read_tables("decoders.toml")
MULTIMODAL: Mapping[str, Inside] = {family: Inside(**names) for family, names in _TABLES["multimodal"].items()}
"""model_type of a model that reads images or sounds as well -> where its language model lies, the part that runs here.

Its family is that of `text_config`. A model is listed here only if text alone goes through nothing else in it."""
_OWN_DEFAULTS = ("mistral3", "voxtral", "idefics3", "smolvlm")
"""Families whose classes have other defaults for fields of their language model than its family has."""


def native_config(content: Mapping[str, Any], name: str = "") -> ModelConfig | None:
    """The configuration in the config.json of the model `name`.

    None: transformers' class has to read it, as its family is not written down here, or as fields are missing for
    which only that class has defaults. Raises `ModelNotFound` naming the field that is wrong.
    """
    family = content.get("model_type")
    try:
        if not isinstance(family, str) or family not in NATIVE:
            return _with_language_model(content) if family in tuple(MULTIMODAL) else None
        common, own = _TABLES["common"], _TABLES["fields"].get(family, {})
        defaults = _defaults_of(common) | _defaults_of(own)
        found = read_fields(content, defaults, common["nullable"], own.get("aliases", {}), partial(complete, table=own))
    except MissingField:
        return None
    found._name_or_path = name
    return found


def _defaults_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the fields that a table names; `...`: the field must be there."""
    missing = dict.fromkeys(table.get("optional", ())) | dict.fromkeys(table.get("required", ()), ...)
    return missing | table.get("defaults", {})


def _with_language_model(content: Mapping[str, Any]) -> ModelConfig | None:
    """The configuration of a model of several parts, with that of its language model; None as `native_config`."""
    inner = content.get("text_config")
    said = "tie_word_embeddings" in content and any(field in content for field in PLACEHOLDERS)
    if not said or content["model_type"] in _OWN_DEFAULTS or not isinstance(inner, Mapping):
        return None
    text = native_config(inner)
    if text is None or "text_config" in inner:
        return None
    return ModelConfig(**{**content, "dtype": content.get("dtype") or content.get("torch_dtype"), "text_config": text})


def decoder_config_of(config: Any, length: int) -> DecoderConfig | None:
    """The configuration of the decoder, for sequences of up to `length` tokens. `config`: a `ModelConfig`, or
    transformers' config object.

    None: it runs through transformers, as its family or an option of it is not written down, or as its code is its
    own (`trust_remote_code`). Raises `MissingField` for one without a default here.
    """
    inside = MULTIMODAL.get(config.model_type)
    own = config if inside is None else config.get_text_config()
    if own.model_type not in NATIVE or not (
        isinstance(config, ModelConfig) or type(config).__module__.startswith("transformers.")
    ):
        logger.warning("family %r is not written down here: it runs through transformers, slower", own.model_type)
        return None
    try:
        made = decoder_config(own, length)
    except UnknownLayers:
        raise
    except UnsupportedModel as error:
        logger.warning("%s: it runs through transformers, slower", error)
        return None
    return made if inside is None else inside_of(made, inside, config)
