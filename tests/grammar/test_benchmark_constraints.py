"""The constraints of the benchmark accept their own samples, and nothing cut short."""

from __future__ import annotations

import pytest

from asyncengine.grammar import Grammar
from benchmarks.constraints import CONSTRAINTS, Constraint

from .oracle import accepts
from .schema_check import assert_valid

MAKE = {
    "regex": Grammar.regex, "choice": Grammar.choice, "json_schema": Grammar.json_schema, "lark": Grammar.lark,
}  # fmt: skip


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: constraint.name)
def test_samples_satisfy(constraint: Constraint) -> None:
    grammar = MAKE[constraint.kind](constraint.value)
    assert len(set(constraint.samples)) >= 3
    for sample in constraint.samples:
        if constraint.kind == "json_schema":
            assert_valid(sample, constraint.value)
        assert accepts(grammar, sample)
        assert not accepts(grammar, f"{sample[:-1]}\0")
