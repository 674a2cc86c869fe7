"""The engine's chunks and completions as LangChain's messages, made by hand: no model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk

from asyncengine import Chunk, Completion, Usage
from asyncengine import errors as engine_errors
from asyncengine.errors import EngineError
from asyncengine.integrations.http.dialects.openai_shape import openai_usage
from asyncengine.integrations.langchain.errors import mapped_errors
from asyncengine.integrations.langchain.messages import chat_chunk, chat_chunks, chat_result
from asyncengine.integrations.results import worth_sending
from asyncengine.outputs import Sample, Timings, ToolCall, ToolCallDelta

from .conftest import added

USAGE = Usage(prompt_tokens=20, completion_tokens=9, cached_tokens=16, reasoning_tokens=4)


def delta(index: int, name: str | None, arguments: str) -> ToolCallDelta:
    return ToolCallDelta(index, f"id{index}" if name else None, name, arguments)


STREAM = [
    Chunk("", [1, 2], reasoning="Let me "),
    Chunk("", [3, 4], reasoning="think."),
    Chunk("So: ", [5]),
    Chunk(
        "", [6, 7], tool_calls=[delta(0, "f", ""), delta(0, None, '{"a'), delta(0, None, '": 1}'), delta(1, "g", "")]
    ),
    Chunk("", [8], tool_calls=[delta(1, None, "{"), delta(1, None, "}")]),
    Chunk("", [9], "tool_calls", usage=USAGE),
]
CALLS = [ToolCall("id0", "f", '{"a": 1}'), ToolCall("id1", "g", "{}")]


def completion(**changes: Any) -> Completion:
    sample = Sample("So: ", list(range(9)), "tool_calls", reasoning="Let me think.", tool_calls=CALLS)
    values: dict[str, Any] = {"text": sample.text, "token_ids": sample.token_ids, "finish_reason": "tool_calls"}
    return Completion(
        **values, usage=USAGE, timings=Timings(None, None, 1.0), request_id="r", samples=[sample], **changes
    )


def streamed() -> AIMessageChunk:
    parts = [chat_chunk(chunk, "m").message for chunk in STREAM if worth_sending(chunk)]
    assert len(parts) == len(STREAM)
    return added(parts)


def test_a_stream_adds_up_to_the_whole_answer() -> None:
    whole = chat_result(completion(), "m").generations[0].message
    full = streamed()
    assert isinstance(whole, AIMessage)
    assert whole.content == full.content == "So: "
    assert whole.tool_calls == full.tool_calls
    assert [(call["name"], call["args"], call["id"]) for call in whole.tool_calls] == [
        ("f", {"a": 1}, "id0"),
        ("g", {}, "id1"),
    ]
    assert whole.additional_kwargs == full.additional_kwargs == {"reasoning_content": "Let me think."}
    assert whole.usage_metadata == full.usage_metadata
    assert whole.response_metadata["finish_reason"] == full.response_metadata["finish_reason"] == "tool_calls"


def test_the_last_chunk_carries_no_piece_of_a_call() -> None:
    """A slow reader gets the end of the arguments and the end of the stream at once; LangChain, reading a last message
    as complete, would take "}" for an invalid call."""
    merged = Chunk("", [8, 9], "tool_calls", usage=USAGE, tool_calls=[delta(1, None, "{"), delta(1, None, "}")])
    first, last = (part.message for part in chat_chunks(merged, "m", {}))
    assert isinstance(first, AIMessageChunk)
    assert isinstance(last, AIMessageChunk)
    assert "".join(piece["args"] or "" for piece in first.tool_call_chunks) == "{}"
    assert (first.chunk_position, first.usage_metadata) == (None, None)
    assert (last.chunk_position, last.tool_call_chunks, last.invalid_tool_calls) == ("last", [], [])
    assert last.response_metadata["finish_reason"] == "tool_calls"
    kept: dict[int, str] = {}
    parts = [part.message for chunk in [*STREAM[:4], merged] for part in chat_chunks(chunk, "m", kept)]
    full = added(parts)
    assert full.tool_calls == streamed().tool_calls
    assert full.usage_metadata == streamed().usage_metadata


def test_reasoning_is_a_content_block_and_is_counted() -> None:
    for message in (streamed(), chat_result(completion(), "m").generations[0].message):
        assert [block["type"] for block in message.content_blocks][:2] == ["reasoning", "text"]
        assert message.content_blocks[0]["reasoning"] == "Let me think."  # type: ignore[typeddict-item]
        assert isinstance(message, AIMessage)
        assert message.usage_metadata is not None
        assert message.usage_metadata["output_token_details"] == {"reasoning": 4}
        assert message.usage_metadata["input_token_details"] == {"cache_read": 16}
        assert message.usage_metadata["total_tokens"] == 29
    assert openai_usage(USAGE)["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_every_error_of_the_engine_has_a_langchain_twin() -> None:
    """A new error class must be given one, or be a mistake in the program."""
    kinds = [kind for kind in vars(engine_errors).values() if isinstance(kind, type) and issubclass(kind, EngineError)]
    ours = {EngineError, engine_errors.WrongLoop, engine_errors.WrongProcess, engine_errors.InvariantViolation}
    for kind in kinds:
        error = kind.__new__(kind)
        with pytest.raises(kind) as caught, mapped_errors():
            raise error
        assert (type(caught.value) is kind) is (kind in ours), kind


def test_a_call_that_python_does_not_read_is_an_invalid_one() -> None:
    """The arguments hold too long a number, or nesting beyond what is left of the stack, whatever made the call."""
    for arguments in ('{"n": ' + "9" * 5000 + "}", '{"n": ' + "[" * 100_000):
        unread = Sample("", [1], "stop", tool_calls=[ToolCall("id1", "g", arguments)])
        [generation] = chat_result(replace(completion(), samples=[unread]), "m").generations
        assert isinstance(generation.message, AIMessage)
        assert generation.message.tool_calls == []
        [found] = generation.message.invalid_tool_calls
        assert (found["name"], found["args"]) == ("g", arguments)
        assert "no JSON object: " in str(found["error"])
