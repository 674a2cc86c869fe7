"""The texts of a case: its instances as JSON is usually laid out, and what must not be accepted."""

from __future__ import annotations

import json
from typing import Any

from .case import Case
from .mutate import broken_texts

MAX_INDENT = 40
"""Blanks at the beginning of a line that the engine's "flexible" whitespace allows."""


def layouts(instance: Any) -> list[str]:
    """Compact, with single spaces, and indented where the indentation stays within the bound."""
    indented = json.dumps(instance, ensure_ascii=False, indent=2)
    deepest = max(len(line) - len(line.lstrip(" ")) for line in indented.split("\n"))
    compact = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    spaced = json.dumps(instance, ensure_ascii=False)
    return [compact, spaced, *([indented] if deepest <= MAX_INDENT else [])]


def valid_texts(case: Case) -> list[str]:
    """Every valid instance in every layout, each text once."""
    return list(dict.fromkeys(text for instance in case.valid for text in layouts(instance)))


def invalid_texts(case: Case) -> list[str]:
    """Every invalid instance, the bad texts, and broken copies of the first valid instance."""
    dumped = [json.dumps(instance, ensure_ascii=False) for instance in case.invalid]
    broken = broken_texts(case.valid[0], case.schema) if case.valid else []
    return list(dict.fromkeys([*dumped, *case.bad_texts, *broken]))
