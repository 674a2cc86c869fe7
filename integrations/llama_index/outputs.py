"""The engine's results -> LlamaIndex's responses.

`delta` is what is new, `text` and `message` everything so far. `raw["usage"]` is where LlamaIndex's token counter
looks; it is there on whole answers and on a stream's last response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
)

from asyncengine import Chunk, Completion, LogprobEntry, Usage
from asyncengine.integrations.results import openai_usage, raise_if_timed_out


class Answer:
    """One answer growing: whole at once from a completion, or chunk by chunk."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.text = ""
        self.raw: dict[str, Any] = {"model": model_name}
        self.logprobs: list[list[LogProb]] | None = None
        self.delta: str | None = None

    def whole(self, completion: Completion) -> Answer:
        """Raises `RequestTimeout` where the answer is only a part."""
        self.text = completion.text
        return self._take(completion.finish_reason, completion.usage, completion.logprobs)

    def grow(self, chunk: Chunk) -> Answer:
        """Take in one chunk. The caller asks `worth_sending` first; deadlines raise in `ended`."""
        self.delta = chunk.text
        self.text += chunk.text
        return self._take(chunk.finish_reason, chunk.usage, chunk.logprobs)

    def _take(self, finish_reason: str | None, usage: Usage | None, logprobs: Sequence[LogprobEntry] | None) -> Answer:
        if finish_reason is not None:
            self.raw["finish_reason"] = finish_reason
        if usage is not None:
            self.raw["usage"] = openai_usage(usage)
        if logprobs:
            self.logprobs = (self.logprobs or []) + [_position(entry) for entry in logprobs]
        return self

    def checked(self) -> Answer:
        raise_if_timed_out(self.raw.get("finish_reason"), self.text)
        return self

    def chat(self) -> ChatResponse:
        message = ChatMessage(role=MessageRole.ASSISTANT, content=self.text)
        return ChatResponse(message=message, delta=self.delta, raw=dict(self.raw), logprobs=self.logprobs)

    def complete(self) -> CompletionResponse:
        return CompletionResponse(text=self.text, delta=self.delta, raw=dict(self.raw), logprobs=self.logprobs)


def _position(entry: LogprobEntry) -> list[LogProb]:
    """The chosen token first, then the likeliest alternatives."""
    return [LogProb(token=e.token, logprob=e.logprob, bytes=list(e.bytes)) for e in (entry, *entry.top)]
