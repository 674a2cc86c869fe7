"""OpenAI's chat completions: /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncengine.errors import InvalidParameter
from asyncengine.outputs import Completion, FinishReason, Sample, Usage
from asyncengine.serve.dialects.openai_shape import openai_logprobs, openai_usage, tool_call
from asyncengine.serve.events import CallArguments, CallBegin, End, Event, Text, Thinking
from asyncengine.serve.fields import Fields
from asyncengine.serve.problems import Problem
from asyncengine.serve.turn import Answered, Turn

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "n", "min_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "skip_special_tokens",
)  # fmt: skip
"""Fields that mean to the engine what they mean here; those that OpenAI lacks have vLLM's names."""
OPTIONS = ("priority", "prediction", "timeout", "cache_salt")
CHAT = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "enable_thinking")
WITHOUT_MEANING = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity", "modalities", "audio", "web_search_options", "moderation",
)  # fmt: skip
"""Fields of OpenAI's own that nothing here depends on."""
REASONS: Mapping[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "timeout": "length",
}


def read(fields: Fields) -> Turn:
    """The turn that a body asks for. Raises `InvalidParameter` naming the field."""
    turn = Turn(model=fields.text("model"), stream=fields.switch("stream"))
    messages = fields.take("messages")
    if messages is None:
        raise InvalidParameter("messages", "is missing: the chat to answer")
    turn.messages = messages
    turn.params, turn.options, turn.chat = fields.some(SAMPLING), fields.some(OPTIONS), fields.some(CHAT)
    turn.params |= max_tokens(fields)
    turn.params |= logprobs(fields)
    turn.chat |= fields.some({"chat_template_kwargs": "template_kwargs"})
    turn.extra = {"usage": wants_usage(fields)}
    fields.ignore(*WITHOUT_MEANING)
    fields.end()
    return turn


def max_tokens(fields: Fields) -> dict[str, Any]:
    """Most tokens to write, under the new name or the old one."""
    given = fields.some(("max_completion_tokens", "max_tokens"))
    if len(given) == 2 and len(set(map(repr, given.values()))) > 1:
        raise InvalidParameter("max_tokens", "is given twice, as max_completion_tokens too, with another value")
    return {"max_tokens": next(iter(given.values()))} if given else {}


def logprobs(fields: Fields) -> dict[str, Any]:
    """Whether log-probabilities are wanted, and how many at each place."""
    wanted, top = fields.switch("logprobs"), fields.take("top_logprobs")
    if top is not None and not wanted:
        raise InvalidParameter("top_logprobs", "needs logprobs=true", top)
    return ({"logprobs": True} if wanted else {}) | ({} if top is None else {"top_logprobs": top})


def wants_usage(fields: Fields) -> bool:
    """Whether a stream's last chunk is to be one of its usage (`stream_options`)."""
    given = fields.take("stream_options", {})
    if not isinstance(given, Mapping):
        raise InvalidParameter("stream_options", "must be an object", given)
    inner = Fields(given, strict=fields.strict)
    wanted = inner.switch("include_usage")
    inner.ignore("include_obfuscation")
    inner.end()
    return wanted


def error(problem: Problem) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    name = kind.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": name, "param": problem.param, "code": problem.code}}


class Writer:
    """Writes one answer: as a stream's frames, or whole."""

    ping = ": still there\n\n"
    """A comment, which clients pass over: the connection is used."""

    def __init__(self, turn: Turn, answered: Answered) -> None:
        self._usage = bool(turn.extra.get("usage"))
        self._id, self._created, self._model = f"chatcmpl-{answered.id}", answered.created, answered.model
        # A frame is made for every token of every stream: all of it that stays the same is written once.
        head = self._head("chat.completion.chunk")
        self._before = "data: " + json.dumps(head, ensure_ascii=False)[:-1] + ', "choices": [{"index": '
        self._after = "}]" + (', "usage": null' if self._usage else "") + "}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self._model, "system_fingerprint": None,
        }  # fmt: skip

    def _frame(self, index: int, delta: str, reason: str = "null", logprobs: str = "null") -> str:
        tail = f', "delta": {delta}, "logprobs": {logprobs}, "finish_reason": {reason}'
        return f"{self._before}{index}{tail}{self._after}"

    def begin(self, _usage: Usage, samples: int = 1) -> str:
        """Frames that say who speaks. `_usage`: that of the prompt."""
        return "".join(self._frame(index, '{"role": "assistant", "content": ""}') for index in range(samples))

    def write(self, event: Event) -> str:
        """The frames of one event; an empty text for none."""
        match event:
            case Text() | Thinking():
                name = "content" if isinstance(event, Text) else "reasoning_content"
                logprobs = json.dumps(openai_logprobs(event.logprobs)) if event.logprobs else "null"
                return self._frame(event.index, f'{{"{name}": {json.dumps(event.text)}}}', logprobs=logprobs)
            case CallBegin():
                call = {"index": event.call, **tool_call(event.id, event.name, "")}
                return self._frame(event.index, json.dumps({"tool_calls": [call]}))
            case CallArguments():
                call = {"index": event.call, "function": {"arguments": event.text}}
                return self._frame(event.index, json.dumps({"tool_calls": [call]}))
            case End():
                return self._frame(event.index, "{}", json.dumps(REASONS.get(event.reason, "stop")))
        return ""

    def end(self, usage: Usage) -> str:
        """The last frames of a stream."""
        last = ""
        if self._usage:
            head = self._head("chat.completion.chunk")
            last = f"data: {json.dumps({**head, 'choices': [], 'usage': openai_usage(usage)})}\n\n"
        return last + "data: [DONE]\n\n"

    def failed(self, problem: Problem) -> str:
        """The frames of a stream that broke off."""
        return f"data: {json.dumps(error(problem))}\n\ndata: [DONE]\n\n"

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The response to a request that did not ask for a stream."""
        choices = [_choice(index, sample) for index, sample in enumerate(completion.samples)]
        return {**self._head("chat.completion"), "choices": choices, "usage": openai_usage(completion.usage)}


def _choice(index: int, sample: Sample) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
    if sample.reasoning:
        message["reasoning_content"] = sample.reasoning
    if sample.tool_calls:
        message["content"] = sample.text or None
        message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in sample.tool_calls]
    logprobs = {**openai_logprobs(sample.logprobs), "refusal": None} if sample.logprobs else None
    reason = REASONS.get(sample.finish_reason, "stop")
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
