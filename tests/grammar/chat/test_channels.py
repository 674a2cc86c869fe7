"""gpt-oss's channels: thoughts, words to the user and calls, constrained and taken apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.tables import table

from asyncengine.grammar.chat import ChatPlan
from asyncengine.grammar.chat.harmony import MARKS

from .models import ADD, ADDRESS, Model

TEMPLATE = """{% for m in messages %}{% if m.tool_calls %}{% set c = m.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if tools %}{# thoughts go to <|channel|>analysis<|message|> #}{% endif -%}
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
TOOLS = [ADD, ADDRESS]


def read(plan: ChatPlan, pieces: list[str]) -> tuple[str, str, list[Any]]:
    assert plan.make_parser is not None
    parser = plan.make_parser()
    parts = [*[parser.push(piece) for piece in pieces], parser.finish()]
    calls = [[call.name, json.loads(call.arguments)] for call in parser.finished_calls()]
    return "".join(part.text for part in parts), "".join(part.reasoning for part in parts), calls


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), table(__file__, "channels"))
def test_it_is_taken_apart_however_it_is_cut(text: str, content: str, reasoning: str, calls: list[Any]) -> None:
    plan = Model(TEMPLATE, MARKS).planner.plan("<|start|>assistant", tools=TOOLS)
    for pieces in ([text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))):
        assert read(plan, pieces) == (content, reasoning, calls), pieces


def test_without_tools_or_a_format_nothing_is_held() -> None:
    assert Model(TEMPLATE, MARKS).planner.plan("<|start|>assistant").grammar is None
