"""Options of a request besides its prompt and sampling parameters: keywords, as callers write them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypedDict, TypeGuard

from asyncengine.checks import MAX_INT64, MIN_INT64, as_integer, as_seconds, as_switch, as_text, check_known
from asyncengine.errors import InvalidParameter
from asyncengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

MAX_SESSION_NAME = 512
Prompt = str | Sequence[int]
WeightSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
"""A model as `from_pretrained` takes it, or tensors by the names of its checkpoints."""
ToolSpecs = Sequence[Mapping[str, Any]]
ChatMessages = Sequence[Mapping[str, Any]]


class VectorKeywords(TypedDict, total=False):
    """Keywords of `embed`, `rerank` and `classify`; see `RequestOptions`."""

    adapter: str | None
    request_id: str | None
    priority: int
    timeout: float | None
    cache_salt: str | None
    tenant: str | None


class RequestKeywords(VectorKeywords, total=False):
    """Keywords of `generate` and `stream`; see `RequestOptions`."""

    prediction: Prompt | Mapping[str, Any] | None
    speculation: bool | Literal["auto", "off"] | None
    clip_max_tokens: bool
    session: str | None


class ChatKeywords(RequestKeywords, total=False):
    """Keywords of `chat` and `stream_chat`; see `RequestOptions` and `ChatRequest`."""

    tools: ToolSpecs | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    response_format: Any
    template_kwargs: Mapping[str, Any] | None
    enable_thinking: bool | None
    reasoning_effort: str | None
    max_thinking_tokens: int | None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options that any request may carry. One more option is a field here, a keyword above and, if need be, a check
    below."""

    adapter: str | None = None
    """Name of the LoRA adapter that answers; None: the model itself."""
    request_id: str | None = None
    """A label of the caller's; need not be unique. None: a fresh one."""
    priority: int = 0
    """Lower is more important (policy "priority")."""
    timeout: float | None = None
    """Seconds from submit to end; then the request ends with reason "timeout" and what it has."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with those of the same salt."""
    tenant: str | None = None
    """On whose behalf it is asked (policy "weighted-fair")."""
    prediction: Prompt | Mapping[str, Any] | None = None
    """The output that is expected, as text, token ids or {"type": "content", "content": ...}: what of it comes true is
    computed many tokens at a time. It changes nothing but time; what of it no answer could reach is left out."""
    speculation: bool | Literal["auto", "off"] | None = None
    """False or "off": nothing is drafted for this request. None, True or "auto": as the engine's `speculation` says."""
    clip_max_tokens: bool = False
    """A `max_tokens` beyond the end of the context means up to there. False: it is refused."""
    session: str | None = None
    """Name of the session (`AsyncEngine.session`) that it belongs to, which is opened if there is none."""

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """Raises `InvalidParameter` for an unknown keyword, with the nearest known one."""
        check_known(keywords, [field.name for field in fields(cls)], _sampling_fields())
        return cls(**keywords)

    @classmethod
    def of_vectors(cls, keywords: Mapping[str, Any]) -> Self:
        """The options of a call with `VectorKeywords`, checked. Raises as `of`."""
        check_known(keywords, list(VectorKeywords.__annotations__))
        return cls(**keywords).checked() if keywords else cls()

    def checked(self) -> Self:
        """The options, their numbers in plain types. Raises `InvalidParameter` naming the field.

        Done when the request is prepared, not on construction: `stream(...)` raises where its consumer first awaits.
        Whether the adapter is known is for the engine to say.
        """
        for name in ("request_id", "cache_salt", "tenant", "session"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidParameter(name, "must be a str or None", value)
        if self.session is not None and len(self.session) > MAX_SESSION_NAME:
            raise InvalidParameter("session", f"must have at most {MAX_SESSION_NAME} characters", len(self.session))
        speculation: Any = self.speculation
        if isinstance(speculation, str):  # as the engine's setting is written
            speculation = {"auto": None, "off": False}.get(speculation, speculation)
        if speculation is not None and not isinstance(speculation, bool):
            raise InvalidParameter("speculation", 'must be True, False, None, "auto" or "off"', speculation)
        return replace(
            self, speculation=speculation, clip_max_tokens=as_switch("clip_max_tokens", self.clip_max_tokens),
            priority=as_integer("priority", self.priority, MIN_INT64, MAX_INT64),
            timeout=None if self.timeout is None else as_seconds("timeout", self.timeout),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat for the model to answer, in OpenAI's shapes."""

    messages: ChatMessages
    """Dicts with "role" and "content", as OpenAI writes them."""
    tools: ToolSpecs | None = None
    """Functions the model may call: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: str | Mapping[str, Any] | None = None
    """"auto" (the default with tools), "none", "required", a tool's name, {"type": "function", "function": ...}, or
    some of the tools: {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}."""
    parallel_tool_calls: bool = True
    """Whether one answer may hold several calls."""
    response_format: Any = None
    """The form of the answer: {"type": "json_object"}, {"type": "json_schema", "json_schema": ...}, or anything
    `Grammar.of` takes (a pydantic class, a JSON schema, a `Grammar`)."""
    template_kwargs: Mapping[str, Any] | None = None
    """Variables of the chat template."""
    enable_thinking: bool | None = None
    """One of these variables, which the templates of many reasoning models read. None: as the template has it."""
    reasoning_effort: str | None = None
    """Another one: "low", "medium" or "high" for gpt-oss."""
    max_thinking_tokens: int | None = None
    """Most tokens of thoughts: then their end mark is written, and the answer follows. 0: no thoughts."""

    @property
    def variables(self) -> dict[str, Any]:
        """All that the template is told. Raises `InvalidParameter` naming the one that is malformed or given twice."""
        variables = template_variables(self.template_kwargs)
        for name, check in (("enable_thinking", as_switch), ("reasoning_effort", as_text)):
            if (value := getattr(self, name)) is None:
                continue
            check(name, value)
            if name in variables:
                raise InvalidParameter(name, "is given twice: as a keyword and in template_kwargs", value)
            variables[name] = value
        return variables

    @property
    def size(self) -> int:
        """Rough number of characters, to decide where to tokenize it. Malformed chats fail later, by name."""
        size = 1024 * len(self.tools) if isinstance(self.tools, (list, tuple)) else 0
        size += rough_size(self.response_format)
        if isinstance(self.messages, (list, tuple)):
            for message in self.messages:
                size += rough_size(message.get("content", "")) + 64 if isinstance(message, Mapping) else 0
        return size


def _sampling_fields() -> dict[str, str]:
    """Advice for those who pass sampling parameters to a call, as other libraries have it: by name."""
    names = [field.name for field in fields(SamplingParams)]
    return {name: f"is a field of SamplingParams: pass params=SamplingParams({name}=...)" for name in names}


def rough_size(value: Any, most: int = 1 << 16) -> int:
    """Rough number of characters of a grammar, or of a text in parts, as the caller wrote it; counting ends beyond
    `most`, circles included."""
    text = getattr(value, "text", None)
    if isinstance(text, str):
        return len(text)
    size, stack = 0, [value]
    while stack and size <= most:
        item = stack.pop()
        size += len(item) if isinstance(item, str) else 4
        if isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            stack += item
    return size


def text_size(value: Any, most: int) -> int:
    """`rough_size` of a prompt or a prediction. Token ids are counted, not looked at: there may be thousands."""
    if value is None:
        return 0
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
        return 4 * len(value)
    return rough_size(value, most)


def template_variables(variables: object) -> dict[str, Any]:
    """Variables set by `template_kwargs`. Raises `InvalidParameter` for anything but a mapping of their names."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidParameter("template_kwargs", "must map names of template variables to values", variables)
    if len(variables) > _TEMPLATE_VARIABLES:
        raise InvalidParameter("template_kwargs", f"must have at most {_TEMPLATE_VARIABLES} variables", len(variables))
    for name, value in variables.items():
        if name in _TEMPLATE_SWITCHES:
            as_switch(name, value)
        if name in ("self", "messages", "tools", "images", "rewrite"):
            raise InvalidParameter("template_kwargs", f"cannot set {name!r}")
    return dict(variables)


_TEMPLATE_SWITCHES = ("add_generation_prompt", "continue_final_message")
_TEMPLATE_VARIABLES = 1000


def split_chat(messages: ChatMessages, keywords: Mapping[str, Any]) -> tuple[ChatRequest, RequestOptions]:
    """The two halves of a chat call's keywords. Raises `InvalidParameter` for an unknown one."""
    mine = [field.name for field in fields(ChatRequest)][1:]
    names = [*mine, *(field.name for field in fields(RequestOptions))]
    check_known(keywords, names, _sampling_fields())
    chat = {name: value for name, value in keywords.items() if name in mine}
    return ChatRequest(messages, **chat), RequestOptions.of({n: v for n, v in keywords.items() if n not in mine})


def is_chat(prefix: Prompt | ChatMessages) -> TypeGuard[ChatMessages]:
    """Whether it is messages, and not a text or token ids."""
    return isinstance(prefix, Sequence) and len(prefix) > 0 and isinstance(prefix[0], Mapping)
