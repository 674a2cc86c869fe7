"""LlamaIndex messages -> OpenAI-shaped dicts. Text only; anything else is refused by name and place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from asyncengine.errors import InvalidParameter
from asyncengine.serve.dialects.openai_shape import (
    Message,
    assistant_message,
    message,
    refuse_block,
    tool_call,
    tool_message,
)

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


def check_messages(messages: object) -> None:
    """Raises `InvalidParameter` for what is no list of messages, such as OpenAI's dicts."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", "must be a list of LlamaIndex's ChatMessage", messages)
    for position, item in enumerate(messages):
        if not isinstance(item, ChatMessage):
            limit = "must be LlamaIndex's ChatMessage(role=..., content=...)"
            raise InvalidParameter(f"messages[{position}]", limit, item)


def to_openai(messages: Sequence[ChatMessage]) -> list[Message]:
    """Raises `InvalidParameter` naming the message for content that is not text."""
    return [_convert(item, f"messages[{position}]") for position, item in enumerate(messages)]


def _convert(item: ChatMessage, where: str) -> Message:
    role = _ROLES.get(item.role, item.role.value)
    text = "\n".join(_texts(item.blocks, f"{where}.content"))
    name = item.additional_kwargs.get("name")
    if role == "assistant":
        thoughts = [block.content for block in item.blocks if isinstance(block, ThinkingBlock) and block.content]
        return assistant_message(text, tool_calls(item), name, "\n".join(thoughts))
    if role == "tool":
        return tool_message(text, item.additional_kwargs.get("tool_call_id"), name)
    return message(role, text, name)


def _texts(blocks: Sequence[Any], where: str) -> list[str]:
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, CitableBlock):
            texts += _texts(block.content, where)
        elif isinstance(block, CitationBlock):
            texts += _texts([block.cited_content], where)
        # Calls are read by `tool_calls`, thoughts by `_convert`; cache points need no marking here.
        elif not isinstance(block, (ToolCallBlock, ThinkingBlock, CachePoint)):
            raise refuse_block(where, getattr(block, "block_type", type(block).__name__))
    return texts


def tool_calls(item: ChatMessage) -> list[Message]:
    """The calls of an assistant's message, in OpenAI's shape.

    From the blocks, else from `additional_kwargs["tool_calls"]` (OpenAI's dicts or objects), which repeat them.
    """
    blocks = [block for block in item.blocks if isinstance(block, ToolCallBlock)]
    if blocks:
        return [tool_call(block.tool_call_id, block.tool_name, block.tool_kwargs) for block in blocks]
    calls = []
    for call in item.additional_kwargs.get("tool_calls") or ():
        entry: Mapping[str, Any] = call if isinstance(call, Mapping) else call.model_dump()
        function = entry.get("function", entry)
        calls.append(tool_call(entry.get("id"), function["name"], function.get("arguments") or {}))
    return calls
