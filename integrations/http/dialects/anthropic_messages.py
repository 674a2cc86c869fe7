"""Anthropic's messages: /v1/messages, and /v1/messages/count_tokens, which counts the tokens of such a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from asyncengine.checks import as_text
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.dialects import EVENT_STREAM
from asyncengine.integrations.http.dialects.openai_shape import image_part, refuse_block, text_part, tool_call
from asyncengine.integrations.http.events import CallArguments, CallBegin, CallEnd, End, Event, Text, Thinking
from asyncengine.integrations.http.fields import TABLES, Fields, as_object, objects
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.turn import Answered, Message, Turn
from asyncengine.outputs import Completion, FinishReason, Usage

SERVERS_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "mcp_", "advisor_")
"""Prefixes of types of tools that Anthropic's servers run. The model is not told of them: nothing here runs them."""
PSEUDO_HEADER = re.compile(r"\A(?:x-anthropic-[\w-]+:[^\n]*\n*)+")
"""A line that Claude Code puts at the head of its system prompt, with a value that differs from call to call: left in,
no prompt would have a prefix in common with the one before."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = {"xhigh": "high", "max": "high"}
THINKS = {"enabled": True, "disabled": False}
REASONS: Mapping[FinishReason, str] = {"length": "max_tokens", "timeout": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
THEIR_NAMES = {
    r"\.function\.parameters": ".input_schema", r"\.function\b": "",
    r"^response_format\.json_schema": "output_config.format",
}  # fmt: skip
"""Patterns of the names in the engine's errors, and what replaces them for clients."""
SIGNATURE = "unsigned"
"""Signature of thoughts, where clients look for one. Thoughts that come back are accepted with any."""
Blocks = list[tuple[str, Mapping[str, Any]]]
"""Blocks of a content, each with its path in the request."""


def read(fields: Fields, *, counting: bool = False) -> Turn:
    """The turn that a body asks for; `counting`: to be counted only. Raises `InvalidParameter` naming the field."""
    values = fields.read(TABLES["messages"])
    turn, body = Turn.of(values), values["own"]
    turn.messages = _messages(body["messages"], body.get("system"))
    if "max_tokens" not in turn.params and not counting:
        raise InvalidParameter("max_tokens", "is missing: the most tokens to write")
    turn.options["clip_max_tokens"] = True  # agents ask for as much as the largest models write
    turn.extra = {"stop": turn.params.get("stop", ())}
    turn.chat = {"tools": _tools(fields, body.get("tools", []))} | _tool_choice(body)
    _read_form(fields, body, turn)
    if turn.messages[-1]["role"] == "assistant" and "tool_calls" not in turn.messages[-1]:
        turn.chat["template_kwargs"] = {"add_generation_prompt": False, "continue_final_message": True}
    return turn


# -------------------------------------------------------------------- messages


def _messages(listed: object, system: object) -> list[Message]:
    """Messages as the engine takes them: the system prompt first, consecutive ones of a role in one.

    System messages in mid-conversation are the user's words from there on, as many templates have a place for one at
    the beginning only, and moving it there would change the head of the prompt, which is cached.
    """
    if not listed:
        raise InvalidParameter("messages", "must be a list of messages, and not empty", listed)
    messages: list[Message] = []
    for where, block in _blocks("system", [] if system is None else system):
        text = PSEUDO_HEADER.sub("", _text(where, block)) if not messages else _text(where, block)
        if text:
            _say(messages, "system", text_part(text))
    names: dict[str, str] = {}
    for at, message in objects("messages", listed):
        role, blocks = message.get("role"), _blocks(f"{at}.content", message.get("content"))
        if role == "assistant":
            _take_answer(messages, blocks, names)
        elif role == "system" and all(earlier["role"] == "system" for earlier in messages):
            for where, block in blocks:
                _say(messages, "system", text_part(_text(where, block)))
        elif role in ("user", "system"):
            _take_words(messages, blocks, names)
        else:
            raise InvalidParameter(f"{at}.role", "must be 'user', 'assistant' or 'system'", role)
    return messages


def _blocks(where: str, content: object) -> Blocks:
    """The blocks of a content, each with its path."""
    if isinstance(content, str):
        return [(where, text_part(content))]
    return objects(where, content, "a str or a list of blocks")


def _text(where: str, block: Mapping[str, Any]) -> str:
    """The text of a block that holds text."""
    source = block.get("source")
    if block.get("type") == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return as_text(f"{where}.source.data", source.get("data"))
    if block.get("type") != "text":
        raise refuse_block(where, str(block.get("type"))[:100])
    return as_text(f"{where}.text", block.get("text"))


def _content_part(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's content part of a block of text or a picture."""
    return image_part(where, block) or text_part(_text(where, block))


def _say(messages: list[Message], role: str, part: dict[str, Any]) -> Message:
    """Add `part` to the last message if that has this role, else to a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    messages[-1]["content"].append(part)
    return messages[-1]


def _take_words(messages: list[Message], blocks: Blocks, names: Mapping[str, str]) -> None:
    """Add a user's turn: results of tools, text and pictures. `names`: the tools' names, by ids of calls."""
    if not blocks:
        _say(messages, "user", text_part(""))
    for where, block in blocks:
        if block.get("type") != "tool_result":
            _say(messages, "user", _content_part(where, block))
            continue
        call = as_text(f"{where}.tool_use_id", block.get("tool_use_id"))
        content = [_content_part(at, each) for at, each in _blocks(f"{where}.content", block.get("content") or "")]
        content = [text_part("Error:"), *content] if block.get("is_error") else content
        tool_name = {"name": names[call]} if call in names else {}
        messages.append({"role": "tool", "tool_call_id": call, "content": content, **tool_name})


def _take_answer(messages: list[Message], blocks: Blocks, names: dict[str, str]) -> None:
    """Add a turn of the model. Thoughts are taken with any signature; redacted ones, which no one here can read, are
    left out."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    answer = messages[-1]
    for where, block in blocks:
        match block.get("type"):
            case "thinking":
                thought = as_text(f"{where}.thinking", block.get("thinking"))
                answer["reasoning_content"] = answer.get("reasoning_content", "") + thought
            case "redacted_thinking":
                continue
            case "tool_use":
                call, name = (as_text(f"{where}.{key}", block.get(key)) for key in ("id", "name"))
                arguments = as_object(f"{where}.input", block.get("input", {}))
                names[call] = name
                answer.setdefault("tool_calls", []).append(tool_call(call, name, arguments))
            case _:
                answer["content"].append(text_part(_text(where, block)))


# -------------------------------------------------------------------- other fields


def _tools(fields: Fields, listed: object) -> list[dict[str, Any]]:
    """Tools in OpenAI's shape. One without a schema, such as the client's own shell, takes any arguments."""
    tools = []
    for at, tool in objects("tools", listed):
        tool_type = tool.get("type")
        if isinstance(tool_type, str) and tool_type.startswith(SERVERS_TOOLS):
            fields.skip(f"{at} ({tool_type})")
            continue
        schema = tool.get("input_schema")
        function = {"name": tool.get("name"), "parameters": {"type": "object"} if schema is None else schema}
        function |= {"description": tool["description"]} if tool.get("description") else {}
        strict = tool.get("strict")  # what the grammar library cannot enforce is no reason to refuse an agent's tool
        tools.append({"type": "function", "function": {**function, "strict": False if strict is None else strict}})
    return tools


def _tool_choice(body: Mapping[str, Any]) -> dict[str, Any]:
    choice_type = body.get("tool_choice.type", "auto")
    chat: dict[str, Any] = {"tool_choice": CHOICES.get(choice_type)}
    if choice_type == "tool":
        name = as_text("tool_choice.name", body.get("tool_choice.name"))
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    if body.get("tool_choice.disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


def _read_form(fields: Fields, body: Mapping[str, Any], turn: Turn) -> None:
    """Read the form of the answer, and how much is thought before it: a budget in LiteLLM's steps of effort."""
    if (form := body.get("output_config.format")) is not None:
        if form.get("type") != "json_schema":
            raise InvalidParameter("output_config.format", "must be an object of type 'json_schema'", form)
        turn.chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    if (effort := body.get("output_config.effort")) is not None:
        turn.wishes["output_config.effort"] = {"reasoning_effort": EFFORTS.get(effort, effort)}
    if (thinks := THINKS.get(str(body.get("thinking.type")))) is not None:
        turn.wishes["thinking"] = {"enable_thinking": thinks}
    budget = body.get("thinking.budget_tokens") if thinks else None
    if budget is not None:
        turn.chat["max_thinking_tokens"], turn.budget_field = budget, "thinking.budget_tokens"
        effort = "low" if budget <= 1024 else "medium" if budget <= 2048 else "high"
        turn.wishes["thinking.budget_tokens"] = {"thinking_budget": budget, "reasoning_effort": effort}
    elif "thinking.budget_tokens" in body:
        fields.skip("thinking.budget_tokens")


# -------------------------------------------------------------------- answers


def error(problem: Problem, request_id: str | None = None) -> dict[str, Any]:
    """Anthropic's error object. Agents look for "prompt is too long" in it, and shorten the conversation then."""
    field, colon, rest = problem.message.partition(": ")
    for ours, theirs in THEIR_NAMES.items():
        field = re.sub(ours, theirs, field)
    if problem.code == "context_length_exceeded":
        field, colon = "prompt is too long", ": "
    error_type = ERRORS.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return {"type": "error", "error": {"type": error_type, "message": field + colon + rest}, "request_id": request_id}


def model_list(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Anthropic's page of models: all of them, from OpenAI's objects."""
    first, last = (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
    return {"data": [*map(model_object, rows)], "has_more": False, "first_id": first, "last_id": last}


def model_object(row: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's object of a model, from OpenAI's."""
    created = datetime.fromtimestamp(row["created"], UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model", "id": row["id"], "display_name": row["id"], "created_at": created, "lifecycle": "active",
        "max_input_tokens": row["max_model_len"], "max_tokens": row["max_model_len"],
    }  # fmt: skip


class Writer:
    """Writes one answer: as a stream's frames, or whole. Text, thoughts and each call are blocks, one after another."""

    media_type = EVENT_STREAM
    ping = 'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, turn: Turn, answered: Answered) -> None:
        self._stops = turn.extra.get("stop", ())
        self._id, self._model = answered.id, answered.model
        self._block = -1
        """Index of the last block."""
        self._open: str | None = None
        """Type of the block that is being written."""
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]], ended: dict[str, Any], usage: Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{self._id}", "type": "message", "role": "assistant", "model": self._model, "content": content,
            **ended, "usage": _usage(usage),
        }  # fmt: skip

    def _ended(self, reason: FinishReason, stop: str | None) -> dict[str, Any]:
        requested = reason == "stop" and stop is not None and stop in self._stops  # not one of the model's own
        stop_reason = "stop_sequence" if requested else REASONS.get(reason, "end_turn")
        return {"stop_reason": stop_reason, "stop_sequence": stop if requested else None}

    def begin(self, usage: Usage, _samples: int = 1) -> str:
        """The frame that says who speaks, and what the prompt cost."""
        before = replace(usage, completion_tokens=0, reasoning_tokens=0)  # the first chunk is sent after this frame
        return _frame("message_start", message=self._message([], self._end, before))

    def write(self, event: Event) -> str:
        match event:
            case Text() if event.text:
                return self._begin("text", text="") + self._delta("text_delta", "text", event.text)
            case Thinking():
                begin = self._begin("thinking", thinking="", signature="")
                return begin + self._delta("thinking_delta", "thinking", event.text)
            case CallBegin():
                return self._close() + self._begin("tool_use", id=event.id, name=event.name, input={})
            case CallArguments():
                return self._delta("input_json_delta", "partial_json", event.text)
            case CallEnd():
                return self._close()
            case End():
                self._end = self._ended(event.reason, event.stop)
                return self._close()
        return ""

    def _begin(self, block_type: str, **content: Any) -> str:
        """Frames up to the beginning of a block of this type; none if the open block has it."""
        if self._open == block_type:
            return ""
        before = self._close()
        self._open, self._block = block_type, self._block + 1
        return before + _frame("content_block_start", index=self._block, content_block={"type": block_type, **content})

    def _delta(self, delta_type: str, name: str, text: str) -> str:
        # a frame for every token of every stream: made as text, not as objects
        return (
            f'event: content_block_delta\ndata: {{"type": "content_block_delta", "index": {self._block}, '
            f'"delta": {{"type": "{delta_type}", "{name}": {json.dumps(text)}}}}}\n\n'
        )

    def _close(self) -> str:
        if self._open is None:
            return ""
        signed = self._delta("signature_delta", "signature", SIGNATURE) if self._open == "thinking" else ""
        self._open = None
        return signed + _frame("content_block_stop", index=self._block)

    def end(self, usage: Usage) -> str:
        return _frame("message_delta", delta=self._end, usage=_usage(usage)) + _frame("message_stop")

    def failed(self, problem: Problem) -> str:
        return f"event: error\ndata: {json.dumps(error(problem, f'req_{self._id}'))}\n\n"

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The response to a request that did not ask for a stream. A call that was cut off is left out."""
        content: list[dict[str, Any]] = []
        if completion.reasoning:
            content.append({"type": "thinking", "thinking": completion.reasoning, "signature": SIGNATURE})
        if completion.text:
            content.append({"type": "text", "text": completion.text})
        for call in completion.tool_calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
        return self._message(content, self._ended(completion.finish_reason, completion.stop), completion.usage)


def _frame(event_type: str, **content: Any) -> str:
    return f"event: {event_type}\ndata: {json.dumps({'type': event_type, **content})}\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's `usage`: tokens that came from the cache are no input tokens there."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens, "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }  # fmt: skip
