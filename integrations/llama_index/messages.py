"""LlamaIndex messages -> OpenAI-shaped dicts. Text and pictures; anything else is refused by name and place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_index.core.base.llms import types

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.dialects import openai_shape

_ROLES = {
    types.MessageRole.DEVELOPER: "system", types.MessageRole.CHATBOT: "assistant", types.MessageRole.MODEL: "assistant",
    types.MessageRole.FUNCTION: "tool",
}  # fmt: skip


def check_messages(messages: object) -> None:
    """Raises `InvalidParameter` for what is no list of messages, such as OpenAI's dicts."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", "must be a list of LlamaIndex's ChatMessage", messages)
    for position, item in enumerate(messages):
        if not isinstance(item, types.ChatMessage):
            limit = "must be LlamaIndex's ChatMessage(role=..., content=...)"
            raise InvalidParameter(f"messages[{position}]", limit, item)


def to_openai(messages: Sequence[types.ChatMessage]) -> list[openai_shape.Message]:
    """Raises `InvalidParameter` naming the message for content that cannot be used."""
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
    """The picture in a form that the engine takes, which looks at its size before it decodes any of it."""
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

    From the blocks, else from `additional_kwargs["tool_calls"]` (OpenAI's dicts or objects), which repeat them.
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
