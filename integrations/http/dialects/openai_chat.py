"""OpenAI's chat completions: /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.dialects.openai_common import Frames, error, max_tokens, read_common
from asyncengine.integrations.http.dialects.openai_shape import openai_logprobs, shown_calls, tool_call, with_object
from asyncengine.integrations.http.events import CallArguments, CallBegin, End, Event, Text, Thinking
from asyncengine.integrations.http.fields import Fields, Values
from asyncengine.integrations.http.turn import Answered, Message, Turn
from asyncengine.outputs import Completion, FinishReason, LogprobEntry, Sample, Usage

__all__ = ["Writer", "error", "read"]

INSTEAD = {"functions": "use tools", "function_call": "use tools and tool_choice"}
REASONS: Mapping[FinishReason, str] = {"length": "length", "tool_calls": "tool_calls", "timeout": "length"}


def read(fields: Fields) -> Turn:
    """The turn that a body asks for. Raises `InvalidParameter` naming the field."""
    turn, values = read_common(fields, "chat")
    body = values["own"]
    turn.messages = messages = read_messages(body["messages"])
    if body.get("echo"):
        turn.extra["echo"] = _last_words(messages)
    refuse_custom("tools", turn.chat.get("tools"))
    for name, instead in INSTEAD.items():
        if (value := body.get(name)) in ("none", "auto") or (value is not None and turn.chat.get("tools")):
            fields.skip(name)
        elif value:
            raise InvalidParameter(name, f"is not served: {instead}", value)
    turn.params |= max_tokens(values["limit"])
    if "top_logprobs" in turn.params and not turn.params.get("logprobs"):
        raise InvalidParameter("top_logprobs", "needs logprobs=true", turn.params["top_logprobs"])
    _read_prompt_scores(turn, fields)
    _read_thinking(body, turn)
    if variables := template_variables(values):
        turn.chat["template_kwargs"] = variables
    if (modalities := body.get("modalities", ["text"])) != ["text"]:
        raise InvalidParameter("modalities", 'must be ["text"]: text is served, sounds are not', modalities)
    return turn


def read_messages(listed: list[Any]) -> list[Any]:
    """The messages with the engine's roles, and with refusals as text. Malformed messages are left for the engine to
    refuse.

    "developer" is OpenAI's newer name of "system", the role that chat templates know.
    """
    messages = list[Any]()
    for index, message in enumerate(listed):
        if not isinstance(message, Mapping):
            messages.append(message)
            continue
        cleaned = {name: value for name, value in message.items() if value is not None}
        if cleaned.get("role") == "developer":
            cleaned["role"] = "system"
        if isinstance(calls := cleaned.get("tool_calls"), list):
            refuse_custom(f"messages[{index}].tool_calls", calls)
            cleaned["tool_calls"] = [*map(with_object, calls)]
            if not calls:  # clients that send an answer back may add an empty list, which templates take for calls
                del cleaned["tool_calls"]
        messages.append(_with_refusals(cleaned))
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


def _last_words(messages: list[Any]) -> str:
    """The text of the last message if the assistant wrote it, which the answer repeats (vLLM's `echo`)."""
    last = messages[-1] if messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return ""
    content = last.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join([str(part.get("text", "")) for part in parts if isinstance(part, Mapping)])


def refuse_custom(name: str, tools: object) -> None:
    """Raises `InvalidParameter` for a tool, or a call of one, whose input is free text."""
    for index, tool in enumerate(tools) if isinstance(tools, list) else ():
        if isinstance(tool, Mapping) and tool.get("type") == "custom":
            raise InvalidParameter(
                f"{name}[{index}].type", "is not served: tools are functions with a JSON schema", "custom"
            )


def _read_thinking(body: Mapping[str, Any], turn: Turn) -> None:
    """Read the fields for reasoning: OpenAI's, OpenRouter's, DeepSeek's and Ollama's."""
    if body.get("reasoning.exclude"):
        turn.extra["reasoning"] = False
    if body.get("reasoning.enabled") is False:
        turn.wishes["reasoning.enabled"] = {"enable_thinking": False}
    for name in ("reasoning_effort", "reasoning.effort"):
        if (effort := body.get(name)) is not None:
            none = {"enable_thinking": False} if effort == "none" else {}
            turn.wishes[name] = {"reasoning_effort": effort, **none}
    if (thinking_type := body.get("thinking.type")) is not None:
        turn.wishes["thinking"] = {"enable_thinking": thinking_type != "disabled"}
    if (thinks := body.get("think")) is not None:
        turn.wishes["think"] = {"enable_thinking": thinks}


def template_variables(values: Values) -> dict[str, Any]:
    """Variables of the chat template, under vLLM's names."""
    variables = {**values["own"].get("chat_template_kwargs", {}), **values["template"]}
    if variables.get("continue_final_message") is True:
        variables.setdefault("add_generation_prompt", False)
    return variables


def _read_prompt_scores(turn: Turn, fields: Fields) -> None:
    """Read whether the prompt is to be scored, and with how many of the likeliest tokens, as vLLM does."""
    if (count := turn.extra.get("prompt_logprobs")) is None:
        return
    if turn.stream:
        raise InvalidParameter("prompt_logprobs", "are not served in a stream")
    top = turn.params.get("top_logprobs", 0)
    named = turn.params.get("logprob_token_ids", ())
    turn.extra |= {"logprobs": named or turn.params.get("logprobs", False), "top_logprobs": len(named) or top}
    turn.params |= {"prompt_logprobs": True, "top_logprobs": max(top, count)}
    if count > top:
        fields.names["top_logprobs"] = "prompt_logprobs"


class Writer(Frames):
    """Writes one answer: as a stream's frames, or whole."""

    def __init__(self, turn: Turn, answered: Answered) -> None:
        super().__init__("chatcmpl-", "chat.completion.chunk", turn, answered)
        self._reasoning, self._scored = turn.extra.get("reasoning", True), turn.extra.get("logprobs", True)
        self._top: int | None = turn.extra.get("top_logprobs")
        self._echo: str = turn.extra.get("echo", "")

    def _delta(
        self, event: Event, delta: Mapping[str, Any], token_ids: Sequence[int] = (), reason: str | None = None,
        logprobs: Sequence[LogprobEntry] = (), more: str = "", first: bool = False,
    ) -> str:  # fmt: skip
        entries = json.dumps({**openai_logprobs(self.labelled(logprobs)), "refusal": None}) if logprobs else "null"
        quoted = "null" if reason is None else f'"{reason}"'
        fields = f'"delta": {json.dumps(delta)}, "logprobs": {entries}, "finish_reason": {quoted}'
        return self.frame(event.index, fields, token_ids, more, first=first)

    def begin(self, _usage: Usage, samples: int = 1) -> str:
        """Frames that say who speaks."""
        more = f', "prompt_token_ids": {list(self._answered.prompts()[0])}' if self._ids else ""
        delta = {"role": "assistant", "content": self._echo}
        return "".join([self._delta(Event(index), delta, more=more, first=True) for index in range(samples)])

    def write(self, event: Event) -> str:
        match event:
            case Text():
                return self._delta(event, {"content": event.text}, event.token_ids, logprobs=event.logprobs)
            case Thinking():
                delta = _reasoning(event.text) if self._reasoning else {}
                return self._delta(event, delta, event.token_ids, logprobs=event.logprobs)
            case CallBegin():
                return self._delta(event, _call(event.call, tool_call(event.id, event.name, "")))
            case CallArguments():
                return self._delta(event, _call(event.call, {"function": {"arguments": event.text}}))
            case End():
                return self._delta(event, {}, reason=REASONS.get(event.reason, "stop"))
        return ""

    def whole(self, completion: Completion) -> dict[str, Any]:
        choices = [self._choice(index, sample) for index, sample in enumerate(completion.samples)]
        more = {
            "prompt_logprobs": self.of_prompt(completion.prompt_logprobs or ()),
            "prompt_token_ids": list(self._answered.prompts()[0]) if self._ids else None,
        }
        return {**self.head("chat.completion"), "choices": choices, **self.measured(completion), **more}

    def _choice(self, index: int, sample: Sample) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._echo + sample.text, "refusal": None}
        if sample.reasoning and self._reasoning:
            message |= _reasoning(sample.reasoning)
        if calls := shown_calls(sample):
            message["content"] = message["content"] or None
            message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in calls]
        logprobs = None
        if sample.logprobs and self._scored:
            logprobs = {**openai_logprobs(self.labelled(sample.logprobs), self._top), "refusal": None}
        reason = REASONS.get(sample.finish_reason, "stop")
        choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        return choice | {"token_ids": list(sample.token_ids) if self._ids else None}


def _call(number: int, piece: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"index": number, **piece}]}


def _reasoning(text: str) -> dict[str, str]:
    """Thoughts under both names that clients look for: DeepSeek's, and that of vLLM and OpenRouter."""
    return {"reasoning_content": text, "reasoning": text}
