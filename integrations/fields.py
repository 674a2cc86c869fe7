"""Fields of the classes that generate, and how they become one request's sampling parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self, cast

from pydantic import AliasChoices, Field, model_validator

from asyncengine import ChatKeywords, RequestKeywords, SamplingParams
from asyncengine.errors import InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.integrations.engine_source import SETTINGS, EngineChoice

TEMPLATE_VARIABLES = ("enable_thinking", "reasoning_effort")
"""Variables of chat templates that are fields here and keywords of a call, besides `template_kwargs`."""
CALL_FIELDS = (
    "temperature", "max_tokens", "min_tokens", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "n",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "grammar",
    *TEMPLATE_VARIABLES, "max_thinking_tokens", "adapter", "timeout", "priority", "session",
)  # fmt: skip
"""Fields of `EngineFields` that are keywords of each call."""
CALL_KEYWORDS = (*SamplingParams.__dataclass_fields__, *ChatKeywords.__annotations__)
EMPTY_MEANS_NONE = ("tools", "template_kwargs")
"""Keywords that frameworks pass empty for none."""
OTHER_NAMES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}
"""Names of fields in OpenAI's and Hugging Face's classes of the frameworks."""


def as_named_here(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords, with other libraries' names of a field replaced by ours.

    Raises `InvalidParameter` for a field that is given under two names with two values.
    """
    renamed: dict[str, Any] = {}
    for name, value in keywords.items():
        ours = OTHER_NAMES.get(name, name)
        if ours in renamed and renamed[ours] != value:
            raise InvalidParameter(name, f"contradicts another value of {ours}", value)
        renamed[ours] = value
    return renamed


@dataclass(frozen=True, slots=True)
class Call:
    """One request without its prompt: the same for sync and async, streaming and whole calls."""

    params: SamplingParams
    keywords: ChatKeywords
    """Keywords for the engine's `chat` and `stream_chat`, sync or async."""
    model_name: str
    """The name that the answer reports: the adapter's where one is used."""

    def stream(self, engine: Any, prompt: str | list[dict[str, Any]]) -> Any:
        """The engine's stream of the answer to a text or to messages: a sync engine's, or an async one's."""
        if isinstance(prompt, str):
            return engine.stream(prompt, self.params, **self.for_text())
        return engine.stream_chat(prompt, self.params, **self.keywords)

    def for_text(self) -> RequestKeywords:
        """Keywords for `generate` and `stream`. Raises `InvalidParameter` for the first keyword that only a chat may
        have."""
        for name, value in self.keywords.items():
            if name not in RequestKeywords.__annotations__:
                raise InvalidParameter(name, "is for chats: text completion uses no chat template", value)
        return cast(RequestKeywords, self.keywords)


ENGINE_SETTINGS = {name: f"is a setting of the engine: pass {name}=... to the model object" for name in SETTINGS}


class EngineFields(EngineChoice):
    """The engine and its sampling defaults; values are checked as `SamplingParams` and `EngineConfig` check
    them. Constructing loads nothing."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        name: f"is a keyword of a call: for all of them, pass model_kwargs={{{name!r}: ...}}"
        for name in CALL_KEYWORDS
        if name not in CALL_FIELDS
    }

    model: str = Field(
        default_factory=lambda: os.environ.get("ASYNCENGINE_MODEL", ""),
        validation_alias=AliasChoices("model", "model_name"),
    )
    """Path, hub id, or "demo" (the bundled model). Defaults to the environment variable ASYNCENGINE_MODEL."""
    adapter: str | None = None
    """Name of the LoRA adapter that answers; None: the base model alone. Each call may choose another."""

    temperature: float | None = None
    max_tokens: int | None = Field(
        default=None, validation_alias=AliasChoices("max_tokens", "max_completion_tokens", "max_new_tokens")
    )
    min_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = Field(default=None, validation_alias=AliasChoices("stop", "stop_sequences"))
    stop_token_ids: list[int] | None = None
    n: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    grammar: Any = None
    """The grammar of every answer: a `Grammar` or anything `Grammar.of` takes (a pydantic class, a JSON schema)."""
    timeout: float | None = None
    """Seconds from submit to the end of the answer; then the call raises with the partial text."""
    priority: int | None = None
    """Lower goes first, where the engine's policy is "priority"."""
    session: str | None = None
    """Name of the session (`AsyncEngine.session`) that every request belongs to."""
    enable_thinking: bool | None = None
    """Variable of the chat template, where it reads one of that name (Qwen3's does); else it does nothing."""
    reasoning_effort: str | None = None
    """The same (gpt-oss's template reads "low", "medium" or "high")."""
    max_thinking_tokens: int | None = None
    """Most tokens of a chat's thoughts: then they are ended, and the answer follows. 0: no thoughts."""
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict, validation_alias=AliasChoices("model_kwargs", "additional_kwargs")
    )
    """Further keywords of every request: any `SamplingParams` field, `cache_salt`, those of `ChatKeywords`."""

    @model_validator(mode="after")
    def _check_defaults(self) -> Self:
        self._call(None, {})
        return self

    def _defaults(self) -> dict[str, Any]:
        """Settings of this object, by the names of per-call keywords."""
        mine = {name: value for name in CALL_FIELDS if (value := getattr(self, name)) is not None}
        return {**mine, **as_named_here(self.model_kwargs)}

    def _adapter(self, kwargs: Mapping[str, Any]) -> Any:
        """The adapter that a call with these keywords names; None: the base model alone.

        `model=` in a call names an adapter, as vLLM's server has it, or the base model without one; it wins over
        `adapter=`. LangChain's cache keys rely on that order.
        """
        name = kwargs.get("model")
        if name is None:
            name = {**self._defaults(), **kwargs}.get("adapter")
        return None if name == self._engines().name else name

    def _name(self, kwargs: Mapping[str, Any] = MappingProxyType({})) -> str:
        """The name that the answer to a call with these keywords reports: the adapter's, else the model's."""
        return str(self._adapter(kwargs) or self._engines().name)

    def _call(self, stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> Call:
        """Merge this object's defaults with one call's keywords; None means "as the engine has it".

        Raises `InvalidParameter` naming the field for anything unknown or malformed.
        """
        kwargs = as_named_here(kwargs)
        model, adapter = kwargs.get("model"), kwargs.get("adapter")
        if model is not None and adapter is not None and model != adapter:
            raise InvalidParameter("adapter", f"contradicts model={model!r}: a call names one of the two", adapter)
        values = _over(self._defaults(), {name: value for name, value in kwargs.items() if name != "model"})
        values["adapter"] = self._adapter(kwargs)
        if stop is not None:
            values["stop"] = stop
        values = {name: value for name, value in values.items() if value is not None}
        keywords: ChatKeywords = {}
        for name in ChatKeywords.__annotations__:
            value = values.pop(name, None)
            if value is None or (name in EMPTY_MEANS_NONE and not value):
                continue
            keywords[name] = value  # type: ignore[literal-required]
        if "grammar" in values:
            values["grammar"] = Grammar.of(values["grammar"])
        for name in values:
            if name not in SamplingParams.__dataclass_fields__:
                raise InvalidParameter.unknown(name, CALL_KEYWORDS, ENGINE_SETTINGS)
        return Call(SamplingParams(**values), keywords, self._name(kwargs))


def _over(defaults: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's keywords over its model object's defaults. A template variable of the call replaces the default's, even
    if one is a keyword and the other in `template_kwargs`."""
    variables, ours = kwargs.get("template_kwargs"), defaults.get("template_kwargs")
    replaced = [name for name in TEMPLATE_VARIABLES if isinstance(variables, Mapping) and name in variables]
    if isinstance(ours, Mapping):
        ours = {name: value for name, value in ours.items() if name not in TEMPLATE_VARIABLES or name not in kwargs}
    kept = {name: value for name, value in defaults.items() if name not in replaced}
    return {**kept, "template_kwargs": ours, **kwargs}
