"""Detection, from a template's renderings, of how a model writes calls and reasoning."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncengine.demo import MODEL_PATH
from asyncengine.grammar.chat import TOOL_FORMATS, Reasoning, find_reasoning, find_tool_format
from asyncengine.grammar.chat import reasoning_state as state_of
from asyncengine.text.tokenizer import TextTokenizer

from .models import (
    COMPACT,
    HERMES,
    JSON,
    LISTED,
    LLAMA,
    MARKED,
    MISTRAL,
    SILENT,
    THINKING,
    TURNS,
    tokenizer,
)  # fmt: skip

THINK = Reasoning("<think>", "</think>")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (HERMES, "hermes"),
        (THINKING, "hermes"),
        (LLAMA, "llama3"),
        (MISTRAL, "mistral"),
        (COMPACT, "mistral-compact"),
        (MARKED, "mistral-args"),
        (JSON, "json"),
    ],
)
def test_templates_write_their_familys_text(template: str, name: str) -> None:
    text = tokenizer(template)
    assert find_tool_format(text) == TOOL_FORMATS[name]


@pytest.mark.parametrize("template", [None, SILENT, HERMES.replace("c.function.name", "'x'")])
def test_a_template_without_calls_has_no_format(template: str | None) -> None:
    assert find_tool_format(tokenizer(template)) is None


def test_blanks_are_those_of_the_template() -> None:
    tight = HERMES.replace("<tool_call>\n{", "<tool_call>{").replace("}}}\n</tool", "}}}</tool")
    tight = tight.replace('"arguments": ', '"arguments":')
    expected = replace(
        TOOL_FORMATS["hermes"], opening="", name_close='", "arguments":', call_close="}</tool_call>", separator="\n"
    )
    assert find_tool_format(tokenizer(tight)) == expected


def test_markers_that_a_template_puts_together() -> None:
    """They stand in no text of the template, and in every prompt that it writes."""
    written = "{% set tag = 'think%s' | format(':opensource') %}" + HERMES.replace(
        "<|im_start|>assistant\n", "<|im_start|>assistant\n<{{ tag }}></{{ tag }}>"
    )
    assert find_reasoning(tokenizer(written)) == Reasoning("<think:opensource>", "</think:opensource>")


def test_tools_by_another_name() -> None:
    """SmolLM3's template reads `xml_tools`, functions without a wrapper, and renders no calls."""
    text = tokenizer(
        SILENT + "{% if xml_tools %}<tools>{% for t in xml_tools[:] %}{{ t.name }}{% endfor %}</tools> "
        "Answer with <tool_call></tool_call>{% endif %}"
    )
    form = find_tool_format(text)
    assert form is not None
    assert (form.family, form.rendered) == ("hermes", False)
    chat = [{"role": "user", "content": "?"}]
    for tool in ({"name": "add"}, {"type": "function", "function": {"name": "add"}}):
        assert "<tools>add</tools>" in text.render_chat(chat, [tool])
    assert "<tools>" not in text.render_chat(chat)


def test_a_list_behind_another_marker() -> None:
    form = find_tool_format(tokenizer(LISTED))
    assert form is not None
    assert (form.trigger, form.opening, form.closing, form.each) == ("<|calls|>", "[", "]", False)
    wrapped = LISTED.replace("<|calls|>[", "<calls>[{{ '\\n' }}").replace("%}]", "%}{{ '\\n' }}]</calls>")
    form = find_tool_format(tokenizer(wrapped))
    assert form is not None
    assert (form.trigger, form.opening, form.closing) == ("<calls>", "[\n", "\n]</calls>")


def test_the_template_that_is_used_with_tools_counts() -> None:
    text = tokenizer(None)
    text.hf.chat_template = {"default": SILENT, "tool_use": HERMES}
    assert find_tool_format(text) == TOOL_FORMATS["hermes"]


def test_the_demo_model() -> None:
    from transformers import AutoTokenizer

    demo = TextTokenizer(AutoTokenizer.from_pretrained(str(MODEL_PATH)))
    assert find_tool_format(demo) == TOOL_FORMATS["hermes"]
    assert find_reasoning(demo) is None


def test_reasoning_markers_are_in_the_template() -> None:
    assert find_reasoning(tokenizer(THINKING)) == Reasoning("<think>", "</think>")
    assert find_reasoning(tokenizer(THINKING.replace("think>", "seed:think>"))) == Reasoning(
        "<seed:think>", "</seed:think>"
    )
    assert find_reasoning(tokenizer(None)) is None
    # not every model of a vocabulary with such tokens reasons
    assert find_reasoning(tokenizer(HERMES, added=("<think>", "</think>"))) is None
    replaced = TextTokenizer(tokenizer(HERMES).hf, chat_template=THINKING)
    assert find_reasoning(replaced) == Reasoning("<think>", "</think>")


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("<|im_start|>assistant\n", "undecided"),
        ("", "undecided"),
        ("<|im_start|>assistant\n<think>", "open"),
        ("<|im_start|>assistant\n<think>\n", "open"),
        ("<|im_start|>assistant\n<think>\nWell", "open"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "closed"),
        ("<|im_start|>assistant\n</think>", "closed"),
        ("<|im_start|>assistant\n<think>\nWell</think>\n\nThe", "closed"),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", "undecided"),
        ("<think>a</think>b<|im_end|>\n<|im_start|>assistant\n", "undecided"),
        ("<think>a</think>b<|im_end|>\n<|im_start|>assistant\n<think>\n", "open"),
    ],
)
def test_where_a_prompt_leaves_the_model(tail: str, expected: str) -> None:
    assert state_of(tail, THINK, TURNS) == expected
    # markers may be special tokens themselves
    assert state_of(tail, THINK, (*TURNS, "<think>", "</think>")) == expected
    assert state_of(tail, None, TURNS) == "none"


def test_without_special_tokens_only_blanks_may_follow() -> None:
    assert state_of("USER: what is <think>? ASSISTANT:", THINK) == "undecided"
    assert state_of("ASSISTANT: <think>\n", THINK) == "open"
