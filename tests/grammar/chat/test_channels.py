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
THOUGHT = "<|channel|>analysis<|message|>I think {\n<|end|><|start|>assistant"
ASIDE = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": -2}'
ROLE_CALL = ' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1, "b": -2}'
FINAL = "<|channel|>final<|message|>It is <b>3</b>.\n"
ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = [ADD, ADDRESS]


MODELS = {"special": Model(TEMPLATE, MARKS), "text": Model(TEMPLATE, ())}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def read(plan: ChatPlan, pieces: list[str]) -> tuple[str, str, list[Any]]:
    assert plan.make_parser is not None
    parser = plan.make_parser()
    parts = [*[parser.push(piece) for piece in pieces], parser.finish()]
    calls = [[call.name, json.loads(call.arguments)] for call in parser.finished_calls()]
    return "".join(part.text for part in parts), "".join(part.reasoning for part in parts), calls


def test_what_may_be_said(model: Model) -> None:
    auto = model.planner.plan("<|start|>assistant", tools=TOOLS)
    right = [FINAL, CALL, ROLE_CALL, THOUGHT + CALL, THOUGHT + ASIDE + CALL, THOUGHT + THOUGHT + FINAL]
    wrong = [
        "", "text", THOUGHT, CALL[:-1], CALL.replace("-2", '"x"'), CALL.replace("add", "sub"), CALL + "x", CALL + CALL,
        "<|channel|>thoughts<|message|>x", FINAL + THOUGHT + FINAL,
    ]  # fmt: skip
    model.judge(auto.grammar, right, wrong)
    required = model.planner.plan("<|start|>assistant", tools=TOOLS, tool_choice="required")
    model.judge(required.grammar, [CALL, THOUGHT + CALL], [FINAL, THOUGHT + FINAL, ASIDE + CALL, *wrong])
    none = model.planner.plan("<|start|>assistant", tools=TOOLS, tool_choice="none")
    model.judge(none.grammar, [FINAL, THOUGHT + FINAL], [CALL, THOUGHT + CALL])
    shaped = model.planner.plan("<|start|>assistant", tools=TOOLS, response_format=ANSWER)
    model.judge(
        shaped.grammar,
        [THOUGHT + CALL, '<|channel|>final<|message|>{"n": 1}'],
        [FINAL, "<|channel|>final<|message|>{}"],
    )
    alone = model.planner.plan("<|start|>assistant", response_format=ANSWER)
    model.judge(alone.grammar, [THOUGHT + '<|channel|>final<|message|>{"n": 1}'], [FINAL, CALL, '{"n": 1}'])
    assert model.planner.plan("<|start|>assistant").grammar is None


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), table(__file__, "channels"))
def test_it_is_taken_apart_however_it_is_cut(text: str, content: str, reasoning: str, calls: list[Any]) -> None:
    plan = MODELS["special"].planner.plan("<|start|>assistant", tools=TOOLS)
    for pieces in ([text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))):
        assert read(plan, pieces) == (content, reasoning, calls), pieces
