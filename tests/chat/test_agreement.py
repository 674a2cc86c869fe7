"""Whatever a grammar lets through, its parser understands: random outputs, drawn token by token from the masks."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from chat.models import (
    ADD,
    ADD_SCHEMA,
    ADDRESS,
    COMPACT,
    HERMES,
    JSON,
    LISTED,
    LLAMA,
    MARKED,
    MISTRAL,
    THINKING,
    TURNS,
    Oracle,
    tokenizer,
)

from asyncengine.chat import ChatPlanner
from asyncengine.grammar import Grammar

TREE = {
    "name": "tree",
    "parameters": {
        "properties": {"tree": {"$ref": "#/$defs/Tree"}, "name": {"enum": ["<tool_call>", '"}', "add"]}},
        "required": ["tree"],
        "$defs": {"Tree": {"properties": {"next": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}}}},
    },
}
FORMAT = {"properties": {"name": {"enum": ["add", "x", "<tool_call>"]}}, "required": ["name"], "type": "object"}
FAMILIES = {
    "hermes": (HERMES, TURNS),
    "hermes-special": (HERMES, (*TURNS, "<tool_call>", "</tool_call>")),
    "thinking": (THINKING, (*TURNS, "<think>", "</think>")),
    "thinking-text": (THINKING, TURNS),
    "mistral": (MISTRAL, ("[TOOL_CALLS]",)),
    "compact": (COMPACT, ()),
    "marked": (MARKED, ("[TOOL_CALLS]", "[ARGS]")),
    "marked-text": (MARKED, ()),
    "llama3": (LLAMA, (*TURNS, "<|python_tag|>")),
    "json": (JSON, TURNS),
    "listed": (LISTED, TURNS),
}
STARTERS = b'{}"<[]0:,> \n'
LIMIT = 700


def drawn(oracle: Oracle, grammar: Grammar, rng: random.Random) -> str | None:
    """An output, preferring tokens that structure it; None if it did not end in time."""
    matcher = oracle.matcher(grammar)
    ids: list[int] = []
    rare = [i for i, data in enumerate(oracle.tokens) if data in [bytes([byte]) for byte in STARTERS]]
    rare += [i for i in oracle.special_token_ids if i != oracle.eos_token_id]
    for _ in range(LIMIT):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [i for i in range(len(oracle.tokens)) if mask >> i & 1]
        if oracle.eos_token_id in allowed and (len(allowed) == 1 or rng.random() < 0.3):
            return b"".join(oracle.tokens[i] for i in ids).decode("utf-8", "replace")
        allowed = [i for i in allowed if i != oracle.eos_token_id]
        structural = [i for i in allowed if i in rare]
        token = rng.choice(structural if structural and rng.random() < 0.6 else allowed)
        assert matcher.consume_token(token)
        ids.append(token)
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_random_outputs_are_understood(family: str) -> None:
    template, special = FAMILIES[family]
    text = tokenizer(template, special)
    planner, oracle = ChatPlanner(text), Oracle(text)
    tools = [ADD, ADDRESS, TREE]
    schemas = {"add": ADD_SCHEMA, "add_address": ADDRESS["parameters"], "tree": TREE["parameters"]}
    rng = random.Random(family)
    called = 0
    for choice, answer in (("auto", None), ("required", None), ("tree", None), ("auto", FORMAT), ("none", None)):
        for tail in ("", "<think>\n") if planner.reasoning else ("",):
            plan = planner.plan(tail, tools=tools, tool_choice=choice, response_format=answer)
            if plan.grammar is None or plan.make_parser is None:
                continue
            for _ in range(4):
                output = drawn(oracle, plan.grammar, rng)
                if output is None:
                    continue
                parser = plan.make_parser()
                content = parser.push(output).text + parser.finish().text
                calls = parser.finished_calls()
                called += len(calls)
                assert not parser.broken_calls(), output
                for call in calls:
                    jsonschema.validate(json.loads(call.arguments), schemas[call.name])
                if choice in ("required", "tree"):
                    assert calls, output
                    assert not content, output
                if choice == "tree":
                    assert [call.name for call in calls] == ["tree"]
                if answer is not None and not calls:
                    jsonschema.validate(json.loads(content), answer)
    assert called > 3
