"""Chats in the OpenAI shape: rendering, normalisation and typed refusals."""

from __future__ import annotations

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from core.text.chats import CALL, CHATML, TOOL, USER, Chat, refuse, with_template
from core.text.tokenizer_zoo import byte_fallback, fast
from support.data import cases_of

from asyncengine.errors import InvalidParameter
from asyncengine.text.tokenizer import TextTokenizer

ROWS: dict[str, Any] = cases_of(__file__)

LONG = {"function": {"name": "add", "arguments": "[" * 100_000}}


@pytest.fixture(scope="module")
def chatml() -> TextTokenizer:
    return with_template(CHATML)


def test_ids_are_those_of_transformers(chatml: TextTokenizer) -> None:
    chat: Chat = [{"role": "system", "content": "Be kind."}, USER]
    wanted = chatml.hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert chatml.encode(chatml.render_chat(chat), add_special_tokens=False) == wanted


def test_no_double_bos() -> None:
    hf = fast(byte_fallback(strip=True), bos_token="<s>", eos_token="</s>", add_bos_token=True)
    hf.chat_template = CHATML
    tokenizer = TextTokenizer(hf)
    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id, "the tokenizer itself adds one to prompts"
    ids = tokenizer.encode(tokenizer.render_chat([USER]), add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id or 0) == 1


def test_callers_messages_are_left_alone(chatml: TextTokenizer) -> None:
    chat: Chat = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    before = copy.deepcopy(chat)
    chatml.render_chat(chat, tools=[TOOL])
    assert chat == before


@pytest.mark.parametrize(
    ("template", "settings", "messages", "more", "outcome"),
    [row[1:] for row in ROWS["rendered"]],
    ids=[row[0] for row in ROWS["rendered"]],
)
def test_what_a_chat_becomes(
    chatml: TextTokenizer, template: Any, settings: dict[str, Any], messages: Any, more: dict[str, Any], outcome: Any
) -> None:
    """A text, or the field of the error and words of its limit."""
    tokenizer = chatml if template == "chatml" else with_template(template, **settings)
    assert tokenizer.has_chat_template == (template is not None or bool(settings))
    if isinstance(outcome, str):
        assert tokenizer.render_chat(messages, **more) == outcome
    else:
        error = refuse(tokenizer, messages, **more)
        assert error.field == outcome["field"]
        assert outcome["says"] in error.limit


@pytest.mark.parametrize(
    ("messages", "more", "field"),
    [
        ([{**USER, "extra": object()}], {}, "messages[0].extra"),
        ([{**USER, 5: "x"}], {}, "messages[0]"),
        ([USER], {"tools": [print]}, "tools[0]"),
        ([USER], {"tools": [{**TOOL, "x": {1, 2}}]}, "tools[0].x"),
        ([{"role": "assistant", "tool_calls": [LONG]}], {}, "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_what_is_no_plain_data_is_named(chatml: TextTokenizer, messages: Any, more: dict[str, Any], field: str) -> None:
    assert refuse(chatml, messages, **more).field == field


def test_documents_are_plain_data() -> None:
    assert refuse(with_template("{{ documents[0].text }}"), [USER], documents=[object()]).field == "documents[0]"


@pytest.mark.parametrize("name", ["enable_thinkin", "documents"])
def test_a_variable_that_the_template_does_not_read_does_nothing(
    chatml: TextTokenizer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once: programs send the same to every model that they serve."""
    with caplog.at_level("WARNING", "asyncengine"):
        shown = [chatml.render_chat([USER], **{name: "{{ 1 }}"}) for _ in range(2)]
    assert shown == [chatml.render_chat([USER])] * 2
    assert len(caplog.records) <= 1


def test_sizes_are_bounded_before_and_after_rendering() -> None:
    small = with_template(CHATML, max_chat_chars=200)
    assert "longer than max_chat_chars=200" in refuse(small, [{"role": "user", "content": "x" * 201}]).limit
    assert "longer than max_chat_chars=200" in refuse(small, [USER] * 80).limit
    amplifier = with_template("{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}", max_chat_chars=200)
    assert "rendered to 2000 characters" in refuse(amplifier, [USER]).limit
    assert "longer than max_chat_chars=200" in refuse(small, [USER], tools=[{"name": "x" * 201}]).limit


def test_deep_nesting_is_refused(chatml: TextTokenizer) -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    assert "nested" in refuse(chatml, [{**USER, "extra": deep}]).limit


def test_eight_threads_render_at_once() -> None:
    tokenizer = with_template(CHATML)
    chats: list[Chat] = [[{"role": "user", "content": f"question {i} " * (i % 7 + 1)}] for i in range(64)]
    alone = with_template(CHATML)
    wanted = [alone.render_chat(chat) for chat in chats]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.render_chat, chats)) == wanted


JOINED = "{{ messages[1].tool_calls[0].function.arguments + '' }}"


@pytest.mark.parametrize("template", [CHATML, JOINED])
def test_arguments_must_be_plain_and_small(template: str) -> None:
    tokenizer = with_template(template, max_chat_chars=500)
    assert tokenizer._template(None).form.arguments_as_text == (template == JOINED)
    for arguments, complaint in (({"a": object()}, "plain JSON data"), ({"a": "x" * 501}, "longer than max_chat")):
        call = {"id": "c", "function": {"name": "add", "arguments": arguments}}
        assert complaint in refuse(tokenizer, [USER, {"role": "assistant", "tool_calls": [call]}]).limit


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
            chatml.render_chat(junk() if number % 2 else [message])
        except InvalidParameter:
            refused += 1
    assert 1000 < refused < 3000
