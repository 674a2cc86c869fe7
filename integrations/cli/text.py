"""Model output on its way to a terminal or a script."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from asyncengine.integrations.cli.exits import CliError

_CONTROLS = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without control characters: a model must not be able to move the cursor or retitle the window."""
    return text.translate(_CONTROLS)


def write(text: str, stream: TextIO | None = None) -> None:
    """Print a piece of model output as it comes; a terminal gets no control characters, a pipe gets every byte."""
    out = stream or sys.stdout
    out.write(printable(text) if out.isatty() else text)
    out.flush()


def write_json(data: Any) -> None:
    """Print one JSON document; bytes become lists of integers, and characters that the output's encoding lacks are
    escaped."""
    unicode = (sys.stdout.encoding or "utf-8").lower().replace("-", "").startswith("utf")
    print(json.dumps(data, ensure_ascii=not unicode, default=list))


def read_text(field: str, name: str) -> str:
    """The text in the file `name`, or on stdin for "-". Raises `CliError` for one that cannot be read."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{field}: cannot read {name}: {error}") from error


def prepare_streams() -> bool:
    """Make the standard streams usable: characters that an encoding lacks are printed as "?", a closed stdin is empty,
    a closed stderr discards. Returns False if stdout is closed."""
    # Real files, in the order of their descriptors: else the next file opened would get 2, to which libraries print.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    return sys.stdout is not None


def drop_output() -> None:
    """Discard further output: nothing can be printed, and the interpreter must not complain when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):  # no real file: a test's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
