"""OpenAI's shapes: chat messages, which the engine takes as they are, and objects for usage and logprobs.

The HTTP dialects and the adapters of LangChain and LlamaIndex make their messages with these.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncengine.errors import InvalidParameter
from asyncengine.outputs import LogprobEntry, Sample, Timings, ToolCall, Usage

Message = dict[str, Any]
Content = str | list[dict[str, Any]]
"""A text, or parts of which some are pictures."""


def message(role: str, content: Content, name: str | None = None) -> Message:
    return {"role": role, "content": content, **({"name": name} if name else {})}


def assistant_message(
    content: Content, tool_calls: list[Message], name: str | None = None, reasoning: str | None = None
) -> Message:
    """`reasoning`: the model's thoughts before the content. Chat templates of models that want none back drop them."""
    answer = message("assistant", content, name)
    answer |= {"reasoning_content": reasoning} if reasoning else {}
    return {**answer, "tool_calls": tool_calls} if tool_calls else answer


def tool_message(content: Content, tool_call_id: str | None, name: str | None = None) -> Message:
    return {**message("tool", content, name), **({"tool_call_id": tool_call_id} if tool_call_id else {})}


def tool_call(call_id: str | None, name: str, arguments: Mapping[str, Any] | str) -> Message:
    """`arguments` is JSON text in OpenAI's shape."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id or "", "type": "function", "function": {"name": name, "arguments": text}}


def shown_calls(sample: Sample) -> list[ToolCall]:
    """The calls of an answer that is sent whole, broken ones too, as a stream has sent them. Broken calls that the
    engine closed within the budget are left out: they look complete, and a client might run them."""
    return [*sample.tool_calls, *(call for call in sample.broken_calls if call.steered_from is None)]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(where: str, block: Mapping[str, Any]) -> dict[str, Any] | None:
    """The picture of a content block as the engine takes it; None for a block of another type.

    Read are `image_url` (OpenAI's chats), `input_image` (OpenAI's Responses) and `image`, with a `source` (Anthropic),
    with `base64` or `url` (LangChain's standard blocks; `data` in the older ones) or with the engine's own `image`.
    The engine checks the picture itself, and refuses URLs that are no data URLs. Raises `InvalidParameter` naming the
    block for one that holds no picture.
    """
    block_type = block.get("type")
    if block_type not in ("image", "image_url", "input_image"):
        return None
    source: object = block.get("source", block) if block_type == "image" else block.get("image_url")
    if isinstance(source, str):
        return {"type": "image_url", "image_url": {"url": source}}
    if isinstance(source, Mapping):
        if block_type == "image" and source.get("image") is not None:
            return {"type": "image", "image": source["image"]}
        data = source.get("base64", source.get("data"))
        if isinstance(data, str):
            media = source.get("media_type") or source.get("mime_type") or ""
            return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}
        if isinstance(source.get("url"), str):
            return {"type": "image_url", "image_url": {"url": source["url"]}}
    raise InvalidParameter(where, "must hold the picture, as base64 or as a data URL: no files are kept here")


def refuse_block(where: str, block_type: str) -> InvalidParameter:
    read = "text can, and pictures in messages of users and of tools"
    return InvalidParameter(where, f"content of type {block_type!r} cannot be used here: {read}")


def openai_usage(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` object."""
    details = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.accepted_prediction_tokens or usage.rejected_prediction_tokens:
        details["accepted_prediction_tokens"] = usage.accepted_prediction_tokens
        details["rejected_prediction_tokens"] = usage.rejected_prediction_tokens
    return {
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens, "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    }  # fmt: skip


def timings_fields(usage: Usage, timings: Timings | None) -> dict[str, Any]:
    """The field `timings` of llama.cpp's server (milliseconds, tokens, rates), with the time in the queue, and vLLM's
    `metrics`; none where no token came."""
    if timings is None or timings.queued is None or timings.first_token is None:
        return {}
    prompt, predicted = timings.first_token - timings.queued, timings.total - timings.first_token
    obj: dict[str, Any] = {"queued_ms": timings.queued * 1e3, "cache_n": usage.cached_tokens}
    for name, count, seconds in (
        ("prompt", usage.prompt_tokens - usage.cached_tokens, prompt),
        ("predicted", usage.completion_tokens, predicted),
    ):
        obj |= {f"{name}_n": count, f"{name}_ms": seconds * 1e3, f"{name}_per_token_ms": seconds * 1e3 / max(1, count)}
        obj[f"{name}_per_second"] = count / max(seconds, 1e-6)
    metrics = {
        "queue_time_ms": timings.queued * 1e3, "time_to_first_token_ms": prompt * 1e3,
        "generation_time_ms": predicted * 1e3,
        "tokens_per_second": usage.completion_tokens / max(prompt + predicted, 1e-6),
    }  # fmt: skip
    if usage.completion_tokens > 1:
        metrics["mean_itl_ms"] = predicted * 1e3 / (usage.completion_tokens - 1)
    fields = {"timings": obj, "metrics": metrics}
    return {field: {name: round(value, 3) for name, value in values.items()} for field, values in fields.items()}


def openai_logprobs(entries: Sequence[LogprobEntry], top: int | None = None) -> dict[str, Any]:
    """OpenAI's `logprobs` object from `LogprobEntry`s: those of the text, whose tokens join to it, with at most `top`
    alternatives of each."""
    shown = [entry for entry in entries if not entry.ends]
    return {"content": [{**_entry(e), "top_logprobs": [_entry(other) for other in e.top[:top]]} for e in shown]}


def _entry(entry: LogprobEntry) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.bytes)}


def with_object(call: Any) -> Any:
    """A call of an earlier answer, whose arguments are made an object: a broken call's text becomes its only member, so
    that a conversation can go on in which a model once wrote arguments that are none."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str) or not arguments.strip():
        return call
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(json.loads(arguments), dict):
            return call
    return {**call, "function": {**function, "arguments": {"arguments": arguments}}}
