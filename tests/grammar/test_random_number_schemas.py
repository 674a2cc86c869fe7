"""Random schemas full of bounds, random walks through them: what is generated is valid, whatever the budget."""

from __future__ import annotations

import json
import random
from typing import Any

from support.grammar_walks import text_of, walk
from support.long import TIMES
from support.schema_check import Checker
from support.small_grammars import shared_vocabulary

from asyncengine.errors import GrammarError
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.matcher import Matcher

SCHEMAS = 80 * TIMES


def bounded(rng: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(["integer", "number", ["number", "null"], "integer"])}
    low = rng.choice([0, -5, 1, 0.5, 10**18 + 1, 2**53 + 3, -(2**63), 99.95])
    if rng.random() < 0.7:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.7:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([1, 2, 5, 0.25, 1000, 10**20])
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice([2, 5, 0.5, 3, 0.01, 7])
    return schema


def nested(rng: random.Random, depth: int) -> dict[str, Any]:
    """Objects are closed: undeclared keys may come twice, which is a known limit."""
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return bounded(rng)
    if kind < 0.5:
        return rng.choice([{"type": "string", "maxLength": 5}, {"enum": ["a", 1, [2**60]]}, {"const": 2**63}])
    below = [nested(rng, depth - 1) for _ in range(3)]
    if kind < 0.7:
        names = rng.sample("abc", rng.randrange(1, 4))
        needed = rng.sample(names, rng.randrange(len(names) + 1))
        properties = dict(zip(names, below, strict=False))
        return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
    if kind < 0.85:
        least = rng.randrange(3)
        return {"type": "array", "items": below[0], "prefixItems": below[1:2], "minItems": least, "maxItems": least + 2}
    return {rng.choice(["anyOf", "allOf"]): below[:2]}


def test_what_is_generated_keeps_every_bound() -> None:
    rng = random.Random(11)
    vocabulary = shared_vocabulary()
    backend = LlguidanceBackend(vocabulary)
    walks = 0
    for index in range(SCHEMAS):
        schema = nested(rng, 3)
        try:
            template = backend.compile(Grammar.json_schema(schema))
        except GrammarError:
            continue  # impossible, or refused by name
        checker = Checker(schema)
        for _ in range(3):
            budget = template.min_tokens + rng.randrange(60)
            tokens, _ = walk(vocabulary, Matcher(template, budget, "close"), budget, random.Random(index))
            fault = checker.text_fault(text_of(vocabulary, tokens))
            assert fault is None, (json.dumps(schema), text_of(vocabulary, tokens), fault)
            walks += 1
    assert walks > 1.5 * SCHEMAS
