"""Abilities of a model, as far as they are known without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import ModelProfile

from asyncengine import ModelInfo


def model_profile(name: str, config: Mapping[str, Any], model: ModelInfo | None) -> ModelProfile:
    """`config` are the engine's settings and `model` is the loaded one, if it is loaded.

    Whether a model calls tools is known once it is loaded, for its chat template says so, or from a `tool_format` in
    the settings; until then nothing is said about it. Whether it reasons and whether it
    reads pictures is said once it is loaded.
    """
    grammars = config.get("grammar_backend") != "none"
    profile = ModelProfile(
        name=name,
        open_weights=True,
        text_inputs=True,
        text_outputs=True,
        audio_inputs=False,
        video_inputs=False,
        pdf_inputs=False,
        pdf_tool_message=False,
        structured_output=grammars,
        temperature=True,
    )
    calls = _calls_tools(config, model) if grammars else False
    if calls is not None:
        profile["tool_calling"] = profile["tool_choice"] = profile["tool_call_streaming"] = calls
    if model is not None:
        profile["reasoning_output"] = model.reasons
        profile["image_inputs"] = profile["image_tool_message"] = model.no_images is None
    limit = config.get("max_model_len") if model is None else model.max_model_len
    if isinstance(limit, int):
        profile["max_input_tokens"] = limit
    return profile


def _calls_tools(config: Mapping[str, Any], model: ModelInfo | None) -> bool | None:
    """None: not known yet."""
    if model is not None:
        return model.tool_format is not None
    return True if config.get("tool_format", "auto") != "auto" else None
