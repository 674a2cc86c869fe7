"""One schema with instances that satisfy it and instances that do not, each judged when it is made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
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
    refuses: str = ""
    """The keyword for which llguidance, asked to be exact, does not compile the schema; else ""."""
    bad_texts: list[str] = field(default_factory=list)
    """Texts that are not in the language and that `json.dumps` would not write."""

    @property
    def refused(self) -> bool:
        return bool(self.refuses)


class CorpusError(AssertionError):
    """An instance of the corpus is not what its author said."""


@cache
def read() -> list[dict[str, Any]]:
    """Rows of `cases.json`: a name, a schema, instances; `refuses` names the keyword for which llguidance refuses."""
    rows: list[dict[str, Any]] = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))
    return rows


def written_cases() -> Iterator[Case]:
    """The cases of `cases.json`, judged."""
    return (make(**row) for row in read())


def make(
    name: str,
    schema: dict[str, Any],
    valid: list[Any],
    invalid: Iterable[Any] = (),
    *,
    refuses: str = "",
    bad_texts: Iterable[str] = (),
) -> Case:
    """A case with every instance judged. Raises `CorpusError` where the author and the validator disagree."""
    checker = Checker(schema)
    bad, texts = list(invalid), list(bad_texts)
    for instance in valid:
        if fault := checker.fault(instance):
            raise CorpusError(f"{name}: {instance!r} should satisfy the schema: {fault}")
    for instance in bad:
        if checker.fault(instance) is None:
            raise CorpusError(f"{name}: {instance!r} should not satisfy the schema")
    for text in texts:
        if checker.text_fault(text) is None:
            raise CorpusError(f"{name}: the text {text!r} should not satisfy the schema")
    bad += _mutants(name, checker, valid, bad)
    return Case(name, schema, valid, bad, name.partition("/")[0], refuses, texts)


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
