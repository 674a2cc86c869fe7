"""CPU time to compile JSON schemas, with and without bounds, beside the grammar library alone in the same process.

    python -m benchmarks.grammar_compile [--size 151k --schemas 200 --rounds 3 --folder DIR --json]

The schemas are generated here (objects of 3 to 60 properties, nested, some recursive; every second one has lengths,
counts, patterns or formats). `--folder` takes JSON files in their place: schemas, or objects that hold one under
"schema", as JSONSchemaBench and MaskBench have them. Each schema is compiled `--rounds` times by both, one after the
other, and the fastest counts.

* ours: from the schema to the first mask and the first step of a request with an ample budget: checking its limits,
  lowering, the library's own compiling, and what steers an output to its end. steered: the same with the least budget,
  which is counted in full.
* library: `LLMatcher` on the schema as it is, and its first mask. Only schemas that both take are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from asyncengine.errors import EngineError
from asyncengine.grammar import Grammar, check_limits
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.vocabulary import Vocabulary
from benchmarks.grammar_setup import WIDTHS, spread, vocabulary

AMPLE = 8192
BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "pattern", "format", "minimum", "maximum")
clock = time.process_time
"""CPU time: other work on the machine counts for neither."""


def plain(rng: random.Random) -> dict[str, Any]:
    """A schema of one value without bounds."""
    words = [f"option_{rng.randrange(1000)}" for _ in range(rng.randrange(2, 9))]
    kinds: list[dict[str, Any]] = [
        {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"enum": words},
        {"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "array", "items": {"type": "string"}},
    ]  # fmt: skip
    return rng.choice(kinds)


def bounded(rng: random.Random) -> dict[str, Any]:
    """A schema of one value with a bound."""
    few = rng.randrange(1, 12)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "minLength": few}, {"type": "string", "maxLength": 20 * few},
        {"type": "string", "pattern": f"^[A-Z]{{{few}}}-[0-9]{{4}}$"},
        {"type": "string", "format": rng.choice(["date-time", "uuid", "email", "uri", "date", "ipv4"])},
        {"type": "string", "pattern": "^[a-z][a-z0-9_]*$", "maxLength": 64},
        {"type": "integer", "minimum": 0, "maximum": 10**few}, {"type": "number", "exclusiveMinimum": 0},
        {"type": "array", "items": {"type": "string"}, "minItems": few},
    ]  # fmt: skip
    return rng.choice(kinds)


def record(rng: random.Random, bounds: bool, fields: int, depth: int) -> dict[str, Any]:
    """An object schema; some of its properties are objects, lists of them, or the whole schema again."""
    properties: dict[str, Any] = {}
    for index in range(fields):
        kind = rng.random()
        if depth and kind < 0.1:
            found = record(rng, bounds, rng.randrange(2, 8), depth - 1)
        elif depth and kind < 0.15:
            found = {"type": "array", "items": record(rng, bounds, rng.randrange(2, 8), depth - 1)}
        elif kind < 0.17:
            found = {"type": "array", "items": {"$ref": "#"}}
        else:
            found = bounded(rng) if bounds and rng.random() < 0.3 else plain(rng)
        properties[f"{rng.choice(['name', 'value', 'kind', 'created', 'x'])}_{index}"] = found
    required = [name for name in properties if rng.random() < 0.6]
    schema = {"type": "object", "properties": properties, "required": required}
    return {**schema, "additionalProperties": False} if rng.random() < 0.6 else schema


def generated(count: int) -> list[dict[str, Any]]:
    return [record(random.Random(seed), bool(seed % 2), 3 + seed * 57 // count, 3) for seed in range(count)]


def from_folder(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]
    return [schema for file in found if isinstance(schema := file.get("schema", file), dict)]


class Bench:
    """Both compilers over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.backend = LlguidanceBackend(vocabulary)
        self.mask = np.zeros(vocabulary.mask_words, np.int32)

    def ours(self, schema: dict[str, Any], *, tight: bool) -> float:
        began = clock()
        grammar = Grammar.json_schema(schema)
        check_limits(grammar)
        template = self.backend.compile(grammar)
        matcher = Matcher(template, template.min_tokens + (0 if tight else AMPLE), "close")
        matcher.fill_mask(self.mask)
        allowed = np.unpackbits(self.mask.view(np.uint8), bitorder="little")
        matcher.accept(int(np.flatnonzero(allowed)[0]), jump=False)
        return clock() - began

    def library(self, text: str) -> float:
        began = clock()
        lowered = llguidance.LLMatcher.grammar_from_json_schema(text)
        matcher = llguidance.LLMatcher(self.vocabulary.ll_tokenizer, lowered, log_level=0)
        matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return clock() - began

    def fastest(self, schema: dict[str, Any], rounds: int) -> dict[str, float] | None:
        """Seconds of each way; None if one of them refuses the schema."""
        text = json.dumps(schema)
        taken: dict[str, list[float]] = {"ours": [], "steered": [], "library": []}
        try:
            for _ in range(rounds):
                taken["library"].append(self.library(text))
                taken["ours"].append(self.ours(schema, tight=False))
                taken["steered"].append(self.ours(schema, tight=True))
        except (EngineError, ValueError):
            return None
        return {name: min(times) for name, times in taken.items()}


def measure(size: str, schemas: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    bench = Bench(vocabulary(size))
    bench.fastest(generated(8)[7], 1)  # imports and first uses
    groups: dict[str, list[dict[str, float]]] = {"all": [], "with bounds": [], "without": []}
    for schema in schemas:
        found = bench.fastest(schema, rounds)
        if found is not None:
            text = json.dumps(schema)
            groups["all"].append(found)
            groups["with bounds" if any(f'"{key}":' in text for key in BOUNDS) else "without"].append(found)
    bench.backend.close()
    report: dict[str, Any] = {"schemas": len(schemas), "compared": len(groups["all"])}
    for group, rows in groups.items():
        report[group] = {way: spread([row[way] for row in rows], 1e3) for way in ("ours", "steered", "library")}
    return report


def table(report: dict[str, Any]) -> str:
    lines = [f"{report['compared']} of {report['schemas']} schemas compiled by both; ms: p50 / p99 / worst / mean"]
    for group in ("all", "with bounds", "without"):
        for way, row in report[group].items():
            figures = " / ".join(f"{row[key]:.1f}" for key in ("p50", "p99", "max", "mean"))
            lines.append(f"  {group:<12} {way:<8} {figures}   ({row['count']})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=WIDTHS, default="151k")
    parser.add_argument("--schemas", type=int, default=200, help="generated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="of schemas in place of generated ones")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    schemas = generated(options.schemas) if options.folder is None else from_folder(options.folder)
    report = measure(options.size, schemas, options.rounds)
    print(json.dumps(report) if options.json else table(report))


if __name__ == "__main__":
    main()
