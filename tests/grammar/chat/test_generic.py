"""Tools for templates that read none: a text tells of them, and a mark before each answer lets the model choose."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from asyncengine.grammar.chat import ChatPlanner

from .models import ADD, ADDRESS, SILENT, tokenizer

TURNS = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}"
NO_SYSTEM = SILENT.replace("{% for m in messages %}", "{% for m in messages %}" + TURNS)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": None, "tool_calls": [call("add", a=1, b=2), call("add", a=3, b=4)]},
    {"role": "tool", "tool_call_id": "c", "content": "3"},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "7"}]},
]


@pytest.mark.parametrize("template", [SILENT, NO_SYSTEM])
def test_tools_calls_and_results_reach_the_model(template: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the template knows no system, and insists on turns: results are one turn, with what the user adds."""
    text = tokenizer(template)
    rewrite = ChatPlanner(text).rewrite
    later = [*HISTORY, {"role": "user", "content": "And?"}]
    with caplog.at_level(logging.WARNING, "asyncengine"):
        shown = [text.render_chat(chat, [ADD, ADDRESS], rewrite=rewrite) for chat in (HISTORY, later)]
    if template is SILENT:
        first, question, answer, results = shown[0].split("<|im_start|>")[1:]
        assert first.startswith("system\n")
    else:
        question, answer, results = shown[0].split("<|im_start|>")[1:]
        first = question
        assert question.endswith("\n\nAdd.<|im_end|>\n")
    assert json.dumps(ADD) in first
    assert json.dumps(ADDRESS) in first
    assert '<tool_call>\n{"name": "NAME"' in first
    assert answer.count("</tool_call>") == 2
    assert '{"name": "add", "arguments": {"a": 3, "b": 4}}' in answer
    said = "user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>"
    assert results == f"{said}<|im_end|>\n"
    assert shown[1].endswith(f"{said}\nAnd?<|im_end|>\n")
    assert len([each for each in caplog.records if "reads no tools" in each.message]) == 1


def test_without_tools_nothing_is_different() -> None:
    assert ChatPlanner(tokenizer(SILENT)).plan("").grammar is None
