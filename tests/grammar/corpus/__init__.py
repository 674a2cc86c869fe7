"""JSON schemas of every supported kind, each with instances that satisfy it and instances that do not.

    for case in corpus():
        ...  # case.schema, case.valid, case.invalid, case.bad_texts, case.refused

`cases.json` has those that people wrote (types and limits, properties, unions, tools, documents, what pydantic writes
for models), `randomised.py` draws more of their parts. The same cases, in the same order, in every run. Do not change
what a case holds: it is shared.
"""

from __future__ import annotations

from functools import cache

from .case import Case, CorpusError, written_cases
from .known import LOOSE, NARROW, Difference
from .mutate import broken_texts
from .randomised import random_cases
from .texts import invalid_texts, valid_texts

RANDOM_CASES = 240

__all__ = [
    "LOOSE",
    "NARROW",
    "Case",
    "CorpusError",
    "Difference",
    "broken_texts",
    "compilable",
    "corpus",
    "invalid_texts",
    "valid_texts",
]


@cache
def corpus() -> tuple[Case, ...]:
    """Every case, names unique."""
    return (*written_cases(), *random_cases(RANDOM_CASES))


def compilable() -> list[Case]:
    """The cases llguidance compiles, asked to be exact."""
    return [case for case in corpus() if not case.refused]
