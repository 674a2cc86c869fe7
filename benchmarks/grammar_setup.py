"""Common parts of the grammar benchmarks: real vocabularies, samples as tokens, distributions.

The tokenizers of real size are those of the tests (`tests/support/big_tokenizers.py`), cut from one that
llama-index-core ships; nothing is downloaded. So this needs a checkout, llama-index-core, tiktoken and pytest.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import llguidance

from asyncengine.grammar import Grammar
from asyncengine.grammar.complaints import explain
from asyncengine.grammar.vocabulary import Vocabulary
from benchmarks.constraints import Constraint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

WIDTHS = {"32k": (32_000, 32_000), "151k": (151_650, 151_936)}
"""Tokens, and logits of the model they are for (Qwen's are wider than its vocabulary)."""

Layout = Literal["compact", "spaced", "indented"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "compact": {"separators": (",", ":")},
    "spaced": {"separators": (", ", ": ")},
    "indented": {"indent": 2},
}
"""Ways to write a sample's JSON; `spaced` is what `json.dumps` does by default."""


def vocabulary(size: str) -> Vocabulary:
    """A real one, warmed up: "32k" or "151k"."""
    from support.big_tokenizers import big_tokenizer

    tokens, width = WIDTHS[size]
    found = big_tokenizer(tokens)
    made = Vocabulary(found.token_bytes, found.eos_ids, found.special_ids, width, found.encode)
    made.warm_up()
    return made


def grammar_of(constraint: Constraint, **options: Any) -> Grammar:
    """`options`: `backend`, and for JSON `whitespace`."""
    make = {"regex": Grammar.regex, "choice": Grammar.choice, "json_schema": Grammar.json_schema, "lark": Grammar.lark}
    if constraint.kind == "lark":
        options.pop("backend", None)
    if constraint.kind != "json_schema":
        options.pop("whitespace", None)
    return make[constraint.kind](constraint.value, **options)  # type: ignore[operator]


def laid_out(constraint: Constraint, layout: str) -> list[str]:
    """The constraint's samples; JSON written as `layout` says."""
    if constraint.kind != "json_schema":
        return list(constraint.samples)
    style = LAYOUTS[layout]
    return [json.dumps(json.loads(sample), ensure_ascii=False, **style) for sample in constraint.samples]


def library_matcher(grammar: Grammar, text: str, tokenizer: Any) -> Any:
    """The library's own matcher of a compiled grammar's text. Raises what `explain` makes of its complaint."""
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise explain(grammar, matcher.get_error())
    return matcher


def spread(values: Iterable[float], scale: float = 1.0) -> dict[str, float]:
    """Mean, median, 99th percentile and largest, each times `scale`; zeros of nothing."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "mean": statistics.fmean(ordered) * scale,
        "p50": ordered[last // 2] * scale,
        "p99": ordered[min(last, len(ordered) * 99 // 100)] * scale,
        "max": ordered[last] * scale,
    }
