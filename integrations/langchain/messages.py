"""LangChain messages -> OpenAI-shaped dicts, and the engine's results -> LangChain's.

Text and pictures go in; other content is refused by name and position. Whole answers and stream chunks carry the same
keys. When chunks are added up LangChain concatenates strings and adds integers, so values that are not per token are on
a stream's last chunk only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core import messages as lc
from langchain_core import outputs
from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.json import parse_partial_json

from asyncengine import Chunk, Completion, Sample, ToolCallDelta, Usage
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.dialects import openai_shape
from asyncengine.integrations.http.dialects.openai_shape import openai_logprobs, openai_usage

_TEXT = {"text", "input_text", "output_text", "text-plain"}
_THOUGHT = {"thinking", "redacted_thinking", "reasoning"}
"""Types of content blocks with thoughts. `_reasoning` skips redacted ones, which their provider encrypts."""
_CALL = {"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call", "input_json_delta"}
_RESULT = {"tool_result", "function_call_output"}


def to_openai(messages: Sequence[lc.BaseMessage]) -> list[openai_shape.Message]:
    """The messages in OpenAI's shape. Raises `InvalidParameter` naming the message for content that cannot be used and
    for unknown message classes."""
    converted: list[openai_shape.Message] = []
    for position, item in enumerate(messages):
        converted += convert_message(item, f"messages[{position}]")
    return converted


def convert_message(item: lc.BaseMessage, where: str) -> list[openai_shape.Message]:
    """The message at `where`; several messages if it holds results of tools. Raises as `to_openai`."""
    if isinstance(item, lc.AIMessage):
        # A call that was no valid JSON cannot be rendered as a call; as text the model sees what it wrote.
        texts = [_text(item.content, where, skip=_CALL), *(bad["args"] or "" for bad in item.invalid_tool_calls)]
        text = "\n".join(filter(None, texts))
        return [openai_shape.assistant_message(text, _tool_calls(item), item.name, _reasoning(item, where))]
    if isinstance(item, lc.ToolMessage):
        return [openai_shape.tool_message(_content(item.content, where), item.tool_call_id, item.name)]
    if isinstance(item, lc.FunctionMessage):
        return [openai_shape.tool_message(_content(item.content, where), None, item.name)]
    if isinstance(item, lc.SystemMessage):
        return [openai_shape.message("system", _content(item.content, where), item.name)]
    if isinstance(item, lc.HumanMessage):
        return _human(item, where)
    if isinstance(item, lc.ChatMessage):
        return [openai_shape.message(item.role, _content(item.content, where), item.name)]
    raise InvalidParameter(where, f"messages of class {type(item).__name__} cannot be sent to a model")


def _human(item: lc.HumanMessage, where: str) -> list[openai_shape.Message]:
    """Anthropic puts tool results into the user's message; they become messages of their own before its text."""
    results = [
        openai_shape.tool_message(
            _content(block.get("content", block.get("output", "")), where),
            block.get("tool_use_id") or block.get("call_id"),
        )
        for block in _blocks(item.content)
        if block.get("type") in _RESULT
    ]
    content = _content(item.content, where, skip=_RESULT)
    return [*results, openai_shape.message("user", content, item.name)] if content or not results else results


def _tool_calls(item: lc.AIMessage) -> list[openai_shape.Message]:
    """The calls of a message: `tool_calls`, else the tool_use blocks of its content, which may repeat them."""
    calls = [openai_shape.tool_call(call["id"], call["name"], call["args"]) for call in item.tool_calls]
    if calls or item.invalid_tool_calls:
        return calls
    return [
        openai_shape.tool_call(block.get("id") or block.get("call_id"), block["name"], _arguments(block))
        for block in _blocks(item.content)
        if block.get("type") in _CALL and block.get("name")
    ]


def _reasoning(item: lc.AIMessage, where: str) -> str:
    """An answer's reasoning: the adapter's own key, else the content blocks, which repeat it."""
    kept = item.additional_kwargs.get("reasoning_content")
    thoughts = [] if kept is None else [(f"{where}.additional_kwargs['reasoning_content']", kept)]
    for position, block in enumerate([] if kept else item.content):
        if isinstance(block, dict) and (key := block.get("type")) in ("thinking", "reasoning"):
            summary = block.get("summary") or ()  # OpenAI's way, for those that may be shown one
            texts = (
                [block[key]] if key in block else [part.get("text") for part in summary if isinstance(part, Mapping)]
            )
            thoughts += [(f"{where}.content[{position}].{key}", text) for text in texts]
    for name, text in thoughts:
        if not isinstance(text, str):
            raise InvalidParameter(name, "must be a str", text)
    return "\n".join(text for _, text in thoughts if text)


def _arguments(block: Mapping[str, Any]) -> Mapping[str, Any] | str:
    for key in ("input", "args", "arguments"):
        value = block.get(key)
        if isinstance(value, (Mapping, str)):
            return value
    return {}


def _blocks(content: str | Sequence[str | dict[str, Any]]) -> list[dict[str, Any]]:
    return [] if isinstance(content, str) else [block for block in content if isinstance(block, dict)]


def _text(content: Any, where: str, skip: set[str] | frozenset[str] = frozenset()) -> str:
    """The text of a content, its blocks joined by newlines, without blocks whose type is in `skip`."""
    if isinstance(content, str):
        return content
    texts = (_block_text(block, where, skip) for block in content or ())
    return "\n".join(text for text in texts if text is not None)


def _content(content: Any, where: str, skip: set[str] | frozenset[str] = frozenset()) -> openai_shape.Content:
    """The text of a content as `_text` has it, or its parts in order if some are pictures."""
    if isinstance(content, str):
        return content
    parts = []
    for position, block in enumerate(content or ()):
        image = openai_shape.image_part(f"{where}.content[{position}]", block) if isinstance(block, dict) else None
        if image is not None:
            parts.append(image)
        elif (text := _block_text(block, where, skip)) is not None:
            parts.append(openai_shape.text_part(text))
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _block_text(block: str | dict[str, Any], where: str, skip: set[str] | frozenset[str]) -> str | None:
    if isinstance(block, str):
        return block
    block_type = str(block.get("type", "without a type"))
    if block_type in _TEXT:
        return str(block.get("text") or "")
    if block_type in _THOUGHT or block_type in skip:
        return None
    raise openai_shape.refuse_block(f"{where}.content", block_type)


PROVIDER = "asyncengine"


def usage_metadata(usage: Usage) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens, total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )  # fmt: skip


def _info(news: Sample | Chunk) -> dict[str, Any]:
    """Generation info; the base classes copy it into `response_metadata`."""
    info: dict[str, Any] = {}
    if news.logprobs:
        info["logprobs"] = openai_logprobs(news.logprobs)
    if news.finish_reason is not None:
        info["finish_reason"] = news.finish_reason
        if news.steered_from is not None:
            info["steered_from"] = news.steered_from
    return info


def _answer(model_name: str) -> dict[str, Any]:
    return {"model_name": model_name, "model_provider": PROVIDER}


def _reasoning_content(text: str) -> dict[str, Any]:
    """Additional keywords of a message with reasoning, under the name that LangChain's content blocks read."""
    return {"reasoning_content": text} if text else {}


def _calls(sample: Sample) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """The calls, and those whose arguments Python cannot parse."""
    calls = []
    broken = [(call, "it was cut off, or holds a number Python does not read") for call in sample.broken_calls]
    for call in sample.tool_calls:
        try:
            calls.append(tool_call(name=call.name, args=json.loads(call.arguments), id=call.id))
        except (ValueError, RecursionError) as error:  # a caller deep in its stack reads less deep than the engine
            broken.append((call, f"{type(error).__name__}: {error}"))
    prefix = "the arguments are no JSON object: "
    return calls, [
        invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=prefix + why) for call, why in broken
    ]


def chat_result(completion: Completion, model_name: str) -> outputs.ChatResult:
    """One generation per sample. The request's usage is on the first one, where LangChain's counters look, and on
    no other, so that adding up over all generations counts each token once."""
    generations = []
    for index, sample in enumerate(completion.samples):
        info = _info(sample)
        calls, broken = _calls(sample)
        answer = AIMessage(
            content=sample.text, tool_calls=calls, invalid_tool_calls=broken,
            additional_kwargs=_reasoning_content(sample.reasoning), response_metadata={**_answer(model_name), **info},
            usage_metadata=None if index else usage_metadata(completion.usage),
        )  # fmt: skip
        generations.append(outputs.ChatGeneration(message=answer, generation_info=info))
    output = {"token_usage": openai_usage(completion.usage), "model_name": model_name}
    return outputs.ChatResult(generations=generations, llm_output=output)


def _call_chunks(deltas: Sequence[ToolCallDelta]) -> list[ToolCallChunk]:
    """One for each call: LangChain joins pieces of a call that come in different chunks, but not in the same one."""
    joined: dict[int, ToolCallChunk] = {}
    for delta in deltas:
        call = joined.setdefault(delta.index, tool_call_chunk(index=delta.index, args=""))
        call["name"] = call["name"] or delta.name
        call["id"] = call["id"] or delta.id
        call["args"] = (call["args"] or "") + delta.arguments
    return list(joined.values())


def chat_chunks(chunk: Chunk, model_name: str, arguments: dict[int, str]) -> Iterator[outputs.ChatGenerationChunk]:
    """LangChain's chunks for one of the engine's. `arguments`: texts of the stream's calls so far, which this updates.

    Pieces of a call never go into the last chunk: LangChain reads a last message as complete, and the end of a call's
    arguments alone as an invalid call (to a slow reader the engine sends both at once). A call that was cut off gets an
    invalid ending, since LangChain would complete its arguments, and an agent would run it.
    """
    pieces = list(chunk.tool_calls or ())
    for piece in pieces:
        arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    if chunk.finish_reason is not None:
        ends = {index: _spoilt_end(text) for index, text in arguments.items()}
        pieces += [ToolCallDelta(index, None, None, end) for index, end in ends.items() if end]
    if chunk.finish_reason is None or not pieces:
        yield chat_chunk(chunk, model_name)
        return
    yield chat_chunk(Chunk(chunk.text, [], None, chunk.index, tool_calls=pieces, reasoning=chunk.reasoning), model_name)
    end = Chunk("", chunk.token_ids, chunk.finish_reason, chunk.index, chunk.logprobs, chunk.error, chunk.usage)
    end.steered_from = chunk.steered_from
    yield chat_chunk(end, model_name)


def _spoilt_end(arguments: str) -> str:
    """An ending that makes LangChain read the arguments as an invalid call; "" if they are whole or invalid already."""
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(arguments)
        return ""
    brackets = "]" * (1 + arguments.count("["))  # one of them has nothing to close
    with contextlib.suppress(ValueError, RecursionError):
        for quotes in ("", '"', '""'):  # outside of a string, in one, behind its backslash
            if parse_partial_json(arguments + quotes + brackets) is None:
                return quotes + brackets
    return ""


def chat_chunk(chunk: Chunk, model_name: str) -> outputs.ChatGenerationChunk:
    last = chunk.finish_reason is not None
    info = _info(chunk)
    message = AIMessageChunk(
        content=chunk.text, tool_call_chunks=_call_chunks(chunk.tool_calls or ()),
        additional_kwargs=_reasoning_content(chunk.reasoning),
        response_metadata={**(_answer(model_name) if last else {}), **info},
        usage_metadata=usage_metadata(chunk.usage) if chunk.usage else None, chunk_position="last" if last else None,
    )  # fmt: skip
    return outputs.ChatGenerationChunk(message=message)


def text_result(completions: Sequence[Completion], model_name: str) -> outputs.LLMResult:
    """One list of generations, one per sample, for each prompt."""
    generations: list[list[outputs.Generation]] = [
        [outputs.Generation(text=sample.text, generation_info=_info(sample)) for sample in completion.samples]
        for completion in completions
    ]
    output = {"token_usage": total_usage([openai_usage(c.usage) for c in completions]), "model_name": model_name}
    return outputs.LLMResult(generations=list(generations), llm_output=output)


def text_chunk(chunk: Chunk) -> outputs.GenerationChunk:
    return outputs.GenerationChunk(text=chunk.text, generation_info=_info(chunk) or None)


def total_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum OpenAI usage objects key by key."""
    total: dict[str, Any] = {}
    for usage in usages:
        for key, value in usage.items():
            total[key] = (
                total_usage([total.get(key, {}), value]) if isinstance(value, dict) else total.get(key, 0) + value
            )
    return total
