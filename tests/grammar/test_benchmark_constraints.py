"""The constraints of the benchmark accept their own samples, and nothing cut short."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from support.schema_check import assert_valid

from .bytes_tokenizer import END, Bytes


def load() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "constraints.py"
    spec = importlib.util.spec_from_file_location("benchmark_constraints", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


CONSTRAINTS = load().CONSTRAINTS
NAMES = (
    "regex_simple", "regex_email", "choice_5", "json_small", "json_medium", "json_large", "json_recursive",
    "json_enum200", "tools10", "json_maxlen", "json_formats", "any_json", "ebnf_arith", "ebnf_sql",
)  # fmt: skip


def grammar_of(constraint: Any) -> str:
    if constraint.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(constraint.value))
    if constraint.kind == "choice":
        return "start: " + " | ".join(f'"{choice}"' for choice in constraint.value)
    return str(grammar_from(constraint.kind, constraint.value))


def test_all_are_there() -> None:
    assert tuple(constraint.name for constraint in CONSTRAINTS) == NAMES


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=NAMES)
def test_samples_satisfy(constraint: Any) -> None:
    assert len(set(constraint.samples)) >= 3
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=END + 1, eos_token=[END], slices=[])
    matcher = LLMatcher(tokenizer, grammar_of(constraint), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for sample in constraint.samples:
        if constraint.kind == "json_schema":
            assert_valid(sample, constraint.value)
        matcher.reset()
        data = list(sample.encode())
        assert matcher.try_consume_tokens(data) == len(data), sample
        assert matcher.is_accepting(), sample
        matcher.reset()
        assert matcher.try_consume_tokens([*data[:-1], 0]) < len(data)
