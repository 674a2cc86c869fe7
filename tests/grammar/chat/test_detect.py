"""Detection, from a template's renderings, of how a model writes calls and reasoning."""

from __future__ import annotations

import pytest
from support.tables import table

from asyncengine.grammar.chat import Reasoning, find_tool_format
from asyncengine.grammar.chat import reasoning_state as state_of

from .models import HERMES, LISTED, SILENT, TURNS, tokenizer  # fmt: skip

THINK = Reasoning("<think>", "</think>")


@pytest.mark.parametrize("template", [None, SILENT, HERMES.replace("c.function.name", "'x'")])
def test_a_template_without_calls_has_no_format(template: str | None) -> None:
    assert find_tool_format(tokenizer(template)) is None


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


@pytest.mark.parametrize(("tail", "expected"), table(__file__, "ends of prompts"))
def test_where_a_prompt_leaves_the_model(tail: str, expected: str) -> None:
    assert state_of(tail, THINK, TURNS) == expected
    # markers may be special tokens themselves
    assert state_of(tail, THINK, (*TURNS, "<think>", "</think>")) == expected
    assert state_of(tail, None, TURNS) == "none"


def test_without_special_tokens_only_blanks_may_follow() -> None:
    assert state_of("USER: what is <think>? ASSISTANT:", THINK) == "undecided"
    assert state_of("ASSISTANT: <think>\n", THINK) == "open"
