"""The ends of a command: exit codes, the error of a wrong command line, and Ctrl-C while it starts.

Python imports modules for a third of a second: an interrupt then would print a traceback, or be lost in a callback.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class CliError(Exception):
    """Shown as one line on stderr; the process ends with `code`."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        self.code = code
        super().__init__(message)


def _leave(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def end_at_interrupt() -> None:
    """Have Ctrl-C end the process at once until `interruptible` is called. Where SIGINT is ignored it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def interruptible() -> None:
    """Have Ctrl-C raise `KeyboardInterrupt` from here on, as usual, so that the command can clean up."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
