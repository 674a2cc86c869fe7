"""Odd grammars that pass the limits: the library ends none of them in a crash, and its panics are errors."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data import cases_of
from support.long import TIMES
from support.small_grammars import shared_vocabulary

from asyncengine.errors import GrammarError
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend

ROWS: dict[str, Any] = cases_of(__file__)

GRAMMARS = 25 * TIMES


def test_a_panic_of_the_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no `Exception`, so that nobody who waits would hear of it."""
    backend = LlguidanceBackend(shared_vocabulary())
    panic = type("PanicException", (BaseException,), {})

    def panics(*args: Any) -> Any:
        raise panic("index out of bounds")

    monkeypatch.setattr(LlgTemplate, "fresh_matcher", panics)
    with pytest.raises(GrammarError, match="panicked: index out of bounds"):
        backend.compile(Grammar.regex("a"))
    backend.close()


ENDLESS = ROWS["endless"]


@pytest.mark.parametrize("name", ENDLESS)
def test_text_that_has_to_come_for_ever_is_not_looked_for(name: str) -> None:
    """The library would look for its end for ever: in a worker, or in the thread that all outputs wait for."""
    vocabulary = shared_vocabulary()
    ended: list[object] = []

    def work() -> None:
        try:
            template = LlguidanceBackend(vocabulary).compile(Grammar.lark(ENDLESS[name]))
        except GrammarError as error:
            ended.append(error)
            return
        state = template.new_state()
        mask = np.zeros(vocabulary.mask_words, dtype=np.int32)
        taken = [state.consume(byte) for byte in (*b"a  ", *"éé".encode())]
        state.fill(mask)
        state.forced()
        ended.append(taken)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert ended


@pytest.mark.parametrize(("lark", "endless"), ROWS["where_it_may_be_looked_for"])
def test_where_it_may_be_looked_for(lark: str, endless: bool) -> None:
    """Text that has to come is otherwise cut as the tokenizer would, and costs no steps."""
    template = LlguidanceBackend(shared_vocabulary()).compile(Grammar.lark(lark))
    assert ("no_forcing" in template.text) == endless


def random_grammar(rng: random.Random) -> Grammar:
    """A small and odd grammar: every keyword, extreme counts and numbers, any pattern, any Lark."""
    match rng.randrange(4):
        case 0:
            return Grammar("regex", random_pattern(rng, 4))
        case 1:
            rules = [f"r{i}: {random_body(rng, 3)}" for i in range(3)]
            return Grammar("lark", "\n".join(["start: r0", *rules]) + "\n")
    return Grammar("json_schema", json.dumps(random_schema(rng, 3)))


def random_pattern(rng: random.Random, depth: int) -> str:
    parts = []
    for _ in range(rng.randrange(1, 4)):
        atom = rng.choice(["a", ".", "[^a]", r"\w", r"\p{L}", "(?i:k)", "é", r"[\s\S]", "[a-z0-9]", ""])
        if depth and rng.random() < 0.5:
            atom = f"({random_pattern(rng, depth - 1)})"
        parts.append(atom + (rng.choice(["", "*", "+", "?", "{3}", "{0,100}", "{9999}", "{2,}", "|"]) if atom else "|"))
    return "".join(parts)


def random_body(rng: random.Random, depth: int) -> str:
    simple = ['"a"', "/[a-z]+/", '""', "r0", "r1", "r2", "/a|ab/", '%json {"type": "string", "maxLength": 1000}']
    if not depth:
        return rng.choice(simple)
    inner = [random_body(rng, depth - 1) for _ in range(2)]
    return rng.choice(
        [*simple, f"({inner[0]} | {inner[1]})", " ".join(inner), f"({inner[0]})*", f"({inner[0]}){{0,500}}"]
    )


def random_schema(rng: random.Random, depth: int) -> Any:
    numbers = [0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63), 10**30, 0.1, 1e-300, 1e308, 5e-324, -0.0, 7, 10**9, 100]
    schema: dict[str, Any] = {}
    for _ in range(rng.randrange(4)):
        number = rng.choice(numbers)
        key = rng.choice([
            "type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum",
            "minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "minProperties", "maxProperties",
            "items", "prefixItems", "properties", "additionalProperties", "patternProperties", "allOf", "anyOf",
            "oneOf", "$ref", "required", "not", "$defs",
        ])  # fmt: skip
        below = random_schema(rng, depth - 1) if depth else rng.choice([{}, True, False, {"type": "integer"}])
        match key:
            case "type":
                schema[key] = rng.choice(["integer", "number", "string", "array", "object", ["null", "number"]])
            case "enum" | "const":
                schema[key] = (
                    [number, "a", [number]] if key == "enum" else rng.choice([number, {"a": number}, [number]])
                )
            case "pattern":
                schema[key] = random_pattern(rng, 2)
            case "format":
                schema[key] = rng.choice(["date-time", "email", "uri", "ipv6"])
            case "prefixItems" | "allOf" | "anyOf" | "oneOf":
                schema[key] = [below, random_schema(rng, depth - 1) if depth else {}]
            case "properties" | "$defs" | "patternProperties":
                schema[key] = {"a": below}
            case "items" | "additionalProperties" | "not":
                schema[key] = below
            case "$ref":
                schema[key] = rng.choice(["#", "#/$defs/a", "#/properties/a", "#/allOf/0"])
            case "required":
                schema[key] = ["a"]
            case _:
                schema[key] = number
    return schema


CHILD = """
import json, sys, threading
from asyncengine.errors import GrammarError
from asyncengine.grammar import Grammar
from asyncengine.grammar.limits import check_limits
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.service import STACK_BYTES
from support.small_grammars import shared_vocabulary

def work():
    backend = LlguidanceBackend(shared_vocabulary())
    for line in sys.stdin:
        kind, text = json.loads(line)
        print(line, end="", flush=True)
        try:
            grammar = Grammar(kind, text)
            check_limits(grammar)
            backend.compile(grammar)
        except GrammarError as error:
            assert len(str(error)) < 2000, error
    print("done")
    backend.close()

threading.stack_size(STACK_BYTES)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_no_grammar_crashes_the_process() -> None:
    """Random grammars in a process of their own; only typed errors. ASYNCENGINE_LONG=800 runs 20,000."""
    rng = random.Random(7)
    made: list[Grammar] = []
    while len(made) < GRAMMARS:
        try:
            made.append(random_grammar(rng))
        except GrammarError:
            continue
    lines = "".join(json.dumps([grammar.kind, grammar.text]) + "\n" for grammar in made)
    tests = str(Path(__file__).parent.parent)
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=lines,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])},
        timeout=60 + GRAMMARS,
        check=False,
    )
    heard = child.stdout.splitlines()
    assert heard[-1:] == ["done"], (child.returncode, heard[-1:], child.stderr[-2000:])
