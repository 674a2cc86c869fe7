"""A request of any dialect, in the engine's own words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(slots=True)
class Turn:
    """A canonical request: a chat's `messages` or a text's `prompt`, and how it is to be answered."""

    model: str | None = None
    """Name of a model, an adapter or an alias; None: the only model there is."""
    messages: list[Message] | None = None
    """Messages as `AsyncEngine.stream_chat` takes them; None for a text's completion."""
    prompt: str | list[int] | None = None
    """Text or token ids to go on with, where there are no messages."""
    params: dict[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams`."""
    chat: dict[str, Any] = field(default_factory=dict)
    """Fields of `ChatRequest` besides the messages: tools, tool_choice, response_format, ..."""
    wishes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields of the request that are hints, with the template variables that each stands for. They are set where the
    model's chat template reads them; a hint of which it reads nothing is told as ignored."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `RequestOptions`."""
    stream: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """Facts that only the dialect's own writer reads, such as whether usage was asked for."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The name tag of an answer."""

    id: str
    """Digits for an id, to which each dialect adds its own prefix."""
    model: str
    """Name under which the model was asked for, or its own where the request named none."""
    created: int
    """Seconds since 1970."""
