"""The engine's chat messages: dicts in OpenAI's shape. Both frameworks' messages become these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncengine.errors import InvalidParameter

Message = dict[str, Any]


def message(role: str, content: str, name: str | None = None) -> Message:
    return {"role": role, "content": content, **({"name": name} if name else {})}


def assistant_message(
    content: str, tool_calls: list[Message], name: str | None = None, reasoning: str | None = None
) -> Message:
    """`reasoning`: what the model thought before. Chat templates drop it where their models do not want it back."""
    made = message("assistant", content, name)
    made |= {"reasoning_content": reasoning} if reasoning else {}
    return {**made, "tool_calls": tool_calls} if tool_calls else made


def tool_message(content: str, tool_call_id: str | None, name: str | None = None) -> Message:
    return {**message("tool", content, name), **({"tool_call_id": tool_call_id} if tool_call_id else {})}


def tool_call(call_id: str | None, name: str, arguments: Mapping[str, Any] | str) -> Message:
    """`arguments` is JSON text in OpenAI's shape."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id or "", "type": "function", "function": {"name": name, "arguments": text}}


def refuse_block(where: str, kind: str) -> InvalidParameter:
    return InvalidParameter(where, f"content of type {kind!r} cannot be used: this engine reads text only")
