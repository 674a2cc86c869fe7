"""Fields that every adapter class has, and how they become one request's sampling parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypedDict

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from asyncengine import SamplingParams
from asyncengine.errors import InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.integrations.engine_source import AnyEngine, EngineSource

SAMPLING_FIELDS = (
    "temperature", "max_tokens", "min_tokens", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "n",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "grammar",
)  # fmt: skip
"""Fields of `EngineFields` that are `SamplingParams` fields of the same name."""


class EngineKeywords(TypedDict, total=False):
    """Keywords of the engine's calls that are neither the prompt nor sampling parameters."""

    adapter: str
    timeout: float
    priority: int
    cache_salt: str
    request_id: str


class TextArguments(EngineKeywords):
    """Arguments of the engine's `generate` and `stream`, sync or async, but for the prompt."""

    params: SamplingParams


class ChatExtras(TypedDict, total=False):
    """What only a chat may ask for; see `asyncengine.requests.ChatRequest`."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    response_format: Any
    template_kwargs: Mapping[str, Any]


class ChatArguments(TextArguments, ChatExtras):
    """Arguments of the engine's `chat` and `stream_chat`, sync or async, but for the messages."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request but for its prompt: the same for the sync and async, the streaming and whole calls."""

    params: SamplingParams
    keywords: EngineKeywords
    extras: ChatExtras
    model_name: str
    """What the answer reports: the adapter's name where one is used."""

    def for_text(self) -> TextArguments:
        """Raises `InvalidParameter` for the first keyword that only a chat may have."""
        for name, value in self.extras.items():
            raise InvalidParameter(name, "is for chats: text completion uses no chat template", value)
        return TextArguments(params=self.params, **self.keywords)

    def for_chat(self) -> ChatArguments:
        return ChatArguments(params=self.params, **self.extras, **self.keywords)


class EngineFields(BaseModel):
    """Which engine, and with which sampling defaults. Constructing loads nothing.

    The adapter classes refuse unknown fields (the frameworks' own bases would ignore them); values are checked as
    `SamplingParams` and `EngineConfig` check them. Both errors come as pydantic's `ValidationError` (a `ValueError`)
    naming the field.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str = Field(
        default_factory=lambda: os.environ.get("ASYNCENGINE_MODEL", ""),
        validation_alias=AliasChoices("model", "model_name"),
    )
    """Path, hub id, or "demo" (the bundled model). Defaults to the environment variable ASYNCENGINE_MODEL."""
    adapter: str | None = None
    """Name of a loaded LoRA adapter."""
    engine: AnyEngine | None = Field(default=None, exclude=True, repr=False)
    """An engine that the caller owns; None: the process-wide shared engine of (model, engine_config)."""
    engine_config: dict[str, Any] = Field(default_factory=dict)
    """`EngineConfig` fields of the shared engine."""

    temperature: float | None = None
    max_tokens: int | None = None
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
    """What every answer must match: a `Grammar` or anything `Grammar.of` takes (a pydantic class, a JSON schema)."""
    timeout: float | None = None
    """Seconds from submit to the end of the answer; then the call raises with the partial text."""
    priority: int | None = None
    """Lower goes first, where the engine's policy is "priority"."""
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict, validation_alias=AliasChoices("model_kwargs", "additional_kwargs")
    )
    """Further keywords of every request: any `SamplingParams` field, `cache_salt`, those of `ChatExtras`."""

    _source: EngineSource | None = PrivateAttr(default=None)

    @field_validator("model", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @model_validator(mode="after")
    def _check_engine_fields(self) -> Self:
        if self.engine is not None and self.engine_config:
            raise InvalidParameter("engine_config", "must be empty where engine is given: that engine is configured")
        if self.engine is None and not self.model:
            raise InvalidParameter("model", 'must be given (or set ASYNCENGINE_MODEL): a path, a hub id or "demo"')
        self._engines()
        self._call(None, {})
        return self

    def _engines(self) -> EngineSource:
        """The source of the engine, made anew only where a field it depends on was assigned since."""
        source = self._source
        if source is None or not source.serves(self.model, self.engine_config, self.engine):
            source = self._source = EngineSource(self.model, self.engine_config, self.engine)
        return source

    def _defaults(self) -> dict[str, Any]:
        """What was set on this object, by the names of per-call keywords."""
        names = (*SAMPLING_FIELDS, "adapter", "timeout", "priority")
        mine = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**mine, **self.model_kwargs}

    def _name(self) -> str:
        """What answers report, unless the call says otherwise: the adapter's name, else the model's."""
        return self.adapter or self._engines().name

    def _call(self, stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> Call:
        """Merge this object's defaults with one call's keywords; None means "as the engine has it".

        `model=` names a LoRA adapter, as vLLM's server has it, or the base model without one. Raises
        `InvalidParameter` naming the field for anything unknown or malformed.
        """
        given = {**self._defaults(), **kwargs}
        if stop is not None:
            given["stop"] = stop
        given = {name: value for name, value in given.items() if value is not None}
        base = self._engines().name
        model = given.pop("model", None)
        if model is not None:
            given["adapter"] = model
        if given.get("adapter") == base:
            del given["adapter"]
        keywords: EngineKeywords = {}
        for name in EngineKeywords.__annotations__:
            if name in given:
                keywords[name] = given.pop(name)  # type: ignore[literal-required]
        extras = _chat_extras(given)
        if "grammar" in given:
            given["grammar"] = Grammar.of(given["grammar"])
        params = SamplingParams.from_dict(given)
        return Call(params, keywords, extras, keywords.get("adapter", base))

    def __getstate__(self) -> dict[Any, Any]:
        if self.engine is not None:
            raise TypeError("a model object with an explicit engine cannot be pickled; pass model= instead of engine=")
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine  # an engine is never copied: both objects use it
        return super().__deepcopy__(memo)


def _chat_extras(given: dict[str, Any]) -> ChatExtras:
    """Take them out of `given`. Frameworks pass empty `tools` and `template_kwargs` where there are none."""
    extras: ChatExtras = {}
    for name in ChatExtras.__annotations__:
        value = given.pop(name, None)
        if value is None or (name in ("tools", "template_kwargs") and not value):
            continue
        extras[name] = value  # type: ignore[literal-required]
    return extras
