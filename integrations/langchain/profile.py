"""What a model can do, as far as it is known without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import ModelProfile


def model_profile(name: str, config: Mapping[str, Any], context: int | None) -> ModelProfile:
    """`config` are the engine's settings and `context` is the loaded model's, if it is loaded.

    Every model is taken to call tools: whether its template writes calls is known once it is loaded, and a request
    with tools says so where it does not. Whether it reasons is left out for the same reason.
    """
    grammars = config.get("grammar_backend") != "none"
    profile = ModelProfile(
        name=name,
        open_weights=True,
        text_inputs=True,
        text_outputs=True,
        image_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        pdf_inputs=False,
        image_tool_message=False,
        pdf_tool_message=False,
        tool_calling=grammars,
        tool_choice=grammars,
        tool_call_streaming=grammars,
        structured_output=grammars,
        temperature=True,
    )
    limit = context or config.get("max_model_len")
    if isinstance(limit, int):
        profile["max_input_tokens"] = limit
    return profile
