"""Cases of a test that stand in a JSON file beside it, under its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def cases_of(file: str) -> Any:
    """The content of the JSON file beside `file`, a test's `__file__`."""
    return json.loads(Path(file).with_suffix(".json").read_text(encoding="utf-8"))
