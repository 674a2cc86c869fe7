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


@pytest.fixture(scope="module")
def chatml() -> TextTokenizer:
    return with_template(CHATML)


def test_ids_are_those_of_transformers(chatml: TextTokenizer) -> None:
    chat: Chat = [{"role": "system", "content": "Be kind."}, USER]
    wanted = chatml.hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert chatml.encode(chatml.render_chat(chat), add_special_tokens=False) == wanted
    assert chatml.render_chat(chat, add_generation_prompt=False).endswith("hi<|im_end|>")


def test_no_double_bos() -> None:
    hf = fast(byte_fallback(strip=True), bos_token="<s>", eos_token="</s>", add_bos_token=True)
    hf.chat_template = CHATML
    tokenizer = TextTokenizer(hf)
    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id, "the tokenizer itself adds one to prompts"
    ids = tokenizer.encode(tokenizer.render_chat([USER]), add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id or 0) == 1


def test_the_last_message_can_be_continued(chatml: TextTokenizer) -> None:
    chat: Chat = [USER, {"role": "assistant", "content": "The answer is"}]
    text = chatml.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("The answer is")
    assert refuse(chatml, chat, continue_final_message=True).field == "continue_final_message"


def test_callers_messages_are_left_alone(chatml: TextTokenizer) -> None:
    chat: Chat = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    before = copy.deepcopy(chat)
    chatml.render_chat(chat, tools=[TOOL])
    assert chat == before


# -- forms


@pytest.mark.parametrize("given", ['{"a": 1}', {"a": 1}])
def test_arguments_reach_the_template_as_a_dict(chatml: TextTokenizer, given: object) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": given}}
    text = chatml.render_chat([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert 'add({"a": 1})' in text


@pytest.mark.parametrize("given", ['{"a": 1}', {"a": 1}])
def test_arguments_stay_text_for_a_template_that_joins_them(given: object) -> None:
    """DeepSeek's templates do `'...' + tool['function']['arguments'] + '...'`."""
    joins = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<' + c['function']['arguments'] + '>' }}{% endfor %}{% endfor %}"
    )
    call = {**CALL, "function": {"name": "add", "arguments": given}}
    chat: Chat = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '<{"a": 1}>' in with_template(joins).render_chat(chat)


def test_empty_arguments_mean_none(chatml: TextTokenizer) -> None:
    call = {**CALL, "function": {"name": "now", "arguments": ""}}
    assert "now({})" in chatml.render_chat([USER, {"role": "assistant", "tool_calls": [call]}])


def test_a_call_without_content_gets_an_empty_one_where_the_template_needs_it() -> None:
    joins = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    chat: Chat = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert with_template(joins).render_chat(chat) == "user:hi;assistant:;"
    tells = "{% for m in messages %}{{ 'content' in m }};{% endfor %}"
    assert with_template(tells).render_chat(chat) == "True;False;"


def test_tools_are_found_in_a_template_that_gives_them_a_default() -> None:
    """Mistral's and Llama's templates do so."""
    default = "{% if not tools is defined %}{% set tools = none %}{% elif tools is not none %}T{% endif %}{{ tools }}"
    assert with_template(default).render_chat([USER], tools=[TOOL]).startswith("T[{")
    assert with_template(default).render_chat([USER]) == "None"


@pytest.mark.parametrize(("template", "content", "text"), ROWS["contents_take_the_form_the_template_reads"])
def test_contents_take_the_form_the_template_reads(template: str, content: Any, text: str) -> None:
    assert with_template(template).render_chat([{"role": "user", "content": content}]) == text


def test_the_tool_template_is_used_with_tools() -> None:
    tokenizer = with_template({"default": "plain", "tool_use": "{{ tools[0].function.name }}"})
    assert tokenizer.render_chat([USER]) == "plain"
    assert tokenizer.render_chat([USER], tools=[TOOL]) == "add"


# -- refusals by and of the template


def test_without_a_template_the_error_says_what_to_do() -> None:
    error = refuse(with_template(None), [USER])
    assert error.field == "messages"
    assert "pass a prompt" in error.limit
    assert not with_template(None).has_chat_template


def test_the_host_can_give_a_template() -> None:
    tokenizer = with_template(None, chat_template="{{ messages[0].content }}!")
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat([USER]) == "hi!"


def test_the_templates_own_complaint_is_passed_on() -> None:
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in refuse(tokenizer, [USER]).limit


@pytest.mark.parametrize("template", ["{{ messages[0].content + 5 }}", "{{ 1 / 0 }}", "{{ missing.attribute }}"])
def test_a_failing_template_is_a_typed_error(template: str) -> None:
    assert refuse(with_template(template), [USER]).field == "messages"


def test_a_template_with_a_syntax_error_is_named() -> None:
    assert refuse(with_template("{% for %}"), [USER]).field == "chat_template"


@pytest.mark.parametrize("template", ROWS["templates_are_sandboxed"])
def test_templates_are_sandboxed(template: str) -> None:
    with pytest.raises(InvalidParameter, match="the chat template refused them"):
        with_template(template).render_chat([USER])


# -- variables and tools


def test_a_variable_the_template_reads_can_be_set(chatml: TextTokenizer) -> None:
    assert "NOTHINK" in chatml.render_chat([USER], enable_thinking=False)
    assert "NOTHINK" not in chatml.render_chat([USER], enable_thinking=True)


@pytest.mark.parametrize("name", ["enable_thinkin", "documents"])
def test_a_variable_that_the_template_does_not_read_does_nothing(
    chatml: TextTokenizer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once: programs send the same to every model that they serve."""
    with caplog.at_level("WARNING", "asyncengine"):
        shown = [chatml.render_chat([USER], **{name: "{{ 1 }}"}) for _ in range(2)]
    assert shown == [chatml.render_chat([USER])] * 2
    assert len(caplog.records) <= 1


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "bos_token", "raise_exception", "max_length"])
def test_other_variables_are_refused_by_name(chatml: TextTokenizer, name: str) -> None:
    error = refuse(chatml, [USER], **{name: "{{ 1 }}"})
    assert error.field == name
    assert "enable_thinking" in error.limit


@pytest.mark.parametrize(
    "name", ["namespace", "range", "dict", "strftime_now", "bos_token", "padding", "chat_template"]
)
def test_names_of_the_environment_cannot_be_set(name: str) -> None:
    tokenizer = with_template("{{ " + name + " }}{{ messages[0].content }}")
    assert refuse(tokenizer, [USER], **{name: "x"}).field == name


def test_variables_of_generation_tags_and_conditional_defaults_are_found() -> None:
    tokenizer = with_template(
        "{% if not day is defined %}{% set day = 'Monday' %}{% endif %}{% generation %}{{ day }}{% endgeneration %}"
    )
    assert tokenizer.render_chat([USER]) == "Monday"
    assert tokenizer.render_chat([USER], day="Friday") == "Friday"


def test_documents_reach_a_template_that_reads_them() -> None:
    tokenizer = with_template("{{ documents[0].text }}")
    assert tokenizer.render_chat([USER], documents=[{"text": "facts"}]) == "facts"
    assert refuse(tokenizer, [USER], documents=[object()]).field == "documents[0]"


def test_tools_are_rendered_or_refused(chatml: TextTokenizer) -> None:
    assert 'TOOLS[{"type": "function"' in chatml.render_chat([USER], tools=[TOOL])
    assert "TOOLS" not in chatml.render_chat([USER], tools=[])
    assert refuse(with_template("{{ messages[0].content }}"), [USER], tools=[TOOL]).field == "tools"
    assert refuse(chatml, [USER], tools="x").field == "tools"
    assert refuse(chatml, [USER], tools=[print]).field == "tools[0]"
    assert refuse(chatml, [USER], tools=[TOOL, {"type": "function"}]).field == "tools[1].function.name"
    assert refuse(chatml, [USER], tools=[{**TOOL, "x": {1, 2}}]).field == "tools[0].x"


# -- bounds


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


# -- malformed messages


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        *ROWS["malformed_messages_are_named"],
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
            chatml.render_chat(junk() if number % 2 else [message])
        except InvalidParameter:
            refused += 1
    assert 1000 < refused < 3000
