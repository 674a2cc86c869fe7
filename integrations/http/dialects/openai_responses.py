"""OpenAI's Responses API: /v1/responses, as the Open Responses specification of 2026-04-24 has it.

Events have OpenAI's names where the two differ (`response.reasoning_text.delta`). `responses_items` reads the input.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from asyncengine.checks import as_choice, as_text
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.dialects import openai_chat
from asyncengine.integrations.http.dialects.openai_shape import openai_logprobs, shown_calls
from asyncengine.integrations.http.dialects.responses_items import Item, messages_of, read_input, seal
from asyncengine.integrations.http.events import CallArguments, CallBegin, CallEnd, End, Event, Text, Thinking
from asyncengine.integrations.http.fields import TABLES, Fields, objects
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.turn import Answered, Turn
from asyncengine.outputs import Completion, LogprobEntry, Usage

INCLUDABLE = {"message.output_text.logprobs": "logprobs", "reasoning.encrypted_content": "sealed"}
"""Values of `include` that are heeded, and their fields of `Turn.extra`."""
LOGPROBS, SEALED_TOO = INCLUDABLE.values()

MOST_REPEATED = 512
"""Most characters of a metadata value, as OpenAI has it, and of other texts that the response only repeats."""
COMPACT = (
    "Summarize this conversation for a colleague who goes on with it and has not seen it. Keep every fact, name, "
    "number, decision, open question and result of a tool that may matter. Write the summary alone."
)
SUMMARY = "Summary of the conversation until here:\n\n"
Recall = Callable[[str], Sequence[Item]]
error = openai_chat.error


def not_found(response_id: str) -> NoReturn:
    """Refuse a `previous_response_id` that is not stored."""
    why = f"no response {response_id[:100]!r} is stored: it was not to be, was deleted, or gave way to newer ones"
    raise Problem(400, why, "previous_response_id", "previous_response_not_found")


def read(fields: Fields, recall: Recall = not_found) -> Turn:
    """The turn that a body asks for. `recall`: the items, input and output, of a stored response and those before it.

    Raises `InvalidParameter` naming the field, and what `recall` raises.
    """
    values = fields.read(TABLES["responses"])
    turn, body = Turn.of(values), values["own"]
    previous, instructions = body.get("previous_response_id"), body.get("instructions")
    items = read_input(raw_input := body.get("input"))
    turn.messages = messages_of(instructions, recall(previous) if previous else (), items)
    if raw_input == []:  # a client's probe, which wants to be answered
        turn.messages = turn.messages or [{"role": "user", "content": ""}]
    if not turn.messages:
        raise InvalidParameter("input", "is missing: the text or the items to answer")
    if body.get("truncation") == "auto":
        fields.skip("truncation")
    turn.chat |= {"template_kwargs": variables} if (variables := openai_chat.template_variables(values)) else {}
    include = body.get("include", [])
    if not all(isinstance(name, str) for name in include):
        raise InvalidParameter("include", "must be a list of strings", include)
    turn.extra = {"items": items} | {INCLUDABLE[name]: True for name in include if name in INCLUDABLE}
    turn.extra["echo"] = _limits(body, turn) | _read_tools(fields, body, turn) | _read_form(body, turn)
    turn.params |= {"logprobs": True} if turn.extra.get(LOGPROBS) else {}
    for name in include:
        if name not in INCLUDABLE:
            fields.skip(f"include {name}")
    return turn


def read_compact(fields: Fields, recall: Recall = not_found) -> Turn:
    """The turn that summarizes a conversation in one item. Raises as `read`."""
    if fields.take("stream"):
        raise InvalidParameter("stream", "must be left out: a compaction is returned whole")
    turn = read(fields, recall)
    if turn.model is None:
        raise InvalidParameter("model", "is missing: whoever goes on from the compaction should have written it")
    assert turn.messages is not None
    turn.messages.append({"role": "user", "content": COMPACT})
    return turn


def _short(name: str, value: object) -> str:
    """A text that the response repeats. Raises `InvalidParameter` for one over `MOST_REPEATED` characters."""
    text = as_text(name, value)
    if len(text) > MOST_REPEATED:
        raise InvalidParameter(name, f"must have at most {MOST_REPEATED} characters")
    return text


def _limits(body: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """Read limits, metadata and storage. Returns the fields of the response that repeat them and the sampling."""
    metadata = body.get("metadata", {})
    if not isinstance(metadata, Mapping) or len(metadata) > 16 or max(map(len, metadata), default=0) > 64:
        raise InvalidParameter("metadata", "must be an object of at most 16 names of 64 characters", metadata)
    for name, value in metadata.items():
        _short(f"metadata.{name}", value)
    store, background = body.get("store", True), body.get("background", False)
    if background and not store:
        raise Problem(400, "background can only be used when `store` is true", "background", "invalid_value")
    echo = {name: turn.params.get(name, 1.0) for name in ("temperature", "top_p")}
    echo |= {name: turn.params.get(name, 0) for name in ("presence_penalty", "frequency_penalty", "top_logprobs")}
    echo |= {name: _short(name, body.get(name, "")) or None for name in ("safety_identifier", "prompt_cache_key")}
    echo |= {name: body.get(name) for name in ("previous_response_id", "instructions")}
    turn.options = {"session": echo["prompt_cache_key"], **turn.options}
    return echo | {
        "max_output_tokens": turn.params.get("max_tokens"), "max_tool_calls": None, "truncation": "disabled",
        "service_tier": "default", "store": store, "background": background, "metadata": metadata,
    }  # fmt: skip


def _read_tools(fields: Fields, body: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """Read the functions that the model may call. Tools that OpenAI's own servers would run are ignored.

    Returns the fields of the response that repeat them.
    """
    choice, tools, repeated = body.get("tool_choice", "auto"), [], []
    for at, tool in objects("tools", body.get("tools", [])):
        if tool.get("type") != "function":
            fields.skip(at)
            continue
        strict = tool.get("strict")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        tools.append({"type": "function", "function": function | ({} if strict is None else {"strict": strict})})
        definition = {name: tool.get(name) for name in ("name", "description", "parameters")}
        repeated.append({"type": "function", **definition, "strict": strict is not False})
    parallel = body.get("parallel_tool_calls", True)
    if tools:
        turn.chat |= {"tools": tools, "parallel_tool_calls": parallel}
    if choice != "auto":
        allowed = isinstance(choice, Mapping) and choice.get("type") == "allowed_tools"
        turn.chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": choice} if allowed else choice
    return {"tools": repeated, "tool_choice": choice, "parallel_tool_calls": parallel}


def _read_form(body: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """Read the answer's format and the reasoning effort. Returns the fields of the response that repeat them."""
    form, effort = body.get("text.format", {"type": "text"}), body.get("reasoning.effort")
    if as_choice("text.format.type", form.get("type"), ("text", "json_object", "json_schema")) != "text":
        turn.chat["response_format"] = {"type": form["type"]}
    if form["type"] == "json_schema":
        turn.chat["response_format"]["json_schema"] = {name: form[name] for name in form if name != "type"}
        form = {"name": "", "description": None, "strict": None, **form}
    if effort is not None:
        thinks = {"enable_thinking": True, "reasoning_effort": effort}
        turn.wishes["reasoning.effort"] = {"enable_thinking": False} if effort == "none" else thinks
    return {"text": {"format": form}, "reasoning": {"effort": effort, "summary": None}}


def responses_usage(usage: Usage) -> dict[str, Any]:
    """The API's `usage` object. Nothing is charged for writing the cache, so that count is 0."""
    return {
        "input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }  # fmt: skip


class Writer:
    """Writes one answer. `response` is its object as far as it is written; whole answers are streamed into it."""

    media_type = openai_chat.Writer.media_type
    ping = openai_chat.Writer.ping

    def __init__(self, turn: Turn, answered: Answered) -> None:
        self.response: dict[str, Any] = {
            "id": f"resp_{answered.id}", "object": "response", "created_at": answered.created, "completed_at": None,
            "status": "in_progress", "error": None, "incomplete_details": None, "model": answered.model, "output": [],
            "usage": None, **turn.extra["echo"],
        }  # fmt: skip
        self.cancelled = False
        """Whether a client cancelled it: its end is then no failure."""
        self._id, self._logprobs, self._sealed = answered.id, turn.extra.get(LOGPROBS), turn.extra.get(SEALED_TOO)
        self._number = 0
        self._type = ""
        """Type of the item that is being written."""
        self._texts: list[str] = []
        self._entries: list[LogprobEntry] = []
        self._pending: list[LogprobEntry] = []
        """Log-probabilities of tokens that had no text yet."""
        self._delta = ""
        self._reason = "stop"

    # ---------------------------------------------------------------- frames

    def _frame(self, event_type: str, **content: Any) -> str:
        data = {"type": f"response.{event_type}", "sequence_number": self._number, **content}
        self._number += 1
        return f"event: response.{event_type}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"

    def _next(self, text: str, more: str = "") -> str:
        """The frame of the next piece of the open item. One is made for every token: its head is written once."""
        self._texts.append(text)
        self._number += 1
        return f'{self._delta}{self._number - 1}, "delta": {json.dumps(text)}{more}}}\n\n'

    def _ids(self) -> dict[str, Any]:
        """Fields that every event of the open item has."""
        output = self.response["output"]
        ids = {"item_id": output[-1]["id"], "output_index": len(output) - 1}
        return ids if self._type == "function_call" else {**ids, "content_index": 0}

    # ---------------------------------------------------------------- items

    def _open(self, item_type: str, prefix: str, **content: Any) -> str:
        closed, output = self._close(), self.response["output"]
        self._type, self._texts, self._entries = item_type, [], []
        item = {"id": f"{prefix}_{self._id}_{len(output)}", "type": item_type, "status": "in_progress", **content}
        output.append(item)
        begun = self._frame("output_item.added", output_index=len(output) - 1, item=item)
        delta = f"response.{DELTAS[item_type]}.delta"
        head = json.dumps({"type": delta, **self._ids()})[:-1]
        self._delta = f'event: {delta}\ndata: {head}, "sequence_number": '
        if item_type != "function_call":
            begun += self._frame("content_part.added", **self._ids(), part=self._content_part(""))
        return closed + begun

    def _content_part(self, text: str) -> Item:
        if self._type == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(self._entries)}

    def _close(self, status: str = "completed") -> str:
        """The frames that end the open item; none if no item is open."""
        if not self._type:
            return ""
        text, item, ids, name = "".join(self._texts), self.response["output"][-1], self._ids(), DELTAS[self._type]
        item["status"] = status
        if self._type == "function_call":
            item |= {"arguments": text, "status": "completed" if _is_json(text) else "incomplete"}
            done = self._frame(f"{name}.done", **ids, name=item["name"], arguments=text)
        else:
            part = self._content_part(text)
            item["content"] = [part]
            scores = {"logprobs": part["logprobs"]} if self._type == "message" else {}
            done = self._frame(f"{name}.done", **ids, text=text, **scores)
            done += self._frame("content_part.done", **ids, part=part)
            if self._type == "reasoning" and self._sealed:
                item["encrypted_content"] = seal(text)
        self._type = ""
        return done + self._frame("output_item.done", output_index=ids["output_index"], item=item)

    # ---------------------------------------------------------------- the answer

    def begin(self, _usage: Usage, _samples: int = 1) -> str:
        """Frames that say that the response has begun."""
        return self._frame("created", response=self.response) + self._frame("in_progress", response=self.response)

    def write(self, event: Event) -> str:
        match event:
            case Text(text=""):
                self._pending += event.logprobs if self._logprobs else ()
            case Text():
                opened = "" if self._type == "message" else self._open("message", "msg", role="assistant", content=[])
                entries = [*self._pending, *event.logprobs] if self._logprobs else []
                self._entries += entries
                self._pending = []
                more = json.dumps(_logprobs(entries)) if entries else "[]"
                return opened + self._next(event.text, f', "logprobs": {more}')
            case Thinking():
                opened = "" if self._type == "reasoning" else self._open("reasoning", "rs", summary=[], content=[])
                return opened + self._next(event.text)
            case CallBegin():
                self._pending = []
                return self._open("function_call", "fc", call_id=event.id, name=event.name, arguments="")
            case CallArguments():
                return self._next(event.text)
            case CallEnd():
                self._pending = []
                return self._close()
            case End():
                self._reason = event.reason
        return ""

    def end(self, usage: Usage) -> str:
        status = {"length": "incomplete", "timeout": "incomplete", "abort": "cancelled"}.get(self._reason, "completed")
        outcome: dict[str, Any] = {"status": status, "usage": responses_usage(usage)}
        if status == "completed":
            outcome["completed_at"] = int(time.time())
        elif status == "incomplete":
            outcome["incomplete_details"] = {"reason": "max_output_tokens"}
        return self.finish(outcome)

    def failed(self, problem: Problem) -> str:
        """The frames of a stream that broke off, or was cancelled."""
        begun = "" if self._number else self.begin(Usage(0, 0))
        if self.cancelled:
            return begun + self.finish({"status": "cancelled"})
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(problem.status, "server_error")
        return begun + self.finish({"status": "failed", "error": {"code": code, "message": problem.message}})

    def finish(self, outcome: Mapping[str, Any]) -> str:
        """The frames that end the response, whose object gets the fields of `outcome`. OpenAI has no event for a
        cancelled one: it ends with "incomplete"."""
        status = outcome["status"]
        empty = status == "completed" and not self.response["output"]  # clients read output[0] of a completed one
        last = self._open("message", "msg", role="assistant", content=[]) if empty else ""
        last += self._close("completed" if status == "completed" else "incomplete")
        self.response |= outcome
        return last + self._frame("incomplete" if status == "cancelled" else status, response=self.response)

    def whole(self, completion: Completion) -> dict[str, Any]:
        sample = completion.samples[0]
        if sample.reasoning:
            self.write(Thinking(0, sample.reasoning))
        if sample.text:
            self.write(Text(0, sample.text, sample.logprobs or ()))
        for call in shown_calls(sample):
            self.write(CallBegin(0, 0, call.id, call.name))
            self.write(CallArguments(0, 0, call.arguments))
            self.write(CallEnd(0, 0))
        self.write(End(0, sample.finish_reason))
        self.end(completion.usage)
        return self.response


class Compacting(Writer):
    """Writes a conversation's compaction: one item that stands for all before it."""

    def whole(self, completion: Completion) -> dict[str, Any]:
        item = {
            "id": f"cmp_{self._id}", "type": "compaction", "encrypted_content": seal(SUMMARY + completion.text),
        }  # fmt: skip
        return {
            "id": self.response["id"], "object": "response.compaction", "created_at": self.response["created_at"],
            "output": [item], "usage": responses_usage(completion.usage),
        }  # fmt: skip


DELTAS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
"""Names of the events that carry the text of each type of item."""


def _logprobs(entries: Sequence[LogprobEntry]) -> list[dict[str, Any]]:
    return openai_logprobs(entries)["content"] if entries else []


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
