"""Random outputs in every format with random budgets: chats are complete when the budget ends (contract line 15), and
whatever a grammar lets through, its parser understands.

The suite runs a slice. The full run: ASYNCENGINE_LONG=200 pytest tests/grammar/chat/test_budgets.py
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.data import cases_of
from support.grammar_walks import walk
from support.long import LONG, TIMES

from asyncengine.grammar.chat import ChatPlan, ChatPlanner
from asyncengine.grammar.chat.harmony import MARKS
from asyncengine.grammar.chat.schemas import check_tools
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.vocabulary import Vocabulary
from asyncengine.text.tokenizer import TextTokenizer

from .families import CASES
from .models import COMPACT, HERMES, JSON, LISTED, LLAMA, MARKED, MISTRAL, THINKING, TURNS, tokenizer
from .test_channels import TEMPLATE
from .test_formats import TOOLS

ROWS: dict[str, Any] = cases_of(__file__)

CASES_EACH = TIMES
CALL, THINK = ("<tool_call>", "</tool_call>"), ("<think>", "</think>")
BY_HAND: dict[str, tuple[Any, ...]] = {
    "hermes": (HERMES,), "hermes, special": (HERMES, (*TURNS, *CALL)), "hermes, added": (HERMES, TURNS, CALL),
    "thinking": (THINKING,), "thinking, special": (THINKING, (*TURNS, *THINK)),
    "thinking, added": (THINKING, TURNS, THINK),
    "llama": (LLAMA, ("<|start|>", "<|end|>", "<|eot|>", "<|python_tag|>")),
    "mistral": (MISTRAL, ("[INST]", "[/INST]", "[TOOL_CALLS]")), "mistral, compact": (COMPACT, ()),
    "mistral, args": (MARKED, ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]")), "mistral, args as text": (MARKED, ()),
    "json": (JSON,), "a list of json": (LISTED,),
}  # fmt: skip
"""Arguments of `tokenizer`. "added" are marks that are tokens, but ordinary text."""
ZOO: dict[str, tuple[Any, ...]] = {name: (case.template, (*TURNS, *case.special)) for name, case in CASES.items()}
EVERY_WISH = ("hermes, special", "thinking", "llama", "mistral, args", "a list of json")
"""Families that the short form asks in all ways, one of each kind of marks."""
FAMILIES = {**BY_HAND, **ZOO, "harmony": (TEMPLATE, MARKS)}
TREE = ROWS["tree"]
"""A recursive schema, with values that look like the marks of a call."""
ANSWER = ROWS["answer"]
OFFERED = [*TOOLS, TREE]
SCHEMAS = {tool.name: Draft202012Validator(dict(tool.schema)) for tool in check_tools(OFFERED)}
WISHES: dict[str, dict[str, Any]] = {
    "required": {"tools": OFFERED, "tool_choice": "required"},
    "auto": {"tools": OFFERED},
    "named": {"tools": OFFERED, "tool_choice": "tree"},
    "answer": {"response_format": ANSWER},
    "calls or answer": {"tools": OFFERED, "response_format": ANSWER},
    "none": {"tools": OFFERED, "tool_choice": "none"},
}
STRUCTURE = [bytes([byte]) for byte in b'{}"<[]0:,> \n']
"""Tokens that are drawn more often, beside special ones: amid text they are what a parser may take for marks."""


def vocabulary_of(text: TextTokenizer) -> Vocabulary:
    table = text.table
    assert text.eos_token_id is not None
    tokens = [table.token_bytes(i) for i in range(table.size)]
    return Vocabulary(tokens, [text.eos_token_id], table.special_ids, table.size, lambda s: text.encode(s, False))


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_the_budget_the_chat_is_complete(family: str) -> None:
    text = tokenizer(*FAMILIES[family])
    planner, vocabulary, rng = ChatPlanner(text), vocabulary_of(text), random.Random(family)
    structure = {i for i, data in enumerate(vocabulary.token_bytes) if data in STRUCTURE} | {*text.table.special_ids}
    structure -= {*vocabulary.eos_ids}
    backend, called = LlguidanceBackend(vocabulary), 0
    for wish in WISHES if family in EVERY_WISH or LONG else ("required",):
        for tail in ("<|im_start|>assistant\n", "<think>\n") if family.startswith("thinking") else ("",):
            plan = planner.plan(tail, **WISHES[wish])
            if plan.grammar is None:
                assert wish == "none"
                continue
            template = backend.compile(plan.grammar)
            least = max(template.min_tokens, 1)
            for budget in (least, *(least + rng.randrange(160) for _ in range(CASES_EACH))):
                prefer = structure if rng.random() < 0.5 else ()
                tokens, _ = walk(vocabulary, Matcher(template, budget, "close"), budget, rng, prefer=prefer)
                output = text.table.stream(plan.skip_special_tokens)
                shown = [token for token in tokens if token not in vocabulary.eos_ids]
                called += check(plan, output.push(shown) + output.finish(), wish)
    assert called >= CASES_EACH


def check(plan: ChatPlan, text: str, wish: str) -> int:
    """The number of calls in the output `text`, every one of which is complete and valid."""
    content, calls = text, []
    if plan.make_parser is not None:
        parser = plan.make_parser()
        parts = [*[parser.push(text[at : at + 3]) for at in range(0, len(text), 3)], parser.finish()]
        content, calls = "".join(part.text for part in parts), parser.finished_calls()
        assert not parser.finished_calls(complete=False), text
    for call in calls:
        SCHEMAS[call.name].validate(json.loads(call.arguments))
        assert wish != "named" or call.name == "tree"
    if wish in ("required", "named"):
        assert calls, text
        assert not content.strip(), text
    if wish == "answer" or (wish == "calls or answer" and not calls):
        Draft202012Validator(ANSWER).validate(json.loads(content))
    assert not (wish == "none" and calls), text
    return len(calls)
