"""Model output on its way to a terminal or a script."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, TextIO

from asyncengine.outputs import Completion

_CONTROLS = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Without control characters: a model must not be able to move the cursor or retitle the window."""
    return text.translate(_CONTROLS)


def write(text: str, stream: TextIO | None = None) -> None:
    """Print a piece of model output as it comes; a terminal gets no control characters, a pipe gets every byte."""
    out = stream or sys.stdout
    out.write(printable(text) if out.isatty() else text)
    out.flush()


def as_json(completion: Completion) -> dict[str, Any]:
    """A completion as plain JSON data; bytes become lists of integers."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(completion))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
