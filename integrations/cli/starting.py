"""Ctrl-C while a command starts: Python is at imports for a third of a second, where an interrupt would be a traceback
from anywhere, or lost in a callback."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

from asyncengine.integrations.cli.errors import INTERRUPTED


def _leave(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def end_at_interrupt() -> None:
    """Have Ctrl-C end the process at once until `interruptible` is called. Where SIGINT is ignored it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def interruptible() -> None:
    """From here on Ctrl-C raises `KeyboardInterrupt`, as ever, for there is something to put in order."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
