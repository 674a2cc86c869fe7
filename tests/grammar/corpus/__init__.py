"""JSON schemas of every supported kind, each with instances that satisfy it and instances that do not.

    for case in corpus():
        ...  # case.schema, case.valid, case.invalid, case.bad_texts, case.refused

Deterministic: the same cases, in the same order, in every run. Do not change what a case holds: it is shared.
"""

from __future__ import annotations

from functools import cache

from .arrays import arrays
from .case import Case, CorpusError
from .combined import combined
from .known import LOOSE, NARROW, Difference
from .models import models
from .mutate import broken_texts
from .objects import objects
from .randomised import random_cases
from .realistic import realistic, tools
from .recursive import recursion
from .refused import refused
from .scalars import scalars
from .strings import strings
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
    "tools",
    "valid_texts",
]


@cache
def _all() -> tuple[Case, ...]:
    families = (scalars, strings, arrays, objects, combined, recursion, realistic, models, refused)
    cases = [case for family in families for case in family()]
    cases += random_cases(RANDOM_CASES)
    return tuple(cases)


def corpus() -> list[Case]:
    """Every case, names unique."""
    return list(_all())


def compilable() -> list[Case]:
    """The cases llguidance compiles, asked to be exact."""
    return [case for case in _all() if not case.refused]
