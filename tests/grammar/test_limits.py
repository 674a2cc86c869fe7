"""Limits: hostile grammars are refused by name before a library sees them, and what passes does not crash one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncengine.errors import GrammarError, GrammarTooLarge
from asyncengine.grammar import Grammar, check_limits
from asyncengine.grammar.limits import MAX_CHAIN, MAX_LITERAL, MAX_REPEAT


def refs(count: int, wrap: Callable[[dict[str, str]], dict[str, Any]] = lambda ref: ref) -> dict[str, Any]:
    """`count` definitions, each referring to the next."""
    definitions: dict[str, Any] = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "integer"}}}


def rules(count: int, order: int = 1) -> str:
    lines = [f"r{i}: r{i + 1}" for i in range(count)]
    return "\n".join(["start: r0", *lines[::order], f'r{count}: "a"']) + "\n"


def scattered(count: int) -> str:
    """A chain whose rules are written so that a walk in text order, either way, meets only short pieces first."""
    lines = [f"r{i}: r{i + 1}" for i in range(count)]
    return "\n".join([*lines[count // 2 :], *lines[: count // 2], f'r{count}: "a"', "start: r0"]) + "\n"


def star(count: int) -> dict[str, Any]:
    """Many definitions, none deep."""
    definitions = {f"d{i}": {"items": {"$ref": "#"}} for i in range(count)}
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions], "$defs": definitions}


def wide(count: int) -> str:
    return f"start: {' | '.join(f'r{i}' for i in range(count))}\n" + "".join(f'r{i}: "a{i}"\n' for i in range(count))


def nested(depth: int) -> dict[str, Any]:
    here: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        here = {"items": here}
    return here


schema = Grammar.json_schema
REFUSED = {
    "bytes": (lambda: schema({"description": "x" * (1 << 20)}), "1048576 bytes"),
    "bytes, not letters": (lambda: schema({"description": "é" * (600 << 10)}), "1048576 bytes"),
    "enum of 10 MB": (lambda: schema({"enum": [f"x{i:09}" * 10 for i in range(100_000)]}), "1048576 bytes"),
    "patterns of names": (lambda: schema({"patternProperties": {f"^p{i}": {} for i in range(251)}}), "250 pattern"),
    "depth": (lambda: schema(nested(64)), "64 levels"),
    "depth of data": (lambda: schema({"const": json.loads("[" * 64 + "]" * 64)}), "64 levels"),
    "groups": (lambda: Grammar.regex("(" * 30_000 + "a" + ")" * 30_000), "64 nested groups"),
    "regex size": (lambda: Grammar.regex("ab" * (33 << 10)), "65536 characters"),
    "repetition": (lambda: Grammar.regex("a{1000000}"), "10000 times"),
    "optional repetition": (lambda: Grammar.regex("a{0,1000000}"), "10000 times"),
    "endless digits": (lambda: Grammar.regex("a{" + "1" * 5_000 + "}"), "10000 times"),
    "nested repetition": (lambda: Grammar.regex("(?:(?:a{100}){100}){100}"), "shortest match"),
    "many repetitions": (lambda: Grammar.regex("a{9999}" * 7), "shortest match"),
    "repetition in an alternative": (lambda: Grammar.regex("b|(?:a{1000}){100}"), "shortest match"),
    "items that may be left out": (lambda: Grammar.regex("a?" * 2_001), "2000 items"),
    "groups that may be left out": (lambda: Grammar.regex("(?:ab){0,9}" * 2_001), "2000 items"),
    "Lark that may be left out": (lambda: Grammar.lark("start: " + '"a"? ' * 2_001), "2000 items"),
    "pattern in a schema": (lambda: schema({"items": {"pattern": "a{1000000}"}}), "10000 times"),
    "pattern in keys": (lambda: schema({"patternProperties": {"(" * 70 + "a" + ")" * 70: {}}}), "64 nested groups"),
    "whitespace pattern": (lambda: schema({"x-guidance": {"whitespace_pattern": "a{1000000}"}}), "10000 times"),
    "constant": (lambda: schema({"enum": [1, ["a" * (MAX_LITERAL + 1)]]}), "literal text"),
    "key": (lambda: schema({"properties": {"a" * (MAX_LITERAL + 1): {}}}), "literal text"),
    "references by escaped pointers": (
        lambda: schema({"$defs": {f"d{i}": {"$ref": f"#/%24defs/d{i + 1}"} for i in range(400)}, "$ref": "#/$defs/d0"}),
        "nesting through",
    ),
    "references by anchors": (
        lambda: schema(
            {"$defs": {f"d{i}": {"$anchor": f"a{i}", "$ref": f"#a{i + 1}"} for i in range(400)}, "$ref": "#a0"}
        ),
        "nesting through",
    ),
    "references by addresses": (
        lambda: schema(
            {
                "$id": "http://x/y",
                "$defs": {f"d{i}": {"$id": f"a{i}", "$ref": f"a{i + 1}"} for i in range(400)},
                "$ref": "a0",
            }
        ),
        "nesting through",
    ),
    "minItems": (lambda: schema({"minItems": 10**9}), "minItems must not exceed 10000"),
    "minLength": (lambda: schema({"items": {"minLength": MAX_LITERAL + 1}}), "minLength must not exceed 65536"),
    "minLength, a float": (lambda: schema({"minLength": 1e9}), "minLength must not exceed 65536"),
    "minProperties": (lambda: schema({"minProperties": 10**9}), "minProperties must not exceed 10000"),
    "minLength in Lark": (lambda: Grammar.lark('start: %json {"minLength": 1000000000}'), "minLength"),
    "multipleOf": (lambda: schema({"multipleOf": 999_983}), "multipleOf"),
    "common multiple": (lambda: schema({"allOf": [{"multipleOf": p} for p in (7, 11, 13, 17, 19)]}), "multipleOf"),
    "fraction": (lambda: schema({"multipleOf": 999.983}), "multipleOf"),
    "references": (lambda: schema(refs(MAX_CHAIN)), "$ref"),
    "references, 10,000": (lambda: schema(refs(10_000)), "$ref"),
    "references through items": (lambda: schema(refs(MAX_CHAIN // 2, lambda ref: {"items": ref})), "$ref"),
    "choices": (lambda: Grammar.choice([str(i) for i in range(10_001)]), "10000 options"),
    "long choice": (lambda: Grammar.choice(["a" * (MAX_LITERAL + 1), "b"]), "literal text"),
    "Lark parentheses": (lambda: Grammar.lark("start: " + "(" * 60_000 + '"a"' + ")" * 60_000), "64 levels"),
    "Lark rules": (lambda: Grammar.lark(rules(MAX_CHAIN)), "256 rules"),
    "Lark rules, 5,000": (lambda: Grammar.lark(rules(5_000)), "256 rules"),
    "Lark rules backwards": (lambda: Grammar.lark(rules(5_000, -1)), "256 rules"),
    "Lark rules scattered": (lambda: Grammar.lark(scattered(5_000)), "256 rules"),
    "Lark rules side by side": (
        lambda: Grammar.lark(
            "start: " + " | ".join(f"r{i}" for i in range(16_000)) + "".join(f'\nr{i}: "a"' for i in range(16_000))
        ),
        "16000 rules and groups",
    ),
    "Lark terminals": (lambda: Grammar.lark(rules(5_000).replace("r", "R").replace("staRt", "start")), "256 rules"),
    "Lark repetition": (lambda: Grammar.lark('start: "a"{1000000}'), "10000 times"),
    "Lark regex": (lambda: Grammar.lark("start: /a{1000000}/"), "10000 times"),
    "Lark literal": (lambda: Grammar.lark('start: "' + "a" * (MAX_LITERAL + 1) + '"'), "literal text"),
    "Lark schema": (lambda: Grammar.lark('start: %json {"pattern": "a{1000000}"}'), "10000 times"),
    "Lark schema depth": (lambda: Grammar.lark("start: %json " + '{"items":' * 70 + "{}" + "}" * 70), "64 levels"),
    "Lark schema depth, 100,000": (lambda: Grammar.lark("start: %json " + "[" * 100_000), "nests too deeply"),
    "Lark quotes": (lambda: Grammar.lark('start: "a"\n' + '"\\' * 500_000), "literal text"),
    "Lark slashes": (lambda: Grammar.lark('start: "a"\n' + "/\\" * 500_000), "65536 characters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_grammars_are_refused_by_name(name: str) -> None:
    make, limit = REFUSED[name]
    grammar = make()
    with pytest.raises(GrammarTooLarge) as caught:
        check_limits(grammar)
    assert limit in str(caught.value)
    assert len(str(caught.value)) < 300


def test_half_a_schema_in_lark_is_refused_at_once() -> None:
    for text in ("%json {" * 100_000, "%json " * 100_000, "%json " + "1" * 5_000, "%json"):
        with pytest.raises(GrammarError, match="JSON schema"):
            check_limits(Grammar.lark('start: "a"\n' + text))


ALLOWED = {
    "depth": lambda: schema(nested(62)),
    "groups": lambda: Grammar.regex("(" * 64 + "a" + ")" * 64),
    "brackets that are text": lambda: Grammar.regex(r"[({\[]*\(\(" * 100 + r"\{1000000\}"),
    "repetition": lambda: Grammar.regex("a{10000}b{0,10000}"),
    "optional repetitions": lambda: Grammar.regex("(?:a{0,1000}){0,1000}"),
    "long description": lambda: schema({"description": "x" * 200_000}),
    "brackets in strings": lambda: schema({"const": "[{" * 1000}),
    "least counts": lambda: schema({"minLength": MAX_LITERAL, "minItems": MAX_REPEAT, "minProperties": MAX_REPEAT}),
    "multiples": lambda: schema({"properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 10**9}}}),
    "bad multiple": lambda: schema({"multipleOf": -1, "properties": {"multipleOf": {"minimum": 0}}}),
    "recursion": lambda: schema({"items": {"$ref": "#"}, "anyOf": [{"$ref": "#/items"}, {"$ref": "#/nowhere"}]}),
    "star of references": lambda: schema(star(2_000)),
    "references": lambda: schema(refs(MAX_CHAIN - 2)),
    "choices": lambda: Grammar.choice([str(i) for i in range(10_000)]),
    "Lark rules": lambda: Grammar.lark(rules(MAX_CHAIN - 2)),
    "recursive Lark": lambda: Grammar.lark('start: "(" start ")" | "x"\n'),
    "many Lark rules": lambda: Grammar.lark(wide(2_000)),
    "Lark text with brackets": lambda: Grammar.lark('start: "((((" /\\(\\(/ // ((((\n' + "# [[[[\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_ordinary_grammars_pass(name: str) -> None:
    check_limits(ALLOWED[name]())


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
from tests.grammar.test_limits import MAX_CHAIN, nested, refs, rules
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
