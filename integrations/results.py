"""Rules about the engine's results that both frameworks share: deadlines that passed, and chunks without news."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from asyncengine import Chunk, Completion, SyncTokenStream, TokenStream
from asyncengine.errors import RequestTimeout


def raise_if_timed_out(finish_reason: str | None, partial: str) -> None:
    """Raises `RequestTimeout` with the partial text if a deadline passed: frameworks' retries and fallbacks act on
    errors alone."""
    if finish_reason == "timeout":
        raise RequestTimeout("the request's deadline passed before its answer was complete", partial)


def checked(completion: Completion) -> Completion:
    """The completion, if no sample of it ran into a deadline."""
    for sample in completion.samples:
        raise_if_timed_out(sample.finish_reason, sample.text)
    return completion


def why_not_read(info: Mapping[str, Any]) -> str | None:
    """The reason why a structured answer with this "finish_reason" and "steered_from" cannot be used, or None."""
    if info.get("finish_reason") != "length" or info.get("steered_from") is None:
        return None
    return "the budget (max_tokens or the context) ended in the answer, and the engine closed it: see on_budget='offer'"


def each_chunk(stream: SyncTokenStream) -> Iterator[Chunk]:
    """The chunks that have news. Raises `RequestTimeout` behind the last one if a deadline passed."""
    text = ""
    with stream:
        for chunk in stream:
            text += chunk.text
            if worth_sending(chunk):
                yield chunk
            raise_if_timed_out(chunk.finish_reason, text)


async def each_chunk_async(stream: TokenStream) -> AsyncGenerator[Chunk, None]:
    """The same of an async stream."""
    text = ""
    try:
        async for chunk in stream:
            text += chunk.text
            if worth_sending(chunk):
                yield chunk
            raise_if_timed_out(chunk.finish_reason, text)
    finally:
        stream.abort()  # never awaits: inside a cancelled anyio scope an await would raise again


def worth_sending(chunk: Chunk) -> bool:
    """Whether a chunk has news: a token inside a multi-byte character has no text yet."""
    return bool(chunk.text or chunk.tool_calls or chunk.reasoning or chunk.logprobs or chunk.finish_reason)
