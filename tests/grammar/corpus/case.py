"""One schema with instances that satisfy it and instances that do not, each judged when it is made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ..schema_check import Checker
from .mutate import mutations

MUTANTS = 8
"""Instances spoilt by machine kept per case, besides those given by hand."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    schema: dict[str, Any]
    valid: list[Any]
    """Properties in the order of the schema: a grammar fixes it."""
    invalid: list[Any]
    category: str
    llguidance: str = ""
    """ "refuses:KEYWORD" where llguidance, asked to be exact, does not compile the schema; else ""."""
    bad_texts: list[str] = field(default_factory=list)
    """Texts that are not in the language and that `json.dumps` would not write."""

    @property
    def refused(self) -> bool:
        return bool(self.llguidance)


class CorpusError(AssertionError):
    """An instance of the corpus is not what its author said."""


def make(
    category: str,
    name: str,
    schema: dict[str, Any],
    valid: Iterable[Any],
    invalid: Iterable[Any] = (),
    *,
    refuses: str = "",
    bad_texts: Iterable[str] = (),
) -> Case:
    """A case with every instance judged. Raises `CorpusError` where the author and the validator disagree."""
    full_name = f"{category}/{name}"
    checker = Checker(schema)
    good, bad, texts = list(valid), list(invalid), list(bad_texts)
    for instance in good:
        if fault := checker.fault(instance):
            raise CorpusError(f"{full_name}: {instance!r} should satisfy the schema: {fault}")
    for instance in bad:
        if checker.fault(instance) is None:
            raise CorpusError(f"{full_name}: {instance!r} should not satisfy the schema")
    for text in texts:
        if checker.text_fault(text) is None:
            raise CorpusError(f"{full_name}: the text {text!r} should not satisfy the schema")
    bad += _mutants(full_name, checker, good, bad)
    return Case(full_name, schema, good, bad, category, f"refuses:{refuses}" if refuses else "", texts)


def _mutants(name: str, checker: Checker, good: list[Any], bad: list[Any]) -> list[Any]:
    """Up to MUTANTS spoilt copies of the valid instances, the same in every run."""
    random = Random(name)
    seen = {json.dumps(instance) for instance in bad}
    found: list[Any] = []
    for instance in good[:3]:
        candidates = list(mutations(instance))
        random.shuffle(candidates)
        for candidate in candidates[:40]:
            if len(found) == MUTANTS:
                return found
            text = json.dumps(candidate)
            if text not in seen and checker.fault(candidate) is not None:
                seen.add(text)
                found.append(candidate)
    return found
