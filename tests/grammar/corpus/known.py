"""Differences between llguidance 1.9.1 and JSON Schema, one line of `differences.json` each.

LOOSE are texts it lets through although the schema forbids them: faults of the library, or limits it documents. NARROW
are texts it will not write although the schema allows them: no harm, but a teacher-forced check must not use them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    schema: dict[str, Any]
    text: str
    why: str


_READ = json.loads(Path(__file__).with_name("differences.json").read_text(encoding="utf-8"))
LOOSE = [Difference(**row) for row in _READ["loose"]]
NARROW = [Difference(**row) for row in _READ["narrow"]]
