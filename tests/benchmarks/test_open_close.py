"""A closed engine leaves no object in the process (contract 13), however it was hosted. `benchmarks.open_close` itself
measures 200 cycles and resident memory."""

from __future__ import annotations

import gc
import threading
from collections import Counter

import pytest

from asyncengine import SamplingParams
from asyncengine.grammar import Grammar
from benchmarks.open_close import HOSTINGS, SCHEMA

WARM, LAST = 2, 3
"""Cycles after which kernels are compiled and caches of a whole process are filled; the last one."""
LIBRARIES = ("asyncengine", "jinja2", "llguidance", "tokenizers", "torch", "transformers", "threading")
"""Libraries of whose objects an engine is made."""


def left() -> Counter[str]:
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    return Counter(
        {
            f"{kind.__module__}.{kind.__qualname__}": count
            for kind, count in kinds.items()
            if str(kind.__module__).startswith(LIBRARIES)
        }
    )


def join_others(known: set[threading.Thread]) -> None:
    """Wait for threads that may be about to end on a busy machine. By itself: no variable keeps the last one."""
    for thread in {*threading.enumerate()} - known:
        thread.join(60)


@pytest.mark.parametrize("hosting", HOSTINGS)
def test_nothing_of_a_closed_engine_stays(hosting: str) -> None:
    found: dict[int, Counter[str]] = {}
    params = SamplingParams(max_tokens=64, grammar=Grammar.json_schema(SCHEMA))

    before: set[threading.Thread] = set()

    def note(cycle: int) -> None:
        if cycle == WARM:
            before.update(threading.enumerate())
        elif cycle == LAST:
            join_others(before)
        if cycle in (WARM, LAST):
            found[cycle] = left()

    HOSTINGS[hosting](LAST, params, note)
    assert found[LAST] - found[WARM] == Counter()
