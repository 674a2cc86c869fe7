"""LangChain messages -> OpenAI-shaped dicts. Text and pictures; anything else is refused by name and place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core import messages as lc

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.dialects import openai_shape

_TEXT = {"text", "input_text", "output_text", "text-plain"}
_THOUGHT = {"thinking", "redacted_thinking", "reasoning"}
"""Types of content blocks that `_reasoning` reads; what is redacted, only its maker can read."""
_CALL = {"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call", "input_json_delta"}
_RESULT = {"tool_result", "function_call_output"}


def to_openai(messages: Sequence[lc.BaseMessage]) -> list[openai_shape.Message]:
    """Raises `InvalidParameter` naming the message for content that cannot be used and for unknown message
    classes."""
    converted: list[openai_shape.Message] = []
    for position, item in enumerate(messages):
        converted += convert_message(item, f"messages[{position}]")
    return converted


def convert_message(item: lc.BaseMessage, where: str) -> list[openai_shape.Message]:
    """The message called `where`; several where it brings results of tools along. Raises as `to_openai`."""
    if isinstance(item, lc.AIMessage):
        # A call that was no valid JSON cannot be rendered as a call; as text the model sees what it wrote.
        texts = [_text(item.content, where, skip=_CALL), *(bad["args"] or "" for bad in item.invalid_tool_calls)]
        text = "\n".join(filter(None, texts))
        return [openai_shape.assistant_message(text, _tool_calls(item), item.name, _reasoning(item, where))]
    if isinstance(item, lc.ToolMessage):
        return [openai_shape.tool_message(_content(item.content, where), item.tool_call_id, item.name)]
    if isinstance(item, lc.FunctionMessage):
        return [openai_shape.tool_message(_content(item.content, where), None, item.name)]
    if isinstance(item, lc.SystemMessage):
        return [openai_shape.message("system", _content(item.content, where), item.name)]
    if isinstance(item, lc.HumanMessage):
        return _human(item, where)
    if isinstance(item, lc.ChatMessage):
        return [openai_shape.message(item.role, _content(item.content, where), item.name)]
    raise InvalidParameter(where, f"messages of class {type(item).__name__} cannot be sent to a model")


def _human(item: lc.HumanMessage, where: str) -> list[openai_shape.Message]:
    """Anthropic puts tool results into the user's message; they become messages of their own before its text."""
    results = [
        openai_shape.tool_message(
            _content(block.get("content", block.get("output", "")), where),
            block.get("tool_use_id") or block.get("call_id"),
        )
        for block in _blocks(item.content)
        if block.get("type") in _RESULT
    ]
    content = _content(item.content, where, skip=_RESULT)
    return [*results, openai_shape.message("user", content, item.name)] if content or not results else results


def _tool_calls(item: lc.AIMessage) -> list[openai_shape.Message]:
    """`tool_calls` wins over tool_use blocks in the content, which repeat it when a history was made by hand."""
    calls = [openai_shape.tool_call(call["id"], call["name"], call["args"]) for call in item.tool_calls]
    if calls or item.invalid_tool_calls:
        return calls
    return [
        openai_shape.tool_call(block.get("id") or block.get("call_id"), block["name"], _arguments(block))
        for block in _blocks(item.content)
        if block.get("type") in _CALL and block.get("name")
    ]


def _reasoning(item: lc.AIMessage, where: str) -> str:
    """An answer's reasoning, where the adapter writes it, or else of its content blocks, which repeat it."""
    kept = item.additional_kwargs.get("reasoning_content")
    found = [] if kept is None else [(f"{where}.additional_kwargs['reasoning_content']", kept)]
    for position, block in enumerate([] if kept else item.content):
        if isinstance(block, dict) and (key := block.get("type")) in ("thinking", "reasoning"):
            summary = block.get("summary") or ()  # OpenAI's way, for those that may be shown one
            parts = (
                [block[key]] if key in block else [part.get("text") for part in summary if isinstance(part, Mapping)]
            )
            found += [(f"{where}.content[{position}].{key}", part) for part in parts]
    for name, text in found:
        if not isinstance(text, str):
            raise InvalidParameter(name, "must be a str", text)
    return "\n".join(text for _, text in found if text)


def _arguments(block: Mapping[str, Any]) -> Mapping[str, Any] | str:
    for key in ("input", "args", "arguments"):
        value = block.get(key)
        if isinstance(value, (Mapping, str)):
            return value
    return {}


def _blocks(content: str | Sequence[str | dict[str, Any]]) -> list[dict[str, Any]]:
    return [] if isinstance(content, str) else [block for block in content if isinstance(block, dict)]


def _text(content: Any, where: str, skip: set[str] | frozenset[str] = frozenset()) -> str:
    """The text of a content, its blocks joined by newlines; blocks in `skip` are somebody else's business."""
    if isinstance(content, str):
        return content
    texts = (_block_text(block, where, skip) for block in content or ())
    return "\n".join(text for text in texts if text is not None)


def _content(content: Any, where: str, skip: set[str] | frozenset[str] = frozenset()) -> openai_shape.Content:
    """The text of a content as `_text` has it, or its parts in order where some are pictures."""
    if isinstance(content, str):
        return content
    parts = []
    for position, block in enumerate(content or ()):
        image = openai_shape.image_part(f"{where}.content[{position}]", block) if isinstance(block, dict) else None
        if image is not None:
            parts.append(image)
        elif (text := _block_text(block, where, skip)) is not None:
            parts.append(openai_shape.text_part(text))
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _block_text(block: str | dict[str, Any], where: str, skip: set[str] | frozenset[str]) -> str | None:
    if isinstance(block, str):
        return block
    kind = str(block.get("type", "without a type"))
    if kind in _TEXT:
        return str(block.get("text") or "")
    if kind in _THOUGHT or kind in skip:
        return None
    raise openai_shape.refuse_block(f"{where}.content", kind)
