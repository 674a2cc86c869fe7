"""The engine's results -> LlamaIndex's responses.

`delta` is what is new, `text` and `message` everything so far. `raw["usage"]` is where LlamaIndex's token counter
looks; it is there on whole answers and on a stream's last response. Tool calls are there twice, as `ToolCallBlock`s
and in OpenAI's shape in `additional_kwargs["tool_calls"]`: LlamaIndex's agents read the ones, its structured streams
look for the others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms import types
from pydantic_core import from_json

from asyncengine import Chunk, Completion, LogprobEntry
from asyncengine.integrations.http.dialects.openai_shape import Message, openai_usage, tool_call
from asyncengine.integrations.results import raise_if_timed_out


@dataclass(slots=True)
class GrowingCall:
    """One tool call, as far as it is written."""

    id: str
    name: str
    arguments: str = ""
    """JSON text, cut off anywhere while the answer grows."""
    kwargs: dict[str, Any] | None = field(default=None)
    """The arguments, once the answer has ended."""


class Answer:
    """One answer growing: whole at once from a completion, or chunk by chunk."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.text = ""
        self.reasoning = ""
        self.calls: list[GrowingCall] = []
        self.raw: dict[str, Any] = {"model": model_name}
        self.logprobs: list[list[types.LogProb]] | None = None
        self.delta: str | None = None
        self.thinking_delta = ""
        self._reasoning_tokens: int | None = None

    def whole(self, completion: Completion) -> Answer:
        self.text, self.reasoning = completion.text, completion.reasoning
        calls = (*completion.tool_calls, *completion.broken_calls)
        self.calls = [GrowingCall(call.id, call.name, call.arguments) for call in calls]
        return self._take(completion)

    def grow(self, chunk: Chunk) -> Answer:
        """Take in one chunk. Deadlines raise in `results.each_chunk`."""
        self.delta, self.thinking_delta = chunk.text, chunk.reasoning
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        for piece in chunk.tool_calls or ():
            if piece.index == len(self.calls):
                self.calls.append(GrowingCall(piece.id or "", piece.name or ""))
            self.calls[piece.index].arguments += piece.arguments
        return self._take(chunk)

    def _take(self, news: Completion | Chunk) -> Answer:
        if news.usage is not None:
            self.raw["usage"] = openai_usage(news.usage)
            self._reasoning_tokens = news.usage.reasoning_tokens
        if news.logprobs:
            self.logprobs = (self.logprobs or []) + [_position(entry) for entry in news.logprobs]
        if news.steered_from is not None:
            self.raw["steered_from"] = news.steered_from
        if news.finish_reason is not None:
            self.raw["finish_reason"] = news.finish_reason
            self._close_calls()
        return self

    def _close_calls(self) -> None:
        """A call that was cut off is none: an agent would run it with what it has. `raw["broken_calls"]` has it."""
        for call in self.calls:
            call.kwargs = _object(call.arguments)
        broken = [tool_call(call.id, call.name, call.arguments) for call in self.calls if call.kwargs is None]
        if broken:
            self.raw["broken_calls"] = broken
        self.calls = [call for call in self.calls if call.kwargs is not None]

    def checked(self) -> Answer:
        """Raises `RequestTimeout` where the answer is only a part."""
        raise_if_timed_out(self.raw.get("finish_reason"), self.text)
        return self

    def chat(self) -> types.ChatResponse:
        return types.ChatResponse(
            message=types.ChatMessage(
                role=types.MessageRole.ASSISTANT, blocks=self._blocks(), additional_kwargs=self._additional_kwargs()
            ),
            delta=self.delta,
            raw=dict(self.raw),
            logprobs=self.logprobs,
            additional_kwargs={"thinking_delta": self.thinking_delta} if self.thinking_delta else {},
        )

    def complete(self) -> types.CompletionResponse:
        return types.CompletionResponse(
            text=self.text, delta=self.delta, raw=dict(self.raw), logprobs=self.logprobs,
            additional_kwargs=self._additional_kwargs(),
        )  # fmt: skip

    def _blocks(self) -> list[types.ContentBlock]:
        """The thoughts, the text, the calls: in the order in which models write them."""
        blocks: list[types.ContentBlock] = []
        if self.reasoning:
            blocks.append(types.ThinkingBlock(content=self.reasoning, num_tokens=self._reasoning_tokens))
        if self.text or not self.calls:
            blocks.append(types.TextBlock(text=self.text))
        for call in self.calls:
            kwargs = call.arguments if call.kwargs is None else call.kwargs
            blocks.append(types.ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=kwargs))
        return blocks

    def _additional_kwargs(self) -> dict[str, list[Message]]:
        calls = [tool_call(call.id, call.name, call.arguments) for call in self.calls]
        return {"tool_calls": calls} if calls else {}


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def partial_object(text: str) -> dict[str, Any]:
    """The present part of a JSON object whose text is cut off anywhere, strings also in their middle; else nothing.

    LlamaIndex's own `parse_partial_json` shows a string only when it is finished, and unwritten values as None.
    """
    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _position(entry: LogprobEntry) -> list[types.LogProb]:
    """The chosen token first, then the likeliest alternatives."""
    return [types.LogProb(token=e.token, logprob=e.logprob, bytes=list(e.bytes)) for e in (entry, *entry.top)]
