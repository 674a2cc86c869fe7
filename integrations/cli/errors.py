"""Exit codes, and the error for what only the command line can get wrong."""

from __future__ import annotations

FAILED = 1
USAGE = 2
INTERRUPTED = 130


class CliError(Exception):
    """Shown as one line on stderr; the process ends with `code`."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        self.code = code
        super().__init__(message)
