"""Limits: hostile grammars are refused by name before a library sees them, and what passes does not crash one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data import cases_of, spelled

from asyncengine.errors import GrammarError, GrammarTooLarge
from asyncengine.grammar import Grammar, check_limits
from asyncengine.grammar.limits import MAX_REPEAT

ROWS: dict[str, Any] = cases_of(__file__)


def refs(count: int, wrap: Callable[[dict[str, str]], dict[str, Any]] = lambda ref: ref) -> dict[str, Any]:
    """`count` definitions, each referring to the next."""
    definitions: dict[str, Any] = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "integer"}}}


def rules(count: int) -> str:
    """A chain of rules, each the next."""
    return spelled(["start: r0\n", ["r{n}: r{n+1}\n", count], f'r{count}: "a"\n'])


def nested(depth: int) -> dict[str, Any]:
    here: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        here = {"items": here}
    return here


schema = Grammar.json_schema


def made(kind: str, parts: list[Any]) -> Grammar:
    text = spelled(parts)
    if kind == "choice":
        return Grammar.choice(json.loads(text))
    return schema(text) if kind == "json" else Grammar(kind, text)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ROWS["refused"])
def test_hostile_grammars_are_refused_by_name(name: str) -> None:
    kind, parts, limit = ROWS["refused"][name]
    grammar = made(kind, parts)
    with pytest.raises(GrammarTooLarge) as caught:
        check_limits(grammar)
    assert limit in str(caught.value)
    assert len(str(caught.value)) < 300


def test_half_a_schema_in_lark_is_refused_at_once() -> None:
    for text in ("%json {" * 100_000, "%json " * 100_000, "%json " + "1" * 5_000, "%json"):
        with pytest.raises(GrammarError, match="JSON schema"):
            check_limits(Grammar.lark('start: "a"\n' + text))


@pytest.mark.parametrize("name", ROWS["allowed"])
def test_ordinary_grammars_pass(name: str) -> None:
    check_limits(made(*ROWS["allowed"][name]))


def test_limits_are_settings() -> None:
    with pytest.raises(GrammarTooLarge, match="20 bytes"):
        check_limits(schema({"description": "x" * 20}), max_bytes=20)
    with pytest.raises(GrammarTooLarge, match="3 levels"):
        check_limits(schema(nested(3)), max_depth=3)
    with pytest.raises(GrammarTooLarge, match="5 characters"):
        check_limits(Grammar.regex("aaaaaa"), max_regex=5)
    with pytest.raises(GrammarTooLarge, match="1 nested"):
        check_limits(Grammar.regex("((a))"), max_regex_depth=1)
    with pytest.raises(GrammarTooLarge, match="2 options"):
        check_limits(Grammar.choice(["a", "b", "c"]), max_choices=2)
    check_limits(schema(nested(100)), max_depth=200)


@pytest.mark.parametrize("order", [1, -1])
def test_a_chain_cannot_hide_behind_the_order_of_visiting(order: int) -> None:
    """Entering the far end first makes every later piece look short, in one of the two orders."""
    entries = [f"r{i}" for i in range(0, 500, 100)][::order]
    with pytest.raises(GrammarTooLarge, match="256 rules"):
        check_limits(Grammar.lark(rules(500).replace("start: r0", "start: " + " | ".join(entries))))
    definitions = refs(500)["$defs"]
    with pytest.raises(GrammarTooLarge, match="ref"):
        check_limits(schema({"anyOf": [{"$ref": f"#/$defs/d{name[1:]}"} for name in entries], "$defs": definitions}))


AT_THE_LIMIT = """
import sys, threading
sys.path[:0] = {root!r}, *{path!r}
from asyncengine.grammar import Grammar, check_limits
from asyncengine.grammar.llguidance_backend import with_rules
from asyncengine.grammar.limits import MAX_CHAIN
from tests.grammar.test_limits import nested, refs, rules
from tests.grammar.oracle import matcher

def work():
    for grammar in (
        Grammar.lark(rules(MAX_CHAIN - 2)),
        Grammar.lark(rules(MAX_CHAIN - 2).replace("r", "R").replace("staRt", "start")),
        Grammar.json_schema(refs(MAX_CHAIN - 2)),
        Grammar.json_schema(refs(MAX_CHAIN // 2 - 2, lambda ref: {{"items": ref}})),
        Grammar.json_schema(refs(MAX_CHAIN // 2 - 2, lambda ref: {{"anyOf": [ref, {{"type": "null"}}]}})),
        Grammar.json_schema(nested(62)),
        Grammar.regex("(" * 64 + "a" + ")*b" * 64),
    ):
        check_limits(grammar)
        print(matcher(grammar).get_error()[:80] or "ok", flush=True)

threading.stack_size(2 << 20)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_what_passes_does_not_overflow_a_quarter_of_the_usual_stack() -> None:
    """llguidance recurses along rules and references; beyond its stack it takes the process with it."""
    script = AT_THE_LIMIT.format(root=str(Path(__file__).parents[2]), path=[entry for entry in sys.path if entry])
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-500:]
    assert run.stdout.split("\n") == [*["ok"] * 7, ""]


def test_chains_are_counted_from_the_start_only() -> None:
    """Definitions nobody uses are never compiled, however long their chain."""
    unused = {"type": "integer", "$defs": refs(5_000)["$defs"]}
    check_limits(schema(unused))
    assert MAX_REPEAT == 10_000
