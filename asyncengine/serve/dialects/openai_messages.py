"""Chats in OpenAI's forms, brought to the one that the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncengine.errors import InvalidParameter
from asyncengine.serve.fields import Fields
from asyncengine.serve.turn import Message, Turn


def read_messages(given: Any) -> Any:
    """The messages with roles and refusals as the engine has them; what is malformed it refuses.

    "developer" is the newer name of "system", which is what templates know; a refusal is what the assistant said.
    """
    if not isinstance(given, list):
        return given
    messages = list[Any]()
    for index, message in enumerate(given):
        if not isinstance(message, Mapping):
            messages.append(message)
            continue
        made = {name: value for name, value in message.items() if value is not None}
        if made.get("role") == "developer":
            made["role"] = "system"
        if isinstance(calls := made.get("tool_calls"), list):
            if not calls:  # as clients send their own answers back
                del made["tool_calls"]
            refuse_custom(f"messages[{index}].tool_calls", calls)
        messages.append(_with_refusals(made))
    return messages


def _with_refusals(message: Message) -> Message:
    refusal, content = message.pop("refusal", None), message.get("content")
    if refusal is not None and content is None:
        message["content"] = refusal
    if isinstance(content, list):
        message["content"] = [
            {"type": "text", "text": part.get("refusal")}
            if isinstance(part, Mapping) and part.get("type") == "refusal"
            else part
            for part in content
        ]
    return message


def read_tools(fields: Fields, turn: Turn) -> None:
    """Read the tools and which of them may be called; their older form goes unread beside them."""
    turn.chat |= fields.some(("tools", "tool_choice", "parallel_tool_calls"))
    refuse_custom("tools", turn.chat.get("tools"))
    if turn.chat.get("tools"):
        fields.ignore("functions", "function_call")


def refuse_custom(name: str, tools: object) -> None:
    """Raises `InvalidParameter` for a tool, or a call of one, whose input is free text."""
    for index, tool in enumerate(tools) if isinstance(tools, list) else ():
        if isinstance(tool, Mapping) and tool.get("type") == "custom":
            raise InvalidParameter(
                f"{name}[{index}].type", "is not served: tools are functions with a JSON schema", "custom"
            )
