"""Cases of a test that stand in a JSON file beside it, under its name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def cases_of(file: str) -> Any:
    """The content of the JSON file beside `file`, a test's `__file__`."""
    return json.loads(Path(file).with_suffix(".json").read_text(encoding="utf-8"))


def spelled(parts: str | Sequence[Any]) -> str:
    """The text itself, or one that is too long to be written, made of parts. A part is a text, or a text with the
    arguments of `range`, which comes once for each number: `{n}` in it is that number, and `{n+1}` the next."""
    if isinstance(parts, str):
        return parts
    lists = [[part, 1] if isinstance(part, str) else part for part in parts]
    return "".join(
        text.replace("{n}", str(n)).replace("{n+1}", str(n + 1)) for text, *numbers in lists for n in range(*numbers)
    )
