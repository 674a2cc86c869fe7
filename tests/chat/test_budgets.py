"""Contract line 15 for chats: reasoning, tool calls and formatted answers are complete when the budget ends."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from chat.models import ADD, ADD_SCHEMA, HERMES, JSON, LLAMA, MARKED, MISTRAL, THINKING, TURNS, tokenizer
from jsonschema import Draft202012Validator
from support.grammar_walks import walk

from asyncengine.chat import ChatPlanner
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.vocabulary import Vocabulary
from asyncengine.text import TextTokenizer

ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (HERMES, TURNS, ()),
    "hermes, added tokens": (HERMES, TURNS, ("<tool_call>", "</tool_call>")),
    "thinking": (THINKING, TURNS, ("<think>", "</think>")),
    "thinking, special": (THINKING, (*TURNS, "<think>", "</think>"), ()),
    "llama": (LLAMA, ("<|start|>", "<|end|>", "<|eot|>", "<|python_tag|>"), ()),
    "mistral": (MISTRAL, ("[INST]", "[/INST]", "[TOOL_CALLS]"), ()),
    "mistral, args": (MARKED, ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"), ()),
    "json": (JSON, TURNS, ()),
}
WISHES: dict[str, dict[str, Any]] = {
    "required": {"tools": [ADD], "tool_choice": "required"},
    "auto": {"tools": [ADD]},
    "answer": {"response_format": ANSWER},
    "calls or answer": {"tools": [ADD], "response_format": ANSWER},
}


def vocabulary_of(text: TextTokenizer) -> Vocabulary:
    table = text.table
    assert text.eos_token_id is not None
    tokens = [table.token_bytes(i) for i in range(table.size)]
    return Vocabulary(tokens, [text.eos_token_id], table.special_ids, table.size, lambda s: text.encode(s, False))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wish", WISHES)
def test_whatever_the_budget_the_chat_is_complete(family: str, wish: str) -> None:
    text = tokenizer(*FAMILIES[family])
    plan = ChatPlanner(text).plan("<|im_start|>assistant\n", **WISHES[wish])
    assert plan.grammar is not None
    vocabulary = vocabulary_of(text)
    template = LlguidanceBackend(vocabulary).compile(plan.grammar, 10)
    rng = random.Random(f"{family} {wish}")
    for budget in [template.min_tokens, *(template.min_tokens + rng.randrange(120) for _ in range(6))]:
        matcher = Matcher(template, max(budget, 1), "close")
        tokens, _ = walk(vocabulary, matcher, max(budget, 1), rng)
        output = text.table.stream(plan.skip_special_tokens)
        shown = [token for token in tokens if token not in vocabulary.eos_ids]
        check(plan, output.push(shown) + output.finish(), wish)


def check(plan: Any, text: str, wish: str) -> None:
    content = text
    calls: list[Any] = []
    if plan.make_parser is not None:
        parser = plan.make_parser()
        parts = [parser.push(text), parser.finish()]
        content = "".join(part.text for part in parts)
        calls = parser.finished_calls()
        assert not parser.broken_calls(), text
    for call in calls:
        Draft202012Validator(ADD_SCHEMA).validate(json.loads(call.arguments))
    if wish == "required":
        assert calls, text
    if wish == "answer" or (wish == "calls or answer" and not calls):
        Draft202012Validator(ANSWER).validate(json.loads(content))
