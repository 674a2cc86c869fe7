"""What callers receive: stream chunks, completions, usage, timings. Plain frozen data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from asyncengine.batch import TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls", "abort", "timeout", "error", "engine_dead"]
"""The closed set. Every stream ends exactly once with one of these; only its last chunk carries it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request (all its samples together)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. `None` where the request ended before that point."""

    queued: float | None
    """Submit to first step."""
    first_token: float | None
    """Submit to first token."""
    total: float
    """Submit to end."""


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One position's log-probabilities with the tokens' texts and bytes (OpenAI's `logprobs.content` shape)."""

    token_id: int
    token: str
    logprob: float
    bytes: bytes
    top: tuple[LogprobEntry, ...] = ()


class Chunk:
    """One delivery to one stream: everything new since the last one (a slow reader gets merged chunks).

    `index` is the sample (0 unless `n` > 1); `finish_reason` is None on all but a sample's last chunk; `usage` is set
    on the last chunk of the stream; `error` says what went wrong where the reason is "error" or "engine_dead".
    """

    __slots__ = ("error", "finish_reason", "index", "logprobs", "text", "token_ids", "usage")

    def __init__(
        self,
        text: str,
        token_ids: list[int],
        finish_reason: FinishReason | None = None,
        index: int = 0,
        logprobs: list[LogprobEntry] | None = None,
        error: str | None = None,
        usage: Usage | None = None,
    ) -> None:
        self.text = text
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        self.index = index
        self.logprobs = logprobs
        self.error = error
        self.usage = usage

    def __repr__(self) -> str:
        return f"Chunk({self.text!r}, {self.token_ids}, {self.finish_reason!r}, index={self.index})"


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished sample of a request with n > 1."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[LogprobEntry] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. `text`, `token_ids`, `finish_reason`, `logprobs` are those of sample 0."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    request_id: str
    logprobs: list[LogprobEntry] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Per prompt position; None at the first."""
    samples: list[Sample] = field(default_factory=list)
    """All samples, `n` of them, sample 0 first."""
