"""The engine's results -> LangChain's. Whole answers and stream chunks carry the same keys.

When chunks are added up LangChain concatenates strings and adds integers, so whatever is not per token sits on a
stream's last chunk only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)

from asyncengine import Chunk, Completion, LogprobEntry, Sample, ToolCallDelta, Usage
from asyncengine.serve.dialects.openai_shape import openai_logprobs, openai_usage

PROVIDER = "asyncengine"


def usage_metadata(usage: Usage) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )


def _info(finish_reason: str | None, logprobs: Sequence[LogprobEntry] | None) -> dict[str, Any]:
    """Generation info; the base classes copy it into `response_metadata`."""
    info: dict[str, Any] = {}
    if logprobs:
        info["logprobs"] = openai_logprobs(logprobs)
    if finish_reason is not None:
        info["finish_reason"] = finish_reason
    return info


def _answer(model_name: str) -> dict[str, Any]:
    return {"model_name": model_name, "model_provider": PROVIDER}


def _reasoning(text: str) -> dict[str, Any]:
    """Keywords of a message with reasoning where LangChain's content blocks look for it."""
    return {"reasoning_content": text} if text else {}


def _calls(sample: Sample) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """The calls, and those whose arguments Python does not read."""
    calls = []
    broken = [(call, "it was cut off, or holds a number Python does not read") for call in sample.broken_calls]
    for call in sample.tool_calls:
        try:
            calls.append(tool_call(name=call.name, args=json.loads(call.arguments), id=call.id))
        except (ValueError, RecursionError) as error:  # a caller deep in its stack reads less deep than the engine
            broken.append((call, f"{type(error).__name__}: {error}"))
    said = "the arguments are no JSON object: "
    return calls, [
        invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=said + why) for call, why in broken
    ]


def chat_result(completion: Completion, model_name: str) -> ChatResult:
    """One generation per sample. The request's usage is on the first one, where LangChain's counters look, and on
    no other, so that adding up over all generations counts each token once."""
    generations = []
    for index, sample in enumerate(completion.samples):
        info = _info(sample.finish_reason, sample.logprobs)
        calls, broken = _calls(sample)
        answer = AIMessage(
            content=sample.text,
            tool_calls=calls,
            invalid_tool_calls=broken,
            additional_kwargs=_reasoning(sample.reasoning),
            response_metadata={**_answer(model_name), **info},
            usage_metadata=None if index else usage_metadata(completion.usage),
        )
        generations.append(ChatGeneration(message=answer, generation_info=info))
    output = {"token_usage": openai_usage(completion.usage), "model_name": model_name}
    return ChatResult(generations=generations, llm_output=output)


def _call_chunks(deltas: Sequence[ToolCallDelta]) -> list[ToolCallChunk]:
    """One for each call: LangChain joins pieces of a call that come in different chunks, but not in the same one."""
    joined: dict[int, ToolCallChunk] = {}
    for delta in deltas:
        known = joined.setdefault(delta.index, tool_call_chunk(index=delta.index, args=""))
        known["name"] = known["name"] or delta.name
        known["id"] = known["id"] or delta.id
        known["args"] = (known["args"] or "") + delta.arguments
    return list(joined.values())


def chat_chunks(chunk: Chunk, model_name: str) -> Iterator[ChatGenerationChunk]:
    """LangChain's chunks for one of ours.

    Pieces of a call never travel on the last one: LangChain reads a last message as complete, and the end of a call's
    arguments alone as an invalid call (to a slow reader the engine sends both at once).
    """
    if chunk.finish_reason is None or not chunk.tool_calls:
        yield chat_chunk(chunk, model_name)
        return
    pieces = Chunk(chunk.text, [], None, chunk.index, None, None, None, chunk.tool_calls, chunk.reasoning)
    yield chat_chunk(pieces, model_name)
    end = Chunk("", chunk.token_ids, chunk.finish_reason, chunk.index, chunk.logprobs, chunk.error, chunk.usage)
    yield chat_chunk(end, model_name)


def chat_chunk(chunk: Chunk, model_name: str) -> ChatGenerationChunk:
    last = chunk.finish_reason is not None
    info = _info(chunk.finish_reason, chunk.logprobs)
    part = AIMessageChunk(
        content=chunk.text,
        tool_call_chunks=_call_chunks(chunk.tool_calls or ()),
        additional_kwargs=_reasoning(chunk.reasoning),
        response_metadata={**(_answer(model_name) if last else {}), **info},
        usage_metadata=usage_metadata(chunk.usage) if chunk.usage else None,
        chunk_position="last" if last else None,
    )
    return ChatGenerationChunk(message=part)


def text_result(completions: Sequence[Completion], model_name: str) -> LLMResult:
    """One list of generations, one per sample, for each prompt."""
    generations: list[list[Generation]] = [
        [
            Generation(text=sample.text, generation_info=_info(sample.finish_reason, sample.logprobs))
            for sample in completion.samples
        ]
        for completion in completions
    ]
    output = {"token_usage": total_usage([openai_usage(c.usage) for c in completions]), "model_name": model_name}
    return LLMResult(generations=list(generations), llm_output=output)


def text_chunk(chunk: Chunk) -> GenerationChunk:
    return GenerationChunk(text=chunk.text, generation_info=_info(chunk.finish_reason, chunk.logprobs) or None)


def total_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum OpenAI usage objects key by key."""
    total: dict[str, Any] = {}
    for usage in usages:
        for key, value in usage.items():
            total[key] = (
                total_usage([total.get(key, {}), value]) if isinstance(value, dict) else total.get(key, 0) + value
            )
    return total
