"""LlamaIndex messages -> OpenAI-shaped dicts, and the engine's results -> LlamaIndex's responses.

Text and pictures go in; other content is refused by name and position. A response's `delta` is its new text, `text` and
`message` have everything so far. LlamaIndex's token counter reads `raw["usage"]`, which whole answers and a stream's
last response have. Tool calls are given twice, as `ToolCallBlock`s and in OpenAI's shape in
`additional_kwargs["tool_calls"]`: LlamaIndex's agents read the blocks, its structured streams the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_index.core.base.llms import types
from pydantic_core import from_json

from asyncengine import Chunk, Completion, LogprobEntry
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.dialects import openai_shape
from asyncengine.integrations.results import raise_if_timed_out

_ROLES = {
    types.MessageRole.DEVELOPER: "system", types.MessageRole.CHATBOT: "assistant", types.MessageRole.MODEL: "assistant",
    types.MessageRole.FUNCTION: "tool",
}  # fmt: skip


def check_messages(messages: object) -> None:
    """Raises `InvalidParameter` for anything but a list of LlamaIndex's messages, such as OpenAI's dicts."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", "must be a list of LlamaIndex's ChatMessage", messages)
    for position, item in enumerate(messages):
        if not isinstance(item, types.ChatMessage):
            limit = "must be LlamaIndex's ChatMessage(role=..., content=...)"
            raise InvalidParameter(f"messages[{position}]", limit, item)


def to_openai(messages: Sequence[types.ChatMessage]) -> list[openai_shape.Message]:
    """The messages in OpenAI's shape. Raises `InvalidParameter` naming the message for content that cannot be used."""
    return [_convert(item, f"messages[{position}]") for position, item in enumerate(messages)]


def _convert(item: types.ChatMessage, where: str) -> openai_shape.Message:
    role = _ROLES.get(item.role, item.role.value)
    content = _content(item.blocks, f"{where}.content", images=role != "assistant")
    name = item.additional_kwargs.get("name")
    if role == "assistant":
        thoughts = [block.content for block in item.blocks if isinstance(block, types.ThinkingBlock) and block.content]
        return openai_shape.assistant_message(content, tool_calls(item), name, "\n".join(thoughts))
    if role == "tool":
        return openai_shape.tool_message(content, item.additional_kwargs.get("tool_call_id"), name)
    return openai_shape.message(role, content, name)


def _content(blocks: Sequence[Any], where: str, *, images: bool) -> openai_shape.Content:
    """The texts joined by newlines, or all parts in order where some are pictures."""
    parts = _parts(blocks, where, images=images)
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _parts(blocks: Sequence[Any], where: str, *, images: bool) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, types.TextBlock):
            parts.append(openai_shape.text_part(block.text))
        elif isinstance(block, types.CitableBlock):
            parts += _parts(block.content, where, images=images)
        elif isinstance(block, types.CitationBlock):
            parts += _parts([block.cited_content], where, images=images)
        elif isinstance(block, types.ImageBlock) and images:
            parts.append({"type": "image", "image": _image(block, where)})
        # Calls are read by `tool_calls`, thoughts by `_convert`; cache points need no marking here.
        elif not isinstance(block, (types.ToolCallBlock, types.ThinkingBlock, types.CachePoint)):
            raise openai_shape.refuse_block(where, getattr(block, "block_type", type(block).__name__))
    return parts


def _image(block: types.ImageBlock, where: str) -> str | bytes | Path:
    """The picture, still encoded: the engine checks its size before it decodes it."""
    if isinstance(block.image, bytes):  # the block holds them in base64, whatever it was given
        return f"data:;base64,{block.image.decode('latin-1')}"
    if block.image is not None:
        block.image.seek(0)
        return block.image.read()
    if block.path is not None:
        return Path(block.path)
    if block.url is None:
        raise InvalidParameter(where, "has an ImageBlock without an image, a path or a url")
    return str(block.url)


def tool_calls(item: types.ChatMessage) -> list[openai_shape.Message]:
    """The calls of an assistant's message, in OpenAI's shape.

    Read from the blocks, else from `additional_kwargs["tool_calls"]` (OpenAI's dicts or objects), which repeat them.
    """
    blocks = [block for block in item.blocks if isinstance(block, types.ToolCallBlock)]
    if blocks:
        return [openai_shape.tool_call(block.tool_call_id, block.tool_name, block.tool_kwargs) for block in blocks]
    calls = []
    for call in item.additional_kwargs.get("tool_calls") or ():
        entry: Mapping[str, Any] = call if isinstance(call, Mapping) else call.model_dump()
        function = entry.get("function", entry)
        calls.append(openai_shape.tool_call(entry.get("id"), function["name"], function.get("arguments") or {}))
    return calls


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
            self.raw["usage"] = openai_shape.openai_usage(news.usage)
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
        """Move calls that were cut off to `raw["broken_calls"]`: an agent would run them with partial arguments."""
        for call in self.calls:
            call.kwargs = _object(call.arguments)
        broken = [call for call in self.calls if call.kwargs is None]
        if broken:
            self.raw["broken_calls"] = _shaped(broken)
        self.calls = [call for call in self.calls if call.kwargs is not None]

    def checked(self) -> Answer:
        """The answer itself. Raises `RequestTimeout` if its deadline cut it off."""
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

    def _additional_kwargs(self) -> dict[str, list[openai_shape.Message]]:
        return {"tool_calls": _shaped(self.calls)} if self.calls else {}


def _shaped(calls: Sequence[GrowingCall]) -> list[openai_shape.Message]:
    return [openai_shape.tool_call(call.id, call.name, call.arguments) for call in calls]


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def partial_object(text: str) -> dict[str, Any]:
    """The written part of a JSON object whose text is cut off anywhere, even within a string; else an empty dict.

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
