"""Ollama's API: /api/chat and /api/generate, answered in lines of JSON.

Its reference is docs/api.md and api/types.go of github.com/ollama/ollama. Thoughts, text and whole calls of tools are
fields of one object, which a stream sends in pieces; times are integers of nanoseconds.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any

from asyncengine.checks import as_text
from asyncengine.errors import InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.integrations.http.dialects import openai_shape
from asyncengine.integrations.http.events import CallArguments, CallBegin, CallEnd, End, Event, Text, Thinking
from asyncengine.integrations.http.fields import TABLES, Fields, as_list, objects
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.turn import Answered, Message, Turn
from asyncengine.outputs import Completion, FinishReason, LogprobEntry, Timings, Usage

LINES = "application/x-ndjson"
REASONS: Mapping[FinishReason, str] = {"length": "length", "timeout": "length"}
NANO = 1e9
NONE: Sequence[tuple[str, Any]] = (("seed", -1), ("stop", []))
"""Options with the values by which Ollama's clients say that the option is not set."""
NOT_ENDED: Mapping[str, Any] = MappingProxyType({})
RENAMED = {"thinking": "reasoning_content", "tool_name": "name"}
"""Ollama's names of fields of messages, and the engine's."""


def read_chat(fields: Fields) -> Turn:
    """The turn that a body of /api/chat asks for. Raises `InvalidParameter` naming the field."""
    values = fields.read(TABLES["ollama_chat"])
    turn = _read(values)
    turn.messages = [_message(*numbered) for numbered in objects("messages", values["own"].get("messages", []))]
    return turn


def read_generate(fields: Fields, templated: bool) -> Turn:
    """The turn of /api/generate: a chat of one message, or a text where it is `raw` or the model has no chat template
    (`templated` is false). Raises as `read_chat`."""
    values = fields.read(TABLES["ollama_generate"])
    turn, body = _read(values), values["own"]
    turn.extra["text"], prompt, pictures = True, body.get("prompt", ""), body.get("images")
    system = [openai_shape.message("system", body["system"])] if body.get("system") else []
    if not (prompt or pictures):
        return turn
    if templated and not body.get("raw"):
        turn.messages = [*system, _message("prompt", {"role": "user", "content": prompt, "images": pictures})]
        return turn
    if pictures:
        raise InvalidParameter("images", "need the model's chat template")
    turn.prompts = ["\n\n".join([message["content"] for message in system] + [prompt])]
    if (form := turn.chat.pop("response_format", None)) is not None:
        schema = form.get("json_schema", {}).get("schema")
        turn.grammar = Grammar.json_object if schema is None else partial(Grammar.json_schema, schema)
    return turn


def _read(values: Mapping[str, dict[str, Any]]) -> Turn:
    """The turn of the fields that chats and texts share."""
    turn, body = Turn.of(values), values["own"]
    turn.stream, turn.extra["begun"] = body.get("stream", True), time.perf_counter()
    turn.extra["keep_alive"] = body.get("keep_alive")
    if values["limit"].get("num_predict", 0) > 0:  # -1 and -2: as much as the context holds
        turn.params["max_tokens"] = values["limit"]["num_predict"]
    turn.params = {name: value for name, value in turn.params.items() if (name, value) not in NONE}
    turn.options["clip_max_tokens"] = True
    if (thinks := body.get("think")) is not None:
        effort = {"reasoning_effort": "high" if thinks == "max" else thinks} if isinstance(thinks, str) else {}
        turn.wishes["think"] = {"enable_thinking": bool(thinks), **effort}
    if form := body.get("format"):
        if form != "json" and not isinstance(form, Mapping):
            raise InvalidParameter("format", 'must be "json" or a JSON schema', form)
        schema = {"type": "json_schema", "json_schema": {"schema": form}}
        turn.chat["response_format"] = {"type": "json_object"} if form == "json" else schema
    return turn


def _message(where: str, fields: Mapping[str, Any]) -> Message:
    """A message with the engine's names, whose remaining fields the engine checks. Raises `InvalidParameter`."""
    message = {RENAMED.get(name, name): value for name, value in fields.items() if value}
    message["role"] = as_text(f"{where}.role", fields.get("role")).lower()
    message["content"] = text = as_text(f"{where}.content", fields.get("content") or "")
    if pictures := message.pop("images", None):
        parts = [openai_shape.image_part(where, {"type": "image", "base64": picture})
                 for picture in as_list(f"{where}.images", pictures)]  # fmt: skip
        message["content"] = [*parts, openai_shape.text_part(text)]
    return message


class Writer:
    """Writes one answer: as a stream's lines, or whole."""

    media_type = LINES
    ping = ""

    def __init__(self, turn: Turn, answered: Answered) -> None:
        self._text, self._begun, self._answered = turn.extra.get("text"), turn.extra["begun"], answered
        self._call: tuple[str, str] = ("", "")
        self._arguments: list[str] = []
        self._reason: FinishReason = "stop"

    def piece(
        self, text: str = "", entries: Sequence[LogprobEntry] = (), ended: Mapping[str, Any] = NOT_ENDED, **more: Any
    ) -> dict[str, Any]:
        """The object of a piece of the answer: text, or `more` (thoughts, calls). `ended`: the fields of its end."""
        content: dict[str, Any] = {"response" if self._text else "content": text}
        content |= {name: value for name, value in more.items() if value}
        content = content if self._text else {"message": {"role": "assistant", **content}}
        content |= {"logprobs": openai_shape.openai_logprobs(entries)["content"]} if entries else {}
        time = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._answered.model, "created_at": time, **content, "done": bool(ended), **ended}

    def begin(self, _usage: Usage, _samples: int = 1) -> str:
        return ""

    def write(self, event: Event) -> str:
        match event:
            case Text():
                return _line(self.piece(event.text, event.logprobs))
            case Thinking():
                return _line(self.piece(thinking=event.text, entries=event.logprobs))
            case CallBegin():
                self._call, self._arguments = (event.id, event.name), []
            case CallArguments():
                self._arguments.append(event.text)
            case CallEnd():
                with contextlib.suppress(ValueError, RecursionError):  # of a call that was cut off
                    return _line(self.piece(tool_calls=[_call(event.call, *self._call, "".join(self._arguments))]))
            case End():
                self._reason = event.reason
        return ""

    def end(self, usage: Usage) -> str:
        return _line(self.piece(ended=self._ended(self._reason, usage, self._answered.timings())))

    def _ended(self, reason: FinishReason, usage: Usage, timings: Timings | None) -> dict[str, Any]:
        """The last object's fields: the reason of the end, and the cost in tokens and nanoseconds."""
        total, times = time.perf_counter() - self._begun, timings or Timings(None, None, 0.0)
        queued, first = times.queued or 0.0, times.first_token or 0.0
        seconds = {"total": total, "load": total - times.total}
        seconds |= {"prompt_eval": first - queued, "eval": times.total - first}
        durations = {f"{name}_duration": max(0, int(duration * NANO)) for name, duration in seconds.items()}
        counts = {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.completion_tokens}
        return {"done_reason": REASONS.get(reason, "stop"), **durations, **counts}

    def failed(self, problem: Problem) -> str:
        return _line({"error": problem.message})

    def whole(self, completion: Completion) -> dict[str, Any]:
        calls = [_call(at, call.id, call.name, call.arguments) for at, call in enumerate(completion.tool_calls)]
        ended = self._ended(completion.finish_reason, completion.usage, completion.timings)
        entries = completion.samples[0].logprobs or ()
        return self.piece(completion.text, entries, ended, thinking=completion.reasoning, tool_calls=calls)


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"


def _call(number: int, call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of a tool, whose arguments are an object. Raises `ValueError` for one that was cut off."""
    return {"id": call_id, "function": {"index": number, "name": name, "arguments": json.loads(arguments)}}
