"""LlamaIndex's tools -> keywords of a chat, and its answer -> the calls to make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool

from asyncengine.errors import InvalidParameter
from asyncengine.grammar import pydantic_schema, take_formats
from asyncengine.integrations.http.dialects.openai_shape import Message
from asyncengine.integrations.llama_index.messages import tool_calls
from asyncengine.integrations.llama_index.outputs import partial_object


def openai_tool(tool: BaseTool, where: str = "tool") -> Message:
    """OpenAI's {"type": "function", ...}. Raises `InvalidParameter` naming `where` for what is no tool.

    The name is the tool's own, for LlamaIndex finds the tool by it; `to_openai_tool` would put underscores in.
    """
    if not isinstance(tool, BaseTool):
        raise InvalidParameter(where, "must be a LlamaIndex tool, as FunctionTool.from_defaults makes one", tool)
    made: Message = tool.metadata.to_openai_tool(skip_length_check=True)
    function = {**made["function"], "name": tool.metadata.get_name()}
    if tool.metadata.fn_schema is not None:  # LlamaIndex's own does not say which times have a zone
        whole = pydantic_schema(tool.metadata.fn_schema)
        take_formats(function["parameters"], whole, whole)
    return {**made, "function": {key: value for key, value in function.items() if value is not None}}


def chat_keywords(
    tools: Sequence[BaseTool],
    user_msg: str | ChatMessage | None,
    chat_history: Sequence[ChatMessage] | None,
    allow_parallel_tool_calls: bool,
    tool_required: bool,
    tool_choice: str | Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Keywords for the engine's `chat`. `tool_choice` says more than `tool_required`; without tools neither asks for
    one, unless a call is required, which the engine then refuses."""
    given: object = tools
    if isinstance(given, str) or not isinstance(given, Sequence | None):
        raise InvalidParameter("tools", "must be a list of LlamaIndex's tools", tools)
    if isinstance(chat_history, str) or not isinstance(chat_history, Sequence | None):
        raise InvalidParameter("chat_history", "must be a list of LlamaIndex's ChatMessage", chat_history)
    messages = list(chat_history or ())
    if user_msg is not None:
        if not isinstance(user_msg, str | ChatMessage):
            raise InvalidParameter("user_msg", "must be a str or a ChatMessage", user_msg)
        messages.append(user_msg if isinstance(user_msg, ChatMessage) else ChatMessage(user_msg, role=MessageRole.USER))
    keywords: dict[str, Any] = {"messages": messages}
    choice = tool_choice or ("required" if tool_required else None)
    if tools:
        keywords["tools"] = [openai_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
        keywords["parallel_tool_calls"] = allow_parallel_tool_calls
    if choice is not None and (tools or choice not in ("auto", "none")):
        keywords["tool_choice"] = choice
    return keywords


def selections(response: ChatResponse, error_on_no_tool_call: bool) -> list[ToolSelection]:
    """The calls of an answer, or of as much of it as there is: then the newest one's arguments may be partial.

    Raises `ValueError` where there is none and there must be one.
    """
    calls = tool_calls(response.message)
    if not calls and error_on_no_tool_call:
        raw = response.raw if isinstance(response.raw, Mapping) else {}
        raise ValueError(
            "Expected at least one tool call, but got 0 tool calls "
            f"(finish_reason {raw.get('finish_reason')!r}, content {response.message.content!r}, "
            f"{len(raw.get('broken_calls', ()))} calls without readable arguments)"
        )
    return [
        ToolSelection(
            tool_id=call["id"],
            tool_name=call["function"]["name"],
            tool_kwargs=partial_object(call["function"]["arguments"]),
        )
        for call in calls
    ]
