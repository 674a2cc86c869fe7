"""Every family of the table: its calls and its reasoning are recognised, held to a schema and taken apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from asyncengine.grammar.chat import ChatPlanner, reasoning_state
from asyncengine.text.tokenizer import TextTokenizer

from .families import FAMILIES, Family
from .models import ADD, Oracle, tokenizer

HOWTO = Path(__file__).parents[3] / "docs" / "howto" / "tools_and_agents.md"
ASK = {"role": "user", "content": "?"}
THOUGHT = "1 < 2, so\n\nI add"
CALLS = [{"a": 1, "b": 2}, {"a": 30, "b": -4}]
ID = re.compile(r', "id": "\w+"|\[CALL_ID\]\w+')


def test_the_documentation_names_these_families() -> None:
    """A family that is lost here would still be promised there."""
    rows = re.findall(r"^\| (`[^|]+) \|.*\| ([^|]+) \|$", HOWTO.read_text(encoding="utf-8"), re.MULTILINE)
    promised = [(name, re.findall(r"`(\w+)`", forms)) for forms, names in rows for name in re.split("[;,] ", names)][1:]
    assert sorted(name for name, _ in promised) == sorted(FAMILIES)
    assert [name for name, forms in promised if FAMILIES[name].form not in forms] == []


def written(family: Family, text: TextTokenizer, planner: ChatPlanner, calls: list[Any], thought: str) -> str:
    """The text that the model writes behind the prompt for these calls, by its own template."""
    made = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": "add", "arguments": arguments}}
        for i, arguments in enumerate(calls)
    ]
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": made,
        **({"reasoning_content": thought} if thought else {}),
    }
    shown = text.render_chat([ASK, answer], add_generation_prompt=False, rewrite=planner.rewrite)  # type: ignore[arg-type]
    before, between, behind = family.turn
    answered = shown[len(before + "?" + between) : len(shown) - len(behind)]
    return answered.removeprefix(family.prompt) if thought else answered


@pytest.mark.parametrize("name", FAMILIES)
def test_recognised_held_to_and_taken_apart(name: str) -> None:
    family = FAMILIES[name]
    text = tokenizer(family.template, family.special)
    planner, oracle = ChatPlanner(text), Oracle(text)
    form, marks = planner.tool_format, planner.reasoning
    assert form is not None
    assert (form.family, form.rendered) == (family.form, bool(family.calls))
    assert form.closing.strip() or not form.is_object or not form.closing  # blanks behind calls are the turn's
    prompt = text.render_chat([ASK], [ADD], add_generation_prompt=True)
    state = reasoning_state(prompt, marks, (*family.special, *family.turn))
    if family.think is None:
        assert (marks, state) == (None, "none")
    else:
        assert marks is not None
        assert family.think[0].strip().startswith(marks.start)
        assert family.think[1].strip().startswith(marks.end)
        closed = marks.end in family.prompt
        assert state == ("closed" if closed else "open" if family.prompt else "undecided")
    thought = THOUGHT if state in ("open", "undecided") else ""
    calls = CALLS[:1] if family.one else CALLS
    plan = planner.plan(prompt, tools=[ADD], tool_choice="required")
    assert plan.grammar is not None
    assert plan.make_parser is not None
    right = written(family, text, planner, calls, thought)
    held = ID.sub("", right.lstrip())  # ids are ours
    assert oracle.refused_at(plan.grammar, held) is None
    wrong = written(family, text, planner, [{"a": "x", "b": 2}], thought)
    for output in (ID.sub("", wrong.lstrip()), f"{thought}text", held[:-1]):
        assert oracle.refused_at(plan.grammar, output) is not None, output
    parser = plan.make_parser()
    parts = [*map(parser.push, right), parser.finish()]
    assert "".join(part.reasoning for part in parts) == thought
    assert "".join(part.text for part in parts).strip() == ""
    assert [(call.name, json.loads(call.arguments)) for call in parser.finished_calls()] == [("add", c) for c in calls]
    pieces = "".join(delta.arguments for part in parts for delta in part.tool_calls)
    assert pieces == "".join(call.arguments for call in parser.finished_calls())
    if thought and marks is not None and not in_channels(family):
        unclosed = right.replace(marks.end, "", 1)  # a call that is only thought of
        assert oracle.refused_at(plan.grammar, ID.sub("", unclosed.lstrip())) is not None
        for pieces_of_it in (list(unclosed), [unclosed]):
            parser = plan.make_parser()
            parts = [*map(parser.push, pieces_of_it), parser.finish()]
            assert "".join(part.text for part in parts) == ""
            assert parser.finished_calls() == []


def in_channels(family: Family) -> bool:
    """True if thoughts and calls have channels of their own: then none is inside another."""
    return family.form == "harmony"
