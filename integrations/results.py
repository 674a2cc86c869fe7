"""Rules about the engine's results that both frameworks share: deadlines that passed, and chunks without news."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from asyncengine import Chunk, Completion, SyncTokenStream, TokenStream
from asyncengine.errors import RequestTimeout


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


def why_not_own(about: Mapping[str, Any]) -> str | None:
    """Why a structured answer with these "finish_reason" and "steered_from" is not to be read; None: it is."""
    if about.get("finish_reason") != "length" or about.get("steered_from") is None:
        return None
    return "the budget (max_tokens or the context) ended in the answer, and the engine closed it: see on_budget='offer'"


def each_chunk(stream: SyncTokenStream) -> Iterator[Chunk]:
    """The chunks that tell something. Raises `RequestTimeout` behind the last one of a deadline that passed."""
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
    """A token inside a multi-byte character has no text yet: nothing to tell anybody."""
    return bool(chunk.text or chunk.tool_calls or chunk.reasoning or chunk.logprobs or chunk.finish_reason)
