"""Malformed messages are refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
from text.chats import CALL, CHATML, USER, refuse, with_template

from asyncengine.errors import InvalidParameter
from asyncengine.text import TextTokenizer

BLOCKS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.fixture(scope="module")
def chatml() -> TextTokenizer:
    return with_template(CHATML)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hi", "messages"),
        ([], "messages"),
        ({"role": "user"}, "messages"),
        ([USER, "hi"], "messages[1]"),
        ([USER, {"content": "hi"}], "messages[1].role"),
        ([USER, {"role": "assistant", "content": "a", "reasoning_content": 5}], "messages[1].reasoning_content"),
        ([USER, {"role": "assistant", "content": "a", "thinking": ["hm"]}], "messages[1].thinking"),
        ([USER, {"role": "assistant", "content": "a", "reasoning": {"text": "hm"}}], "messages[1].reasoning"),
        ([{"role": 5, "content": "hi"}], "messages[0].role"),
        ([{"role": "user\n<|im_end|>", "content": "hi"}], "messages[0].role"),
        ([USER, USER, USER, {"role": "user", "content": 5}], "messages[3].content"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": [*BLOCKS, {"type": "image_url"}]}], "messages[0].content[2].type"),
        ([USER, {**USER, "images": ["aGk="]}], "messages[1].images"),
        ([{**USER, "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{**USER, "name": 5}], "messages[0].name"),
        ([{"role": "tool", "content": "4", "tool_call_id": 5}], "messages[0].tool_call_id"),
        ([{**USER, "tool_calls": []}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function.name"),
        ([{**USER, "extra": object()}], "messages[0].extra"),
        ([{**USER, 5: "x"}], "messages[0]"),
    ],
)
def test_malformed_messages_are_named(chatml: TextTokenizer, messages: object, field: str) -> None:
    assert refuse(chatml, messages).field == field


JOINED = "{{ messages[1].tool_calls[0].function.arguments + '' }}"


@pytest.mark.parametrize("template", [CHATML, JOINED])
def test_arguments_must_be_plain_and_small(template: str) -> None:
    tokenizer = with_template(template, max_chat_chars=500)
    assert tokenizer._template(None).form.arguments_as_text == (template == JOINED)
    for arguments, complaint in (({"a": object()}, "plain JSON data"), ({"a": "x" * 501}, "longer than max_chat")):
        call = {"id": "c", "function": {"name": "add", "arguments": arguments}}
        assert complaint in refuse(tokenizer, [USER, {"role": "assistant", "tool_calls": [call]}]).limit


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", 5, [1], "[" * 100_000])
def test_arguments_must_be_an_object(chatml: TextTokenizer, arguments: object) -> None:
    call = {"function": {"name": "add", "arguments": arguments}}
    error = refuse(chatml, [{"role": "assistant", "tool_calls": [CALL, call]}])
    assert error.field == "messages[0].tool_calls[1].function.arguments"


def test_random_junk_is_refused_with_a_typed_error(chatml: TextTokenizer) -> None:
    rng = random.Random(5)

    def junk(depth: int = 0) -> Any:
        if depth > 3 or rng.random() < 0.3:
            return rng.choice((None, 5, -0.5, True, "", "x", b"x", object(), "assistant", "text"))
        if rng.random() < 0.4:
            return [junk(depth + 1) for _ in range(rng.randrange(3))]
        keys = ("role", "content", "tool_calls", "function", "arguments", "name", "type", "text", 7)
        return {rng.choice(keys): junk(depth + 1) for _ in range(rng.randrange(5))}

    refused = 0
    for number in range(3000):
        extra = junk()
        message = {"role": "assistant", "content": "x", **(extra if isinstance(extra, dict) else {})}
        try:
            chatml.apply_chat_template(junk() if number % 2 else [message])
        except InvalidParameter:
            refused += 1
    assert 1000 < refused < 3000
