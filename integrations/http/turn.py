"""A request of any dialect, in the names of the engine's API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from asyncengine.grammar import Grammar
from asyncengine.outputs import Timings, Usage
from asyncengine.step import TokenLogprob

Message = dict[str, Any]
ALL = 1 << 62
"""A number of log-probabilities that stands for the whole vocabulary, which requests call -1."""


@dataclass(slots=True)
class Turn:
    """A canonical request: a chat's `messages` or texts' `prompts`, and how it is to be answered."""

    model: str | None = None
    """Name of a model, an adapter or an alias; None: the only model there is."""
    messages: list[Message] | None = None
    """Messages as `AsyncEngine.stream_chat` takes them; None for a text's completion."""
    prompts: list[str | list[int]] = field(default_factory=list)
    """Texts or token ids to go on with, where there are no messages."""
    special_tokens: bool = True
    """Put the tokenizer's own tokens around these texts."""
    prompt_limit: int = 0
    """Tokens to which the prompts are cut; 0: not at all, -1: to as many as leave room for the answer."""
    cut_side: str = "left"
    """The side that is cut."""
    length_penalty: float | None = None
    """Length penalty of a beam search, which this asks for; None: outputs are sampled."""
    params: dict[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams`."""
    chat: dict[str, Any] = field(default_factory=dict)
    """Fields of `ChatRequest` besides the messages: tools, tool_choice, response_format, ..."""
    wishes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields of the request that are hints, with the template variables that each stands for. They are set where the
    model's chat template reads them; a hint of which it reads nothing is told as ignored."""
    budget_field: str = ""
    """The field that bounds the reasoning; models that do not reason ignore it. `wishes` has its hint by this name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `RequestOptions`."""
    grammar: Callable[[], Grammar] | None = None
    """Makes the grammar that the answer must match, on a thread: that of a long text takes a while."""
    stream: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """Facts that only the dialect's own writer reads, such as whether usage was asked for."""

    @classmethod
    def of(cls, values: Mapping[str, dict[str, Any]]) -> Self:
        """The turn of a request's values by group (`http.fields`), of which "turn" holds fields of this class."""
        groups: dict[str, Any] = {name: values.get(name, {}) for name in ("params", "options", "chat", "extra")}
        return cls(**groups, **values.get("turn", {}))


@dataclass(frozen=True, slots=True)
class Answered:
    """Id, model and time of an answer, and functions that read what is known of its request so far."""

    id: str
    """Digits for an id, to which each dialect adds its own prefix."""
    model: str
    """Name under which the model was asked for, or its own where the request named none."""
    created: int
    """Seconds since 1970."""
    prompts: Callable[[], Sequence[Sequence[int]]] = tuple
    """Token ids of the prompts, as soon as the request is submitted."""
    token_texts: Callable[[Iterable[int]], list[str]] = lambda ids: [""] * len(list(ids))
    """The text of each of some tokens."""
    text_of: Callable[[Sequence[int]], str] = lambda _: ""
    """The text of some tokens together."""
    timings: Callable[[], Timings | None] = lambda: None
    """Times of the request so far."""
    usage: Callable[[], Usage | None] = lambda: None
    """Token counts of the request so far."""
    prompt_logprobs: Callable[[], Sequence[Sequence[TokenLogprob | None]]] = tuple
    """Scores of the prompts, those of each from its first chunk on."""
