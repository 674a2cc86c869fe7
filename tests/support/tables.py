"""Tables of tests that are data: schemas, texts and templates with what is expected of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def table(file: str, name: str) -> Any:
    """The table of this name in `tables.json` beside a test's `__file__`. Each caller has its own."""
    return json.loads(Path(file).with_name("tables.json").read_text(encoding="utf-8"))[name]
