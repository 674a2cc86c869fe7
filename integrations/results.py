"""Conversions of the engine's results for both frameworks: usage, logprobs, and deadlines that passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncengine import Chunk, Completion, LogprobEntry, Usage
from asyncengine.errors import RequestTimeout


def openai_usage(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` object."""
    details = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.accepted_prediction_tokens or usage.rejected_prediction_tokens:
        details["accepted_prediction_tokens"] = usage.accepted_prediction_tokens
        details["rejected_prediction_tokens"] = usage.rejected_prediction_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    }


def openai_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    """OpenAI's `logprobs` object from `LogprobEntry`s."""
    return {"content": [{**_entry(e), "top_logprobs": [_entry(alternative) for alternative in e.top]} for e in entries]}


def _entry(entry: LogprobEntry) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.bytes)}


def raise_if_timed_out(finish_reason: str | None, partial: str) -> None:
    """Frameworks know a deadline only as an error (their retries and fallbacks act on it), so it becomes one.

    Raises `RequestTimeout` with the text that was there.
    """
    if finish_reason == "timeout":
        raise RequestTimeout("the request's deadline passed before its answer was complete", partial)


def checked(completion: Completion) -> Completion:
    """The completion, if no sample of it ran into a deadline."""
    for sample in completion.samples:
        raise_if_timed_out(sample.finish_reason, sample.text)
    return completion


def worth_sending(chunk: Chunk) -> bool:
    """A token inside a multi-byte character has no text yet: nothing to tell anybody."""
    return bool(chunk.text or chunk.tool_calls or chunk.reasoning or chunk.logprobs or chunk.finish_reason)
